"""Owns that a local node uses no more memory than `resources.memory`: agent, ranks and all they start, in one group.

The group is written down in the node's folder before anything is in it, so that whoever takes the run over, or sweeps
up after it, finds it.
"""

from __future__ import annotations

from pathlib import Path

from holdfast.host.cgroups import Ground, confine, dissolve, members

_NOTE = "group"


def allow(pid: int, limit_bytes: int, node_folder: Path, name: str, where: Ground) -> None:
    """Hold a node's agent, and what it will start, to so many bytes; raises OSError."""
    (node_folder / _NOTE).write_text(str(where.group(name)))
    confine(pid, where.group(name), limit_bytes, second=where.second)


def processes(node_folder: Path) -> list[int]:
    """The processes of a node that is held to a limit, those included that have hidden all other traces."""
    group = _group(node_folder)
    return members(group) if group else []


def clear(node_folder: Path) -> None:
    """Remove a node's group once its processes have ended."""
    if group := _group(node_folder):
        dissolve(group)
        (node_folder / _NOTE).unlink(missing_ok=True)


def _group(node_folder: Path) -> Path | None:
    try:
        return Path((node_folder / _NOTE).read_text())
    except OSError:
        return None
