"""Owns where a process's memory group (cgroup v1 or v2) is, and how a process is held to a limit by a group of its own.

Groups without a limit (v2 only) keep track of what an attempt starts, whatever it does to its environment and session.
Each group is noted in a folder before it is made, so that whoever cleans up after a dead process finds it.

Refuses to own what is read from a group: kills (agent/oom.py) and pressure (agent/memory_pressure.py).
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path

from holdfast.host.files import read_line

KILL_COUNTERS = ("memory.events", "memory.oom_control")
"""The files that count processes ended for memory: of v2, of v1. Every group but the root of v2 has one of them."""

PREFIX = "holdfast-"
"""Of the names of groups that are made here."""

_REMOVE_TIMEOUT_S, _REMOVE_POLL_S = 2.0, 0.01
_NOTE_PREFIX = "group"
"""Beginning of the names of notes."""


def memory_group(root: Path = Path("/")) -> Path | None:
    """The folder of this process's memory cgroup (v1 or v2); None where there is none to be seen.

    A group of v2 to which the one above hands no memory controller counts with that one.
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
        # In a container the path may be the host's, while what is mounted is the container's own group.
        own = top / path.lstrip("/")
        for folder in (own, *own.parents, top):
            if folder.is_relative_to(top) and any((folder / name).is_file() for name in KILL_COUNTERS):
                return folder
    return None


@dataclass(frozen=True, kw_only=True)
class CgroupParent:
    """Where groups with a limit can be made."""

    path: Path
    is_v2: bool
    """Whether it is of cgroup v2."""

    def group(self, name: str) -> Path:
        """The folder of a group that may be made here."""
        return self.path / f"{PREFIX}{name}"


def cgroup_parent(root: Path = Path("/")) -> CgroupParent | str:
    """Where this process can make groups, or why it cannot.

    With v1 within its own group; with v2 beside it, because there a group that has processes divides nothing.
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
    # Whoever moves a process must be allowed to write the group above both places.
    if not (os.access(above, os.W_OK | os.X_OK) and os.access(above / "cgroup.procs", os.W_OK)):
        return f"{above} may not be written"
    return CgroupParent(path=above, is_v2=second)


def confine(pid: int, group: Path, limit_bytes: int, *, is_v2: bool) -> None:
    """Hold a process, and all it starts from now on, to a limit, swap included; makes the group. Raises OSError."""
    group.mkdir(exist_ok=True)
    # v1 wants the limit without swap to be the lower one at any time, so it comes first.
    limit, swap, allowed = (
        ("memory.max", "memory.swap.max", 0)
        if is_v2
        else ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes", limit_bytes)
    )
    (group / limit).write_text(f"{limit_bytes}")
    with contextlib.suppress(FileNotFoundError, PermissionError):  # a kernel that does not count swap
        (group / swap).write_text(f"{allowed}")
    (group / "cgroup.procs").write_text(f"{pid}")


def tracking_group(name: str, root: Path = Path("/")) -> Path | None:
    """A group without a limit that this process may make below its own (cgroup v2); what is in it cannot leave it.

    None where it cannot: there is no cgroup v2, it is read-only or another user's, or its own group hands controllers
    down, in which case the kernel lets no group beside processes of its own have any.
    """
    own = _own_unified_group(root)
    if own is None or _words(own / "cgroup.subtree_control"):
        return None
    writable = os.access(own, os.W_OK | os.X_OK) and os.access(own / "cgroup.procs", os.W_OK)
    return own / f"{PREFIX}{name}" if writable else None


def _own_unified_group(root: Path) -> Path | None:
    """The folder of this process's group of cgroup v2, also where v1 has the controllers."""
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
    # In a container the path may be the host's, while what is mounted is the container's own group.
    return next((folder for folder in (top / path.lstrip("/"), top) if os.getpid() in members(folder)), None)


def enter(group: Path) -> None:
    """Move this process to a group; what it starts from now on is in it too. Raises OSError."""
    (group / "cgroup.procs").write_text("0")


def members(group: Path) -> list[int]:
    """The processes of a group; none when it is gone."""
    return [int(word) for word in _words(group / "cgroup.procs")]


def all_members(group: Path) -> list[int]:
    """The processes of a group and of those that its processes have made below it."""
    return [pid for folder in (group, *_below(group)) for pid in members(folder)]


def kill(group: Path) -> None:
    """Kill every process of a group of cgroup v2 at once, so that none can fork away; nothing happens without v2."""
    try:
        (group / "cgroup.kill").write_text("1")
    except OSError:  # before Linux 5.14: nothing forks in a frozen group, and what is frozen can be killed
        with contextlib.suppress(OSError):
            (group / "cgroup.freeze").write_text("1")


def _below(group: Path) -> list[Path]:
    """Groups below a group, the deepest first."""
    found = [Path(folder) for folder, _, _ in os.walk(group)]
    return found[:0:-1]


def remove(group: Path) -> None:
    """Remove a group whose processes have ended; the kernel may take a moment to see that they have."""
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
    """Write down in a folder that a group may have been made; the note."""
    path = folder / f"{_NOTE_PREFIX}{name}"
    path.write_text(str(group))
    return path


def recorded_groups(folder: Path) -> dict[Path, Path]:
    """The groups that were written down in a folder, by their notes; one that holdfast never makes is left out."""
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
