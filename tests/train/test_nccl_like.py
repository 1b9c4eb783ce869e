"""The group that fails like NCCL does what torch documents of NCCL, so that tests on it mean something."""

from __future__ import annotations

import pickle
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Event

import pytest
import torch
import torch.distributed as dist
from tests.programs import nccl_like
from tests.programs.nccl_like import FlightRecorder, NcclLike

DEADLINE_S = 30.0
GLOO_DUMP = Path(__file__).parents[1] / "incidents" / "flight" / "trace_rank_0"


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


def test_what_was_recorded_is_dumped_in_the_format_of_torch(monkeypatch, pool) -> None:
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "2")
    recorder = FlightRecorder(0)
    recorder.add_group("0", [0, 1])
    store, record = dist.HashStore(), partial(recorder.record, "0")
    one, other = pool.map(
        lambda rank: NcclLike(store, rank, 2, record=record if rank == 0 else lambda *_: None), range(2)
    )
    one.barrier()
    one.allreduce([torch.ones(2, 3)])
    other.barrier()
    other.allreduce([torch.ones(2, 3)])
    nccl_like.synchronize()
    one.allgather([[torch.ones(1), torch.ones(1)]], [torch.ones(1, dtype=torch.float64)])
    mine, torchs = pickle.loads(recorder.dump()), pickle.loads(GLOO_DUMP.read_bytes())
    for each in (one, other):
        each.abort()
    assert mine.keys() <= torchs.keys()
    assert mine["pg_config"]["0"].keys() == torchs["pg_config"][""].keys()
    assert mine["pg_status"]["0"] == {"last_enqueued_collective": 3, "last_completed_collective": 2}
    assert mine["pg_status"]["0"].keys() <= torchs["pg_status"]["0"].keys()
    reduced, gathered = mine["entries"]
    assert gathered.keys() <= torchs["entries"][0].keys()
    assert (reduced["profiling_name"], reduced["collective_seq_id"]) == ("nccl:all_reduce", 2)
    assert (reduced["input_sizes"], reduced["state"]) == ([[2, 3]], "completed")
    assert (gathered["input_sizes"], gathered["output_sizes"]) == ([[1]], [[1], [1]])
    assert (gathered["input_dtypes"], gathered["state"]) == (["Double"], "scheduled")
