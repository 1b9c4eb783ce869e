"""Finds a process's memory cgroup (v1 or v2), and creates cgroups that limit or track processes.

Cgroups without a limit (v2 only) track what an attempt starts, whatever it does to its environment and session. Each
cgroup is recorded in a folder before it is created, so that cleanup after a dead process finds it. OOM kills are read
in agent/oom.py, memory pressure in watch/memory_pressure.py.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from msgspec import Struct

from holdfast.host.files import read_line

KILL_COUNTERS = ("memory.events", "memory.oom_control")
"""Files that count OOM kills, in v2 and v1. Every cgroup except the root of v2 has one of them."""

PREFIX = "holdfast-"
"""Name prefix of cgroups that holdfast creates."""

_REMOVE_TIMEOUT_S, _REMOVE_POLL_S = 2.0, 0.01
_NOTE_PREFIX = "group"
"""Name prefix of the record files."""


def memory_group(root: Path = Path("/")) -> Path | None:
    """The folder of this process's memory cgroup (v1 or v2); None if none is visible.

    A v2 cgroup whose parent does not delegate the memory controller counts as its parent.
    """
    try:
        groups = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    mount = root / "sys/fs/cgroup"
    for group in groups:
        _, controllers, path = group.split(":", 2)
        if controllers == "":
            top = mount
        elif "memory" in controllers.split(","):
            top = mount / "memory"
        else:
            continue
        # In a container the path may be the host's, while the mount is the container's own cgroup.
        own = top / path.lstrip("/")
        for folder in (own, *own.parents, top):
            if folder.is_relative_to(top) and any((folder / name).is_file() for name in KILL_COUNTERS):
                return folder
    return None


class CgroupParent(Struct, frozen=True, kw_only=True):
    """A cgroup below which holdfast can create cgroups with a limit."""

    path: Path
    is_v2: bool
    """Whether it is cgroup v2."""

    def group(self, name: str) -> Path:
        """The folder of a child cgroup."""
        return self.path / f"{PREFIX}{name}"


def cgroup_parent(root: Path = Path("/")) -> CgroupParent | str:
    """The cgroup below which this process can create cgroups, or the reason why it cannot.

    With v1 this is its own cgroup; with v2 its parent, because a v2 cgroup with processes cannot delegate controllers.
    """
    own = memory_group(root)
    if own is None:
        return "there is no memory group (cgroup) to be seen here"
    second = (own / "memory.events").is_file()
    above = own.parent if second else own
    if second and own == root / "sys/fs/cgroup":
        return f"{own} has processes, and a group of cgroup v2 that has some cannot be divided"
    if second and "memory" not in _words(above / "cgroup.subtree_control"):
        return f"{above} does not divide memory (cgroup.subtree_control)"
    # Moving a process requires write access to the common ancestor of both cgroups.
    if not (os.access(above, os.W_OK | os.X_OK) and os.access(above / "cgroup.procs", os.W_OK)):
        return f"{above} may not be written"
    return CgroupParent(path=above, is_v2=second)


def confine(pid: int, group: Path, limit_bytes: int, *, is_v2: bool) -> None:
    """Limit the memory and swap of a process and all it starts from now on; creates the cgroup. Raises OSError."""
    group.mkdir(exist_ok=True)
    # v1 requires the limit without swap to be the lower one at any time, so it comes first.
    limit, swap, allowed = (
        ("memory.max", "memory.swap.max", 0)
        if is_v2
        else ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes", limit_bytes)
    )
    (group / limit).write_text(f"{limit_bytes}")
    with contextlib.suppress(FileNotFoundError, PermissionError):  # a kernel without swap accounting
        (group / swap).write_text(f"{allowed}")
    (group / "cgroup.procs").write_text(f"{pid}")


def tracking_group(name: str, root: Path = Path("/")) -> Path | None:
    """Create a cgroup without a limit below this process's own (cgroup v2); its processes cannot leave it.

    None if it cannot: there is no cgroup v2, it is read-only or another user's, or its own cgroup delegates
    controllers, in which case the kernel allows processes only in leaf cgroups.
    """
    own = _own_unified_group(root)
    if own is None or _words(own / "cgroup.subtree_control"):
        return None
    writable = os.access(own, os.W_OK | os.X_OK) and os.access(own / "cgroup.procs", os.W_OK)
    return own / f"{PREFIX}{name}" if writable else None


def _own_unified_group(root: Path) -> Path | None:
    """The folder of this process's v2 cgroup, also if v1 has the controllers."""
    try:
        groups = (root / "proc/self/cgroup").read_text().splitlines()
        mounts = (root / "proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return None
    path = next((group.removeprefix("0::") for group in groups if group.startswith("0::")), None)
    mount = next((line.split()[4] for line in mounts if " - cgroup2 " in line), None)
    if path is None or mount is None:
        return None
    top = root / mount.lstrip("/")
    # In a container the path may be the host's, while the mount is the container's own cgroup.
    return next((folder for folder in (top / path.lstrip("/"), top) if os.getpid() in members(folder)), None)


def enter(group: Path) -> None:
    """Move this process to a cgroup; what it starts from now on is in it too. Raises OSError."""
    (group / "cgroup.procs").write_text("0")


def members(group: Path) -> list[int]:
    """The processes of a cgroup; empty if it is gone."""
    return [int(word) for word in _words(group / "cgroup.procs")]


def all_members(group: Path) -> list[int]:
    """The processes of a cgroup and of its descendants."""
    return [pid for folder in (group, *_below(group)) for pid in members(folder)]


def kill(group: Path) -> None:
    """Kill every process of a v2 cgroup in one operation, so that none can fork away; does nothing without v2."""
    try:
        (group / "cgroup.kill").write_text("1")
    except OSError:  # before Linux 5.14: nothing forks in a frozen cgroup, and frozen processes can be killed
        with contextlib.suppress(OSError):
            (group / "cgroup.freeze").write_text("1")


def _below(group: Path) -> list[Path]:
    """Descendants of a cgroup, deepest first."""
    found = [Path(folder) for folder, _, _ in os.walk(group)]
    return found[:0:-1]


def remove(group: Path) -> None:
    """Remove a cgroup whose processes have ended; retries, since the kernel may take a moment to notice."""
    deadline = time.monotonic() + _REMOVE_TIMEOUT_S
    while True:
        try:
            for folder in (*_below(group), group):
                with contextlib.suppress(FileNotFoundError):
                    folder.rmdir()
            return
        except OSError:
            if time.monotonic() >= deadline:
                return
            time.sleep(_REMOVE_POLL_S)


def record_group(folder: Path, group: Path, name: str = "") -> Path:
    """Record in a folder that a cgroup may have been created; returns the record file."""
    path = folder / f"{_NOTE_PREFIX}{name}"
    path.write_text(str(group))
    return path


def recorded_groups(folder: Path) -> dict[Path, Path]:
    """The recorded cgroups of a folder, by record file; skips paths that holdfast never creates."""
    found: dict[Path, Path] = {}
    for path in sorted(folder.glob(f"{_NOTE_PREFIX}*")):
        with contextlib.suppress(OSError, ValueError):
            group = Path(read_line(path))
            if group.name.startswith(PREFIX) and ".." not in group.parts:
                found[path] = group
    return found


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []
