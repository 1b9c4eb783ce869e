"""Owns where a process's memory group (cgroup v1 or v2) is, and how a process is held to a limit by a group of its own.

Refuses to own what is read from a group: kills (agent/memory.py) and pressure (agent/pressure.py).
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path

KILL_COUNTERS = ("memory.events", "memory.oom_control")
"""The files that count processes ended for memory: of v2, of v1. Every group but the root of v2 has one of them."""

PREFIX = "holdfast-"
"""Of the names of groups that are made here."""

_EMPTY_S, _LOOK_S = 2.0, 0.01


def memory_group(root: Path = Path("/")) -> Path | None:
    """The folder of this process's memory cgroup (v1 or v2); None where there is none to be seen."""
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
        for folder in (top / path.lstrip("/"), top):
            if any((folder / name).is_file() for name in KILL_COUNTERS):
                return folder
    return None


@dataclass(frozen=True, kw_only=True)
class Ground:
    """Where groups with a limit can be made."""

    above: Path
    second: bool
    """Whether it is of cgroup v2."""

    def group(self, name: str) -> Path:
        """The folder of a group that may be made here."""
        return self.above / f"{PREFIX}{name}"


def ground(root: Path = Path("/")) -> Ground | str:
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
    return Ground(above=above, second=second)


def confine(pid: int, group: Path, limit_bytes: int, *, second: bool) -> None:
    """Hold a process, and all it starts from now on, to a limit, swap included; makes the group. Raises OSError."""
    group.mkdir(exist_ok=True)
    # v1 wants the limit without swap to be the lower one at any time, so it comes first.
    limit, swap, allowed = (
        ("memory.max", "memory.swap.max", 0)
        if second
        else ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes", limit_bytes)
    )
    (group / limit).write_text(f"{limit_bytes}")
    with contextlib.suppress(FileNotFoundError, PermissionError):  # a kernel that does not count swap
        (group / swap).write_text(f"{allowed}")
    (group / "cgroup.procs").write_text(f"{pid}")


def members(group: Path) -> list[int]:
    """The processes of a group; none when it is gone."""
    return [int(word) for word in _words(group / "cgroup.procs")]


def dissolve(group: Path) -> None:
    """Remove a group whose processes have ended; the kernel may take a moment to see that they have."""
    deadline = time.monotonic() + _EMPTY_S
    while True:
        try:
            group.rmdir()
            return
        except FileNotFoundError:
            return
        except OSError:
            if time.monotonic() >= deadline:
                return
            time.sleep(_LOOK_S)


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []
