"""Owns what a rank does to itself in a drill: what no signal does, because it is the program's own doing."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from holdfast.protocol.rank_messages import RankFault

FOR_GOOD = timedelta(days=7)


class InjectedFaultError(RuntimeError):
    """Raised because somebody asked for it."""


def inject(what: RankFault) -> NoReturn:
    """Let it happen, in the thread that trains."""
    _FAULTS[what]()
    raise AssertionError("what befalls a rank is for good")


def _raise() -> None:
    raise InjectedFaultError("a drill: an error of the program's own")


def _hang() -> None:
    while True:
        time.sleep(3600)


def _all_reduce_alone() -> None:
    """With a peer that never comes; in a group of its own, so that no other rank's collective is paired with it."""
    group: Any = dist.ProcessGroupGloo(dist.HashStore(), 0, 2, FOR_GOOD)
    group.allreduce(torch.zeros(1)).wait()


_FAULTS: Mapping[RankFault, Callable[[], None]] = {
    RankFault.RAISE: _raise,
    RankFault.HANG: _hang,
    RankFault.COLLECTIVE: _all_reduce_alone,
}
