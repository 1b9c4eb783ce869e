"""Owns what an envoy is told to make, as it travels to it."""

from __future__ import annotations

from typing import Any

import msgspec


class ClusterAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Where objects are to be made."""

    context: str | None
    """The kubeconfig's context; None is the current one."""
    namespace: str


class SubmitRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The objects of one run, and whose folder the answer is for."""

    run_dir: str
    prerequisites: tuple[dict[str, Any], ...]
    """What must be there first."""
    owner: dict[str, Any]
    """What stands for the run: whoever removes it removes the rest."""
    owned: tuple[dict[str, Any], ...]
