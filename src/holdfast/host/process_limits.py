"""Owns the limits that holdfast's own processes lift for themselves and that ranks get back as they were.

Signals as well: what a caller ignores or blocks (nohup, `cmd &` in a script, a daemon) goes to every process below it.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path

from holdfast.host.cgroups import enter
from holdfast.host.processes import die_with_parent

OPEN_FILES = resource.getrlimit(resource.RLIMIT_NOFILE)
"""As this process was started with: what it starts is to have no other."""

SCHEDULING = os.sched_getscheduler(0)
"""The same."""

RANK_OOM_SCORE = 200
"""Added for ranks, in thousandths of the memory: the kernel, short of memory, ends a rank before what watches it."""

_OOM_SCORE = Path("/proc/self/oom_score_adj")


def open_more_files() -> None:
    """Allow this process as many open files as it may allow itself."""
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (OPEN_FILES[1], OPEN_FILES[1]))


def schedule_as_batch() -> None:
    """Have this process, when it is woken, wait for a CPU that is free or whose turn is over.

    Else each word of a rank's to its agent takes the rank's own CPU from it where no other is free: 0.1 ms a step.
    """
    if SCHEDULING == os.SCHED_OTHER:
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def receive_signals() -> None:
    """Receive what this process waits for or is ended with, though its caller blocked or ignored it.

    Where SIGCHLD is ignored the kernel reaps children, and nobody learns how they ended.
    """
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for number in (signal.SIGCHLD, signal.SIGTERM):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)


def restore_limits(pid: int) -> None:
    """Have a child that was just started have the limits that this process was started with."""
    with contextlib.suppress(OSError, ValueError):
        resource.prlimit(pid, resource.RLIMIT_NOFILE, OPEN_FILES)


def rank_oom_score() -> int:
    """What a rank of this process has as its `oom_score_adj`."""
    return min(1000, int(_OOM_SCORE.read_text()) + RANK_OOM_SCORE)


def become_rank(group: Path | None = None) -> None:
    """Called in a rank between fork and exec: it dies with its agent, and before it when memory runs out.

    It enters a cgroup, where there is one; without it the agent finds what the rank starts by other means.
    """
    if group is not None:
        with contextlib.suppress(OSError):
            enter(group)
    _become_child(rank_oom_score)


def become_zygote() -> None:
    """Called in a held program between fork and exec: it is as a rank, and ends first when memory runs out."""
    _become_child(lambda: 1000)


def _become_child(oom_score: Callable[[], int]) -> None:
    die_with_parent()
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, OPEN_FILES)
    if SCHEDULING == os.SCHED_OTHER:
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, SCHEDULING, os.sched_param(0))
    with contextlib.suppress(OSError, ValueError):
        _OOM_SCORE.write_text(str(oom_score()))
