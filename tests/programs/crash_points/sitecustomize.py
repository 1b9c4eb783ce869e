"""Kills a run's controllers, each right before one of its effects, when this directory is on PYTHONPATH.

HOLDFAST_CRASH_POINTS names a file of numbers, one per line. The first controller dies before that many effects, counted
from 0, the next one before as many as the second line says; when no line remains, controllers live. An effect is
visible to others: a file written, renamed or removed, a process started or signalled, bytes sent.
"""

from __future__ import annotations

import asyncio.selector_events
import os
import signal
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

AUDITED = frozenset({"os.kill", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "subprocess.Popen"})
WRITES = ("fsync", "pwrite", "write")


def crash_after(effects: int) -> None:
    """Kill this process before one more effect than these."""
    left = iter(range(effects))

    def effect() -> None:
        if next(left, None) is None:
            signal.raise_signal(signal.SIGKILL)

    def writing(call: Callable[..., Any]) -> Callable[..., Any]:
        def write(descriptor: int, *rest: Any) -> Any:
            if stat.S_ISREG(os.fstat(descriptor).st_mode):  # the heartbeat to the supervisor does not count
                effect()
            return call(descriptor, *rest)

        return write

    for name in WRITES:
        setattr(os, name, writing(getattr(os, name)))
    transport: Any = vars(asyncio.selector_events)["_SelectorSocketTransport"]
    send = transport.write

    def sending(self: Any, data: Any) -> None:
        effect()
        send(self, data)

    transport.write = sending
    sys.addaudithook(lambda event, _: effect() if event in AUDITED else None)


def next_of(plan: Path) -> int | None:
    """Take the first line of the plan."""
    first, *rest = plan.read_text().splitlines() or [""]
    plan.write_text("\n".join(rest))
    return int(first) if first else None


if "holdfast.controller_main" in sys.orig_argv and "HOLDFAST_CRASH_POINTS" in os.environ:
    upto = next_of(Path(os.environ["HOLDFAST_CRASH_POINTS"]))
    if upto is not None:
        crash_after(upto)
        sys.modules["crash_points"] = sys.modules[__name__]  # so that no agent is a fork of this process
