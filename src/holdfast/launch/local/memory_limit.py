"""Limits a local node's memory to `resources.memory`, with one cgroup for the agent, its ranks and their children.

The cgroup is recorded in the node's folder before it has members, so that a new controller or a cleanup finds it. The
cgroups that agents make for attempts (agent/orphans.py) are recorded there too.
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
    """Limit a node's agent and its future children to `limit_bytes`; raises OSError."""
    record_group(node_folder, cgroup_parent.group(name))
    confine(pid, cgroup_parent.group(name), limit_bytes, is_v2=cgroup_parent.is_v2)


def processes(node_folder: Path) -> list[int]:
    """The processes in a node's cgroups, including those that are not found any other way."""
    return [pid for group in _cgroups(node_folder).values() for pid in all_members(group)]


def kill_all(node_folder: Path) -> None:
    """Kill the processes in a node's cgroups atomically, if the kernel can."""
    for group in _cgroups(node_folder).values():
        kill(group)


def remove_cgroups(node_folder: Path) -> None:
    """Remove a node's cgroups once its processes have ended."""
    for written, group in _cgroups(node_folder).items():
        remove(group)
        written.unlink(missing_ok=True)


def _cgroups(node_folder: Path) -> dict[Path, Path]:
    """The node's cgroups by record file, without records that came with a copy of another run's folder."""
    node = _NODE.fullmatch(node_folder.name)
    if node is None:
        return {}
    run = re.escape(node_folder.parent.parent.name)
    # The name given to `limit_agent`, or an attempt's: replica, attempt and agent (agent/orphans.py).
    named = re.compile(rf"{PREFIX}{run}-{node[1]}(?:\.{node[2]}|(?:-\d+){{3}})")
    return {written: group for written, group in recorded_groups(node_folder).items() if named.fullmatch(group.name)}
