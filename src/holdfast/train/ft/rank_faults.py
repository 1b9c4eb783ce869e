"""Faults that a drill injects inside a rank, because no signal can cause them."""

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
    """The injected exception."""


def inject(what: RankFault) -> NoReturn:
    """Inject a fault in the training thread."""
    _FAULTS[what]()
    raise AssertionError("an injected fault never returns")


def _raise() -> None:
    raise InjectedFaultError("a drill: an error of the program's own")


def _hang() -> None:
    while True:
        time.sleep(3600)


def _all_reduce_alone() -> None:
    """All-reduce with a peer that never joins; uses a separate group, so that no other collective pairs with it."""
    group: Any = dist.ProcessGroupGloo(dist.HashStore(), 0, 2, FOR_GOOD)
    group.allreduce(torch.zeros(1)).wait()


_FAULTS: Mapping[RankFault, Callable[[], None]] = {
    RankFault.RAISE: _raise,
    RankFault.HANG: _hang,
    RankFault.COLLECTIVE: _all_reduce_alone,
}
