"""Survivors on a group that fails like NCCL: a loss ends a wait that nothing else would."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.programs.nccl_like import NcclLike
from tests.waiting import until

from holdfast.errors import HoldfastError
from holdfast.train.ft import abortable_pg, replica_strategy
from holdfast.train.ft.abortable_pg import AbortableNccl
from holdfast.train.ft.replica_strategy import is_nccl
from holdfast.train.session.rank_config import RankConfig

DEADLINE_S = 30.0
TIMEOUT = timedelta(seconds=DEADLINE_S)


@pytest.fixture
def pool() -> Generator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as threads:
        yield threads


# The connection between replicas


@pytest.fixture
def replicas(monkeypatch, pool) -> Generator[tuple[AbortableNccl, AbortableNccl]]:
    """Replicas 0 and 1, connected."""
    monkeypatch.setattr(abortable_pg, "nccl_group", lambda store, rank, size, *_: NcclLike(store, rank, size))
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    groups = AbortableNccl(TIMEOUT), AbortableNccl(TIMEOUT)
    place = f"localhost:{store.port}/quorum"
    joining = [pool.submit(each.configure, place, "0", rank, 2, 1, 0, 1, [0, 1]) for rank, each in enumerate(groups)]
    for each in joining:
        each.result(DEADLINE_S)
    yield groups
    for each in groups:
        each.close(ConnectionError("the test ends"))


def never(_: object) -> None:
    raise AssertionError("its future was done long before")


def test_operation_is_awaited_until_the_device_has_its_result(replicas) -> None:
    mine, theirs = torch.ones(2), torch.ones(2)
    replicas[0].start_allreduce(mine, never)
    assert replicas[0].is_waiting()
    replicas[1].start_allreduce(theirs, never)
    until(lambda: not replicas[0].is_waiting())
    assert mine.tolist() == [2.0, 2.0]
    assert replicas[0].waited_s == 0


def test_operation_that_an_abort_ends_is_no_result(replicas) -> None:
    replicas[0].start_allreduce(torch.ones(2), never)
    (operation,) = replicas[0]._operations
    replicas[0].lose(1)
    until(operation.done)
    with pytest.raises(ConnectionError, match="lost: replica 1"):
        replicas[0].is_waiting()
    with pytest.raises(ConnectionError, match="lost: replica 1"):
        replicas[0].start_allreduce(torch.ones(2), never)


def test_next_quorum_waits_for_the_thread_that_aborts_and_for_no_later_one(replicas) -> None:
    replicas[0].start_allreduce(torch.ones(2), never)
    replicas[0].lose(1)
    aborting = replicas[0]._closing
    replicas[0].close(ConnectionError("a step was discarded"))
    assert replicas[0]._closing is aborting


def test_operation_that_completed_before_the_loss_counts(replicas) -> None:
    for each in replicas:
        each.start_allreduce(torch.ones(2), never)
    for each in replicas:
        until(lambda each=each: not each.is_waiting())
    replicas[0].lose(1)
    assert not replicas[0].is_waiting()


def test_replica_of_another_quorum_is_no_loss(replicas) -> None:
    replicas[0].lose(2)
    assert replicas[0].error is None


def test_operation_without_an_answer_is_given_up_after_the_timeout(replicas) -> None:
    assert not replicas[0].close_if_overdue()
    replicas[0].start_allreduce(torch.ones(2), never)
    assert not replicas[0].close_if_overdue()
    replicas[0].timeout = timedelta(0)
    assert replicas[0].close_if_overdue()
    with pytest.raises(ConnectionError, match="no answer"):
        replicas[0].is_waiting()


def test_replica_that_is_lost_while_the_others_connect_to_it_is_not_connected_to(monkeypatch, pool) -> None:
    """The report may come before the connection is there, and no other follows."""
    group = AbortableNccl(TIMEOUT)

    def connected(*_: object) -> NcclLike:
        group.lose(1)
        return NcclLike(dist.HashStore(), 0, 1)

    monkeypatch.setattr(abortable_pg, "nccl_group", connected)
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    joining: Future[None] = pool.submit(group.configure, f"localhost:{store.port}/quorum", "0", 0, 2, 1, 0, 1, [0, 1])
    with pytest.raises(ConnectionError, match="lost: replica 1"):
        joining.result(DEADLINE_S)


def test_replica_that_is_lost_while_the_others_connect_is_shrunk_away_by_its_rank_in_this_quorum(
    monkeypatch, pool
) -> None:
    """The previous quorum had another replica at that rank."""
    group, lost = AbortableNccl(TIMEOUT, shrinks=True), 2
    excluded: Future[list[int]] = Future()

    def connected(*_: object) -> NcclLike:
        group.lose(lost)
        return NcclLike(dist.HashStore(), 0, 1)

    def shrunk(_: object, ranks: list[int], *__: object) -> NcclLike:
        excluded.set_result(ranks)
        return NcclLike(dist.HashStore(), 0, 1)

    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    place = f"localhost:{store.port}"
    store.set("first/shrunk/1", "0")  # as the other replica does
    store.set("second/shrunk/1", "0")
    monkeypatch.setattr(abortable_pg, "nccl_group", lambda *_: NcclLike(dist.HashStore(), 0, 1))
    pool.submit(group.configure, f"{place}/first", "0", 0, 2, 1, 0, 1, [0, 1]).result(DEADLINE_S)
    monkeypatch.setattr(abortable_pg, "nccl_group", connected)
    monkeypatch.setattr(abortable_pg, "nccl_shrunk", shrunk)
    joining = pool.submit(group.configure, f"{place}/second", "0", 0, 2, 1, 0, 1, [0, lost])
    with pytest.raises(ConnectionError, match="lost: replica 2"):
        joining.result(DEADLINE_S)
    assert excluded.result(DEADLINE_S) == [1]


@pytest.mark.parametrize("alike", [True, False])
def test_survivors_shrink_their_group_if_all_of_them_have_and_make_a_new_one_if_not(
    monkeypatch, pool, alike: bool
) -> None:
    made: list[NcclLike] = []

    def connect(store: dist.Store, rank: int, size: int, *_: object) -> NcclLike:
        made.append(NcclLike(store, rank, size))
        return made[-1]

    monkeypatch.setattr(abortable_pg, "nccl_group", connect)
    monkeypatch.setattr(abortable_pg, "nccl_shrunk", lambda group, excluded, *_: group.shrunk(excluded))
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    groups = [AbortableNccl(TIMEOUT, shrinks=True) for _ in range(3)]

    def join(quorum: str, *replicas: int) -> None:
        place = f"localhost:{store.port}/{quorum}"
        given = [(place, "0", rank, len(replicas), 1, 0, 1, [*replicas]) for rank in range(len(replicas))]
        joining = [pool.submit(groups[each].configure, *args) for each, args in zip(replicas, given, strict=True)]
        for each in joining:
            each.result(DEADLINE_S)

    def reduce(*replicas: int) -> list[float]:
        tensors = [torch.ones(1) for _ in replicas]
        for each, tensor in zip(replicas, tensors, strict=True):
            groups[each].start_allreduce(tensor, never)
        for each in replicas:
            until(lambda each=each: not groups[each].is_waiting())
        return [tensor.item() for tensor in tensors]

    join("first", 0, 1, 2)
    assert reduce(0, 1, 2) == [3.0] * 3
    for survivor in (0, 2):
        groups[survivor].lose(1)
    if not alike:
        until(lambda: groups[2]._shrunk is not None)
        groups[2]._shrunk = None  # as if it had left the group before it learned of the loss
    join("second", 0, 2)
    assert reduce(0, 2) == [2.0] * 2
    assert len(made) == (3 if alike else 5)
    for each in groups:
        each.close(ConnectionError("the test ends"))


# Which group replicas use


@pytest.mark.parametrize(
    ("backends", "nccl"),
    [
        ("cuda:nccl", True),  # init_process_group("nccl"), or with no backend where there is a GPU
        ("cpu:gloo,cuda:nccl", True),
        ("cpu:gloo,cuda:gloo", False),
        ("cpu:gloo", False),
    ],
)
def test_replicas_use_nccl_where_the_ranks_of_each_use_it_for_gpus(backends: str, nccl: bool) -> None:
    assert is_nccl(backends) is nccl


def test_backend_of_a_group_made_without_one_is_that_of_its_device() -> None:
    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert dist.get_backend() == "undefined"
        assert dist.get_backend_config() == "cpu:gloo"
    finally:
        dist.destroy_process_group()


def test_nccl_that_cannot_be_aborted_is_refused_before_the_first_step(monkeypatch) -> None:
    monkeypatch.setattr(replica_strategy, "nccl_problem", lambda shrinks: "NCCL 2.21.5 is older than 2.26")

    class OnGpu(torch.nn.Module):
        def parameters(self, recurse: bool = True) -> Iterator[Any]:
            return iter([SimpleNamespace(is_cuda=True)])

    with pytest.raises(HoldfastError) as refused:
        replica_strategy._uses_nccl(SimpleNamespace(model=OnGpu()), RankConfig())
    (finding,) = refused.value.findings
    assert (finding.code, finding.evidence) == ("replicas-nccl-no-abort", ("NCCL 2.21.5 is older than 2.26",))
