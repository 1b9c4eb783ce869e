"""Owns what a lab writes down about itself, so that whoever comes later can show it or end it."""

from __future__ import annotations

from pathlib import Path

import msgspec

from holdfast.host.processes import ProcessId
from lab.kubelet.nodes import NodeSpec

_FILE = "lab.json"


class State(msgspec.Struct, frozen=True, kw_only=True):
    """What a lab is made of."""

    ports: dict[str, int]
    data: str
    """etcd's folder."""
    nodes: tuple[NodeSpec, ...]
    tied: bool
    """Whether it dies with whoever started it."""
    processes: dict[str, ProcessId] = {}
    """By the name of the program."""
    ready: bool = False
    """Whether its start came to its end."""

    def with_process(self, name: str, process: ProcessId) -> State:
        return msgspec.structs.replace(self, processes=self.processes | {name: process})


def load(folder: Path) -> State | None:
    """What the lab in this folder is made of; None where there is none, or one of another version."""
    try:
        return msgspec.json.decode((folder / _FILE).read_bytes(), type=State)
    except (FileNotFoundError, msgspec.MsgspecError):
        return None


def save(folder: Path, state: State) -> None:
    """Write it down, whole or not at all."""
    fresh = folder / f"{_FILE}.new"
    fresh.write_bytes(msgspec.json.encode(state))
    fresh.replace(folder / _FILE)
