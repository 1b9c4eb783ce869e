"""Resource limits that holdfast's processes raise for themselves and restore for ranks.

Also signals: what a caller ignores or blocks (nohup, `cmd &` in a script, a daemon) is inherited by every child
process.
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
"""The limit that this process was started with; its children get the same one."""

SCHEDULING = os.sched_getscheduler(0)
"""The scheduling policy that this process was started with."""

RANK_OOM_SCORE = 200
"""Added for ranks, in thousandths of the memory: the kernel, short of memory, kills a rank before its agent."""

_OOM_SCORE = Path("/proc/self/oom_score_adj")


def open_more_files() -> None:
    """Raise this process's limit of open files to its hard limit."""
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (OPEN_FILES[1], OPEN_FILES[1]))


def schedule_as_batch() -> None:
    """Have this process, once woken, wait for an idle CPU or the end of another process's time slice.

    Otherwise each message of a rank to its agent takes the rank's own CPU if no other is idle: 0.1 ms per step.
    """
    if SCHEDULING == os.SCHED_OTHER:
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def receive_signals() -> None:
    """Unblock and stop ignoring the signals that this process waits for or is ended with.

    If SIGCHLD is ignored, the kernel reaps children and their exit status is lost.
    """
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for number in (signal.SIGCHLD, signal.SIGTERM):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)


def restore_limits(pid: int) -> None:
    """Restore, in a newly started child, the limits that this process was started with."""
    with contextlib.suppress(OSError, ValueError):
        resource.prlimit(pid, resource.RLIMIT_NOFILE, OPEN_FILES)


def rank_oom_score() -> int:
    """The `oom_score_adj` of this process's ranks."""
    return min(1000, int(_OOM_SCORE.read_text()) + RANK_OOM_SCORE)


def become_rank(group: Path | None = None) -> None:
    """Called in a rank between fork and exec: it dies with its agent, and is OOM-killed before it.

    It enters a cgroup, if there is one; without it the agent finds the rank's children by other means.
    """
    if group is not None:
        with contextlib.suppress(OSError):
            enter(group)
    _become_child(rank_oom_score)


def become_zygote() -> None:
    """Called in a zygote between fork and exec: like a rank, but OOM-killed first."""
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
