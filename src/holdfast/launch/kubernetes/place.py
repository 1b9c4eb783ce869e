"""Owns where in the world a run on Kubernetes is, written down for whoever asks for it later."""

from __future__ import annotations

from typing import Any

import msgspec

from holdfast.folder import RunFolder
from holdfast.host.files import put, read_small
from holdfast.job.accepted import damaged_file


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """A run's place, as its folder here knows it."""

    context: str | None
    """The kubeconfig's context; None is the current one."""
    namespace: str
    owner: str
    """Path of the object that stands for the run: removing it removes the run."""
    controller: dict[str, Any] | None = None
    """The ReplicaSet of its controller as it was made, so that it can be made again; none where no agent is."""


def record(folder: RunFolder, place: Place) -> None:
    """Write down where a run is."""
    put(folder.place, msgspec.json.encode(place))


def recorded(folder: RunFolder) -> Place:
    """Where a run is; raises HoldfastError where that is not what was written."""
    try:
        return msgspec.json.decode(read_small(folder.place), type=Place)
    except (OSError, msgspec.MsgspecError) as error:
        raise damaged_file(folder.place, error) from error
