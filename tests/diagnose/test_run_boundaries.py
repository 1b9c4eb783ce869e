"""Where in a pile one run ends and the next begins."""

from __future__ import annotations

import pytest
from tests.diagnose.log_lines import chunk, diagnose_lines

from holdfast.diagnose.failure_classes import FailureClass
from holdfast.diagnose.log_chunk import LogChunk
from holdfast.diagnose.pipeline import MAX_OTHER_RUNS, diagnose_chunks
from holdfast.diagnose.scanner import MAX_FACTS_PER_RULE

FULL = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB"
XID = "n1 kernel: NVRM: Xid (PCI:0000:3b:00): 79, pid=811, name=python, GPU has fallen off the bus."
ABORTED = "rank 1: torch.distributed.DistBackendError: NCCL communicator was aborted on rank 1."
LAUNCHED = (
    "W1120 {at}.000000 811 torch/distributed/run.py:793] Setting OMP_NUM_THREADS environment variable for each process "
    "to be 1 in default, to avoid your system being overloaded, please further tune the variable for optimal use."
)
LAST_WORDS = (
    "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ",
    "Root Cause (first observed failure):",
)
FAILED = (
    "E1120 {at}.176000 811 torch/distributed/elastic/multiprocessing/api.py:882] failed (exitcode: 1) local_rank: 0 "
    "(pid: 942) of binary: /usr/bin/python"
)
MISSING = "[rank0]: KeyError: 'tokens'"


def test_failure_of_the_day_before_is_not_the_cause_of_todays() -> None:
    answer = diagnose_lines(
        f"2026-11-19T10:00:00Z rank 0: {FULL}",
        "2026-11-20T10:00:00Z rank 0: step 5",
        f"2026-11-20T10:05:00Z {XID}",
        f"2026-11-20T10:05:10Z {ABORTED}",
    )
    assert answer.failure_class is FailureClass.GPU_XID
    assert answer.first_failure is not None
    assert answer.first_failure.host == "n1"
    assert answer.also_seen == ()
    (other,) = answer.other_runs
    assert (other.failure_class, other.ended_at, other.first.where) == (
        FailureClass.OOM_GPU,
        "2026-11-19 10:00:00",
        "log:1",
    )
    assert "2 runs" in answer.notes[0]


def test_files_of_two_days_are_two_runs() -> None:
    first = chunk(f"2026-11-19 10:00:00,123 ERROR {FULL}", name="rank-0.log", rank=0)
    second = chunk(f"2026-11-20 10:00:00,123 ERROR {MISSING}", name="rank-1.log", rank=1)
    for blocks in ([first, second], [second, first]):
        answer = diagnose_chunks(blocks)
        assert answer.failure_class is FailureClass.PROGRAM_ERROR
        assert [other.failure_class for other in answer.other_runs] == [FailureClass.OOM_GPU]


def test_traceback_without_a_clock_is_of_the_day_of_the_line_above_it() -> None:
    answer = diagnose_lines(
        "2026-11-19 10:00:00,123 INFO step 100 loss 2.31",
        "Traceback (most recent call last):",
        '  File "/home/ada/train.py", line 42, in step',
        FULL,
        "2026-11-20 10:00:00,123 INFO step 100 loss 2.31",
        "Traceback (most recent call last):",
        '  File "/home/ada/train.py", line 57, in step',
        MISSING,
    )
    assert answer.failure_class is FailureClass.PROGRAM_ERROR
    assert "train.py:57" in answer.what
    assert [other.failure_class for other in answer.other_runs] == [FailureClass.OOM_GPU]


@pytest.mark.parametrize("later", ["10:09:30", "14:00:00"])
def test_clocks_a_time_zone_apart_are_of_one_run(later: str) -> None:
    answer = diagnose_lines(f"2026-11-20T10:05:00Z {XID}", f"2026-11-20T{later}Z {ABORTED}")
    assert answer.failure_class is FailureClass.GPU_XID
    assert [each.code for each in answer.symptoms] == ["distributed-exception"]
    assert answer.other_runs == ()


def test_wait_of_a_day_is_of_the_run_that_waits() -> None:
    waited = (
        "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5, OpType=ALLREDUCE, NumelIn=1, "
        "NumelOut=1, Timeout(ms)=86400000) ran for 86400017 milliseconds before timing out."
    )
    answer = diagnose_lines(f"2026-11-19T10:05:00Z {XID}", f"2026-11-20T10:05:00Z {waited}")
    assert answer.failure_class is FailureClass.GPU_XID
    assert answer.other_runs == ()


def test_clock_without_a_year_is_of_the_year_of_the_others() -> None:
    glog = "[rank1]:[E1120 10:05:10.123456789 ProcessGroupNCCL.cpp:607] NCCL communicator was aborted on rank 1."
    answer = diagnose_lines(f"2024-11-20T10:05:00Z {XID}", glog)
    assert answer.failure_class is FailureClass.GPU_XID
    assert answer.other_runs == ()


def test_old_words_of_a_node_are_not_the_run_that_is_asked_about() -> None:
    kernel = chunk(f"2026-10-20T10:05:00Z {XID}", f"2026-11-22T03:00:00Z {XID}", name="dmesg")
    ranks = chunk(f"2026-11-20T10:00:00Z {MISSING}", name="rank-0.log", rank=0)
    answer = diagnose_chunks([kernel, ranks])
    assert answer.failure_class is FailureClass.PROGRAM_ERROR
    assert [other.failure_class for other in answer.other_runs] == [FailureClass.GPU_XID, FailureClass.GPU_XID]


