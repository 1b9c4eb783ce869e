"""The group that fails like NCCL does what torch documents of NCCL, so that tests on it mean something."""

from __future__ import annotations

from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import pytest
import torch
import torch.distributed as dist
from tests.programs import nccl_like
from tests.programs.nccl_like import NcclLike

DEADLINE_S = 30.0


@pytest.fixture
def pool() -> Generator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as threads:
        yield threads


@pytest.fixture
def pair(pool: ThreadPoolExecutor) -> Generator[tuple[NcclLike, NcclLike]]:
    """Both members of a group."""
    store = dist.HashStore()
    one, other = pool.map(lambda rank: NcclLike(store, rank, 2), range(2))
    yield one, other
    for each in (one, other):
        each.abort()


def test_work_is_enqueued_long_before_it_has_a_result(pair) -> None:
    first, second = torch.ones(3), torch.ones(3)
    work = pair[0].allreduce([first])
    assert work.get_future().done()
    assert work.wait()
    assert not work.is_completed()
    assert first.isnan().all()
    pair[1].allreduce([second])
    nccl_like.synchronize()
    assert work.is_completed()
    assert first.tolist() == second.tolist() == [2.0] * 3


def test_dead_peer_blocks_a_synchronisation_without_an_error_until_an_abort(pair, pool) -> None:
    work = pair[0].allreduce([torch.ones(1)])
    dead, closed = pair[1]._gloo, Event()
    pool.submit(lambda: (dead.abort(), closed.set()))
    assert closed.wait(DEADLINE_S)
    blocked = pool.submit(nccl_like.synchronize)
    with pytest.raises(TimeoutError):
        blocked.result(0.2)
    assert not work.is_completed()
    pair[0].abort()
    blocked.result(DEADLINE_S)
    assert work.is_completed()
    with pytest.raises(RuntimeError, match="aborted"):
        pair[0].allreduce([torch.ones(1)])


def test_watchdog_ends_the_process_when_an_operation_takes_too_long(pool) -> None:
    store, ended = dist.HashStore(), Event()
    groups = [*pool.map(lambda rank: NcclLike(store, rank, 2, timeout_s=0.1, end_process=ended.set), range(2))]
    for each in groups:
        each.allreduce([torch.ones(1)])
    nccl_like.synchronize()
    assert not ended.wait(0.3)
    groups[0].allreduce([torch.ones(1)])
    assert ended.wait(DEADLINE_S)
    for each in groups:
        each.abort()
