"""Owns that a local node uses no more memory than `resources.memory`: agent, ranks and all they start, in one group.

The group is written down in the node's folder before anything is in it, so that whoever takes the run over, or sweeps
up after it, finds it; the groups that agents make for attempts (agent/orphans.py) are written down there as well.
"""

from __future__ import annotations

import re
from pathlib import Path

from holdfast.host.cgroups import (
    PREFIX,
    CgroupParent,
    all_members,
    confine,
    kill,
    record_group,
    recorded_groups,
    remove,
)

_NODE = re.compile(r"node(\d+)\.(\d+)")


def limit_agent(pid: int, limit_bytes: int, node_folder: Path, name: str, cgroup_parent: CgroupParent) -> None:
    """Hold a node's agent, and what it will start, to so many bytes; raises OSError."""
    record_group(node_folder, cgroup_parent.group(name))
    confine(pid, cgroup_parent.group(name), limit_bytes, is_v2=cgroup_parent.is_v2)


def processes(node_folder: Path) -> list[int]:
    """The processes in a node's groups, those included that have hidden all other traces."""
    return [pid for group in _cgroups(node_folder).values() for pid in all_members(group)]


def kill_all(node_folder: Path) -> None:
    """Kill the processes in a node's groups where the kernel can do so at once."""
    for group in _cgroups(node_folder).values():
        kill(group)


def remove_cgroups(node_folder: Path) -> None:
    """Remove a node's groups once its processes have ended."""
    for written, group in _cgroups(node_folder).items():
        remove(group)
        written.unlink(missing_ok=True)


def _cgroups(node_folder: Path) -> dict[Path, Path]:
    """The node's groups, by their notes; what a copy of another run's folder notes is left out."""
    node = _NODE.fullmatch(node_folder.name)
    if node is None:
        return {}
    run = re.escape(node_folder.parent.parent.name)
    # What `allow` is given, or of an attempt: replica, attempt and agent (agent/orphans.py).
    named = re.compile(rf"{PREFIX}{run}-{node[1]}(?:\.{node[2]}|(?:-\d+){{3}})")
    return {written: group for written, group in recorded_groups(node_folder).items() if named.fullmatch(group.name)}