def test_launcher_that_ended_and_begins_again_is_another_run() -> None:
    answer = diagnose_lines(
        LAUNCHED.format(at="10:00:00"),
        f"[rank0]: {FULL}",
        FAILED.format(at="10:01:00"),
        *LAST_WORDS,
        LAUNCHED.format(at="10:03:00"),
        MISSING,
        FAILED.format(at="10:04:00"),
        *LAST_WORDS,
    )
    assert answer.failure_class is FailureClass.PROGRAM_ERROR
    assert [each.count for each in answer.symptoms] == [2]
    assert [other.failure_class for other in answer.other_runs] == [FailureClass.OOM_GPU]


def test_launcher_that_starts_its_ranks_again_continues_with_one_run() -> None:
    init = "n1:{pid}:990 [0] NCCL INFO comm 0x5 rank 0 nranks 2 cudaDev 0 busId 1b000 commId 0x{pid} - Init COMPLETE"
    answer = diagnose_lines(
        LAUNCHED.format(at="10:00:00"),
        init.format(pid=940),
        f"2026-11-20T10:00:30Z {XID}",
        FAILED.format(at="10:01:00"),
        init.format(pid=942),
        "[rank0]: RuntimeError: No CUDA GPUs are available",
        FAILED.format(at="10:02:00"),
        *LAST_WORDS,
    )
    assert answer.failure_class is FailureClass.GPU_XID
    assert answer.other_runs == ()


def test_launchers_of_many_nodes_that_begin_one_after_the_other_are_of_one_run() -> None:
    answer = diagnose_lines(
        f"[pod/train-0/main] {LAUNCHED.format(at='10:00:00')}",
        f"[pod/train-0/main] {FULL}",
        f"[pod/train-1/main] {LAUNCHED.format(at='10:00:20')}",
        "[pod/train-1/main] ConnectionResetError: [Errno 104] Connection reset by peer",
    )
    assert (answer.failure_class, answer.other_runs) == (FailureClass.OOM_GPU, ())


def test_pod_whose_launcher_begins_again_is_another_run_in_the_files_of_all() -> None:
    def pod(number: int, *words: str) -> LogChunk:
        lines = (LAUNCHED.format(at="10:00:00"), *words[:1], LAUNCHED.format(at="10:30:00"), *words[1:])
        return chunk(*lines, name=f"train-{number}.log")

    first, second = pod(0, LAST_WORDS[0], MISSING, LAST_WORDS[0]), pod(1, LAST_WORDS[0], LAST_WORDS[0])
    kernel = chunk("[Fri Nov 20 10:01:00 2026] Memory cgroup out of memory: Killed process 4242 (python)", name="dmesg")
    answer = diagnose_chunks([first, second, kernel])
    assert answer.failure_class is FailureClass.PROGRAM_ERROR
    assert [other.failure_class for other in answer.other_runs] == [FailureClass.OOM_HOST]


def test_run_that_continues_after_one_that_failed_is_said_to_have_shown_no_failure() -> None:
    answer = diagnose_lines(LAUNCHED.format(at="10:00:00"), MISSING, *LAST_WORDS, LAUNCHED.format(at="10:30:00"))
    assert answer.failure_class is FailureClass.PROGRAM_ERROR
    assert answer.other_runs == ()
    assert "log:5, shows no failure" in answer.notes[0]


@pytest.mark.slow
def test_last_of_very_many_runs_is_still_read() -> None:
    loop = [LAUNCHED.format(at="10:00:00"), *[f"[rank0]: {FULL}"] * 3, *LAST_WORDS] * (3 * MAX_FACTS_PER_RULE)
    answer = diagnose_lines(*loop, LAUNCHED.format(at="11:00:00"), MISSING, *LAST_WORDS)
    assert answer.failure_class is FailureClass.PROGRAM_ERROR
    assert len(answer.other_runs) == MAX_OTHER_RUNS
    days = [f"2026-11-{day:02} 10:00:00 {FULL}" for day in (18, 19) for _ in range(2 * MAX_FACTS_PER_RULE)]
    assert diagnose_lines(*days, f"2026-11-20 10:00:00 {MISSING}").failure_class is FailureClass.PROGRAM_ERROR


def test_jobs_that_files_are_called_after_are_runs_of_their_own() -> None:
    first = chunk(f"0: {MISSING}", name="logs/slurm-101.out")
    second = chunk(f"0: {FULL}", name="logs/slurm-102.out")
    kernel = chunk("Memory cgroup out of memory: Killed process 4242 (python)", name="dmesg")
    answer = diagnose_chunks([second, first])
    assert (answer.failure_class, [other.failure_class for other in answer.other_runs]) == (
        FailureClass.OOM_GPU,
        [FailureClass.PROGRAM_ERROR],
    )
    assert diagnose_chunks([first, second, kernel]).failure_class is FailureClass.OOM_HOST
    one = [chunk(f"0: {FULL}", name="slurm-102_0.out"), chunk(f"0: {MISSING}", name="slurm-102_1.out")]
    assert diagnose_chunks(one).other_runs == ()
