"""A failure has the same root cause by the events of its run and by the logs of its ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import pytest
from tests.control.test_root_cause import exited, hung, root_cause
from tests.diagnose.log_lines import chunk

from holdfast.control.policy import FailureKind
from holdfast.diagnose.failure_classes import FailureClass
from holdfast.diagnose.peer_symptoms import OF_A_PEER
from holdfast.diagnose.pipeline import diagnose_chunks
from holdfast.events import DeviceFault, ExitReason, RankExited, RankHung

CLOSED = (
    "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:29318"
)
NCCL_CLOSED = "n0:7:91 [0] misc/socket.cc:49 NCCL WARN socketProgress: Connection closed by remote peer n1<51159>"
REMOTE = "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely."
ECC = "torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered"
OUT_OF_MEMORY = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
WATCHDOG = (
    "[rank0]:[E1120 10:10:00.1 ProcessGroupNCCL.cpp:607] [Rank 0] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum=19, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600093 milliseconds"
)
KERNEL = (
    "Nov 20 10:00:00 n1 kernel: Memory cgroup out of memory: Killed process 811 (python) total-vm:90kB, anon-rss:8kB"
)


@dataclass(frozen=True, kw_only=True)
class Failed:
    """One failure: what the run saw, what its ranks and their node logged, and the verdict."""

    exits: tuple[RankExited, ...]
    hangs: tuple[RankHung, ...] = ()
    logs: dict[int | None, Sequence[str]]
    rank: int
    kind: FailureKind
    failure_class: FailureClass


FAILED = {
    "exception": Failed(
        exits=(exited(0, 11.0, error=CLOSED), exited(1, 11.2, error="ValueError: bad shard 7")),
        logs={0: [CLOSED], 1: ["Traceback (most recent call last):", "ValueError: bad shard 7"]},
        rank=1,
        kind=FailureKind.CRASHED,
        failure_class=FailureClass.PROGRAM_ERROR,
    ),
    "killed for memory": Failed(
        exits=(exited(0, 11.0, error=CLOSED), exited(1, 11.2, how=ExitReason.OUT_OF_MEMORY, code=9)),
        logs={0: [CLOSED], 1: [KERNEL, "failed (exitcode: -9) local_rank: 1 (pid: 811) of binary: /usr/bin/python"]},
        rank=1,
        kind=FailureKind.OUT_OF_MEMORY,
        failure_class=FailureClass.OOM_HOST,
    ),
    "signal": Failed(
        exits=(exited(0, 11.0, error=CLOSED), exited(1, 11.2, how=ExitReason.SIGNAL, code=11)),
        logs={0: [CLOSED], 1: ["Fatal Python error: Segmentation fault"]},
        rank=1,
        kind=FailureKind.KILLED,
        failure_class=FailureClass.PROGRAM_ERROR,
    ),
    "NCCL's error about a peer": Failed(
        exits=(exited(0, 11.0, error=REMOTE), exited(2, 11.4, error=OUT_OF_MEMORY), exited(1, 11.1, error=REMOTE)),
        logs={0: [NCCL_CLOSED, REMOTE], 1: [NCCL_CLOSED, REMOTE], 2: [OUT_OF_MEMORY]},
        rank=2,
        kind=FailureKind.CRASHED,
        failure_class=FailureClass.OOM_GPU,
    ),
    "failed device": Failed(
        exits=(
            exited(0, 11.0, error=REMOTE),
            msgspec.structs.replace(exited(1, 11.2, error=ECC), device_fault=DeviceFault.MEMORY),
        ),
        logs={0: [NCCL_CLOSED, REMOTE], 1: [ECC]},
        rank=1,
        kind=FailureKind.GPU_MEMORY_FAILED,
        failure_class=FailureClass.GPU_XID,
    ),
    "hang": Failed(
        exits=(exited(0, 611.0, how=ExitReason.SIGNAL, code=6, error=WATCHDOG),),
        hangs=(
            hung(0, at=612.0, top_frame="all_reduce (torch/distributed/distributed_c10d.py:2841)"),
            hung(1, at=612.0, last_step=8, top_frame="load_batch (data.py:7)"),
        ),
        logs={
            0: [
                WATCHDOG,
                'Thread 811 (idle): "MainThread"',
                "    all_reduce (torch/distributed/distributed_c10d.py:2841)",
                "    train (train.py:40)",
            ],
            1: ['Thread 812 (idle): "MainThread"', "    load_batch (data.py:7)", "    train (train.py:38)"],
        },
        rank=1,
        kind=FailureKind.HUNG,
        failure_class=FailureClass.COLLECTIVE_MISMATCH,
    ),
}


@pytest.mark.parametrize("name", FAILED)
def test_run_and_logs_name_the_same_rank_and_kind(name: str) -> None:
    failed = FAILED[name]
    seen = root_cause(rank_failures=failed.exits, hangs=failed.hangs)
    told = diagnose_chunks([chunk(*lines, name=f"rank-{rank}.log", rank=rank) for rank, lines in failed.logs.items()])
    assert (seen.rank, seen.kind) == (failed.rank, failed.kind)
    assert told.first_failure is not None
    assert told.first_failure.rank == failed.rank
    assert failed.failure_class in (told.failure_class, *told.may_be)


@pytest.mark.parametrize("error", OF_A_PEER.values())
def test_error_about_a_peer_is_no_cause_in_a_log_either(error: str) -> None:
    # A live run ranks it last; of lines alone, its rule says that it only follows, or that only more lines decide.
    assert root_cause(rank_failures=(exited(1, 11.0, error=error),)).is_peer_symptom
    own = "ValueError: bad shard 7"
    told = diagnose_chunks([chunk(error, name="rank-1.log", rank=1), chunk(own, name="rank-0.log", rank=0)])
    assert (told.failure_class, told.first_failure and told.first_failure.rank) == (FailureClass.PROGRAM_ERROR, 0)
    assert root_cause(rank_failures=(exited(1, 11.0, error=error), exited(0, 12.0, error=own))).rank == 0
