"""From lines to the answer: who was first, what only followed, how sure, and which fact is missing."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace
from tests.diagnose.log_lines import chunk, diagnose_lines

from holdfast.diagnose.fact import Fact, ProcessRef
from holdfast.diagnose.failure_classes import Confidence, FailureClass
from holdfast.diagnose.hypotheses import Hypothesis, hypothesis_of
from holdfast.diagnose.log_chunk import LogChunk, LogSource
from holdfast.diagnose.log_input import LogInput
from holdfast.diagnose.next_evidence import MAX_OPEN_CLASSES
from holdfast.diagnose.pipeline import diagnose, diagnose_chunks
from holdfast.diagnose.precedence import by_likelihood
from holdfast.diagnose.root_cause_analysis import CLOCKS, MAX_CLOCK_SKEW_S, as_suspect
from holdfast.diagnose.rules import RULES
from holdfast.diagnose.rules.evidence_requests import EVIDENCE_REQUESTS

CLOSED = "n0:7:91 [0] misc/socket.cc:49 NCCL WARN socketProgress: Connection closed by remote peer n1<51159>"
OUT_OF_MEMORY = "n1:77:91 [3] include/alloc.h:178 NCCL WARN Cuda failure 'out of memory'"


def waited(rank: int, op: str = "ALLREDUCE", seq: int = 19) -> str:
    return (
        f"[rank{rank}]:[E1120 10:00:00.1 ProcessGroupNCCL.cpp:607] [Rank {rank}] Watchdog caught collective operation "
        f"timeout: WorkNCCL(SeqNum={seq}, OpType={op}, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600093 ms"
    )


def stood(rank: int, enqueued: int, completed: int) -> str:
    return (
        f"[PG ID 0 PG GUID 0(default_pg) Rank {rank}]  failure detected by watchdog at work sequence id: {enqueued} "
        f"PG status: last enqueued work: {enqueued}, last completed work: {completed}"
    )


def test_secondary_line_before_the_cause_is_not_the_cause() -> None:
    answer = diagnose_lines(CLOSED, OUT_OF_MEMORY)
    assert (answer.failure_class, answer.confidence) == (FailureClass.OOM_GPU, Confidence.CERTAIN)
    assert [each.code for each in answer.symptoms] == ["connection-closed"]
    assert answer.evidence[0].where == "log:2"
    assert answer.first_failure is not None
    assert (answer.first_failure.host, answer.first_failure.pid) == ("n1", 77)


def test_secondary_lines_alone_are_unknown_and_ask_for_the_other_ranks() -> None:
    answer = diagnose_lines(CLOSED)
    assert answer.failure_class is FailureClass.UNKNOWN
    assert any("every other rank" in each.what for each in answer.next_evidence)


def test_no_telling_line_is_unknown() -> None:
    answer = diagnose_lines("step 1 loss 2.3", "step 2 loss 2.2")
    assert (answer.failure_class, answer.evidence) == (FailureClass.UNKNOWN, ())
    assert answer.next_evidence


def test_sigkill_alone_does_not_prove_memory() -> None:
    killed = "failed (exitcode: -9) local_rank: 0 (pid: 178) of binary: /usr/bin/python"
    assert diagnose_lines(killed).failure_class is FailureClass.UNKNOWN
    answer = diagnose_lines(killed, "Memory cgroup out of memory: Killed process 178 (python) total-vm:1kB")
    assert (answer.failure_class, answer.confidence) == (FailureClass.OOM_HOST, Confidence.CERTAIN)


def test_rank_of_host_and_process_is_joined_from_the_communicator() -> None:
    answer = diagnose_lines(
        "n1:77:91 [3] NCCL INFO comm 0x5 rank 11 nranks 16 cudaDev 3 busId 1b000 commId 0x1 - Init START",
        OUT_OF_MEMORY,
    )
    assert answer.first_failure is not None
    assert answer.first_failure.rank == 11


def test_rank_behind_in_the_sequence_is_the_one_that_never_entered() -> None:
    answer = diagnose_lines(waited(0), stood(0, 19, 18), waited(1), stood(1, 19, 18), stood(2, 18, 18))
    assert answer.failure_class is FailureClass.COLLECTIVE_MISMATCH
    assert answer.first_failure is not None
    assert answer.first_failure.rank == 2
    assert "never entered" in answer.what
    assert answer.confidence is not Confidence.CERTAIN


RETRY = (
    "n0:7:91 [0] transport/net_ib.cc:1295 NCCL WARN NET/IB : Got completion from peer 192.168.1.2<3456> with error 12, "
    "opcode 0, len 32600, vendor err 129"
)
KEY_ERROR = (
    "[rank3]: Traceback (most recent call last):",
    '[rank3]:   File "/home/ada/train.py", line 88, in <module>',
    '[rank3]:     loss = step(batch["input_ids"])',
    "[rank3]: KeyError: 'input_ids'",
)


def test_peer_that_no_longer_answers_because_it_raised_is_no_fault_of_the_network() -> None:
    answer = diagnose_lines(*KEY_ERROR, RETRY, RETRY)
    assert (answer.failure_class, answer.confidence, str(answer.first_failure)) == (
        FailureClass.PROGRAM_ERROR,
        Confidence.LIKELY,
        "rank 3",
    )
    assert ("completion-retry", 2) in [(each.code, each.count) for each in answer.symptoms]
    apart = diagnose_chunks([chunk(RETRY, name="n0.log"), chunk(*KEY_ERROR, name="n1.log")])
    assert apart.failure_class is FailureClass.PROGRAM_ERROR


def test_error_after_the_network_was_lost_is_no_cause_of_that() -> None:
    answer = diagnose_lines(RETRY, *KEY_ERROR)
    assert answer.failure_class is FailureClass.NETWORK_LOSS


def dump(rank: int, line: int, call: str = "all_reduce") -> LogChunk:
    frames = (
        f"    {call} (/opt/venv/lib/python3.12/site-packages/torch/distributed/distributed_c10d.py:3211)",
        f"    main (/home/ada/train.py:{line})",
    )
    return chunk(f'Thread {rank + 7} (idle): "MainThread"', *frames, name=f"stacks-rank-{rank}.txt", rank=rank)


def test_rank_that_waits_where_no_other_does_went_astray() -> None:
    answer = diagnose_chunks([dump(0, 31), dump(1, 44), dump(2, 31)])
    assert (answer.failure_class, answer.confidence, str(answer.first_failure)) == (
        FailureClass.COLLECTIVE_MISMATCH,
        Confidence.LIKELY,
        "rank 1",
    )
    assert "rank 1 in all_reduce at train.py:44" in answer.what


def test_of_two_ranks_in_different_calls_neither_is_named() -> None:
    answer = diagnose_chunks([dump(0, 31), dump(1, 44)])
    assert (answer.failure_class, answer.first_failure) == (FailureClass.COLLECTIVE_MISMATCH, None)


def test_ranks_that_wait_for_one_other_each_may_stand_anywhere() -> None:
    answer = diagnose_chunks([dump(0, 31, "recv"), dump(1, 44, "recv"), dump(2, 31, "recv")])
    assert answer.failure_class is FailureClass.UNKNOWN


def test_one_rank_that_waited_is_not_the_culprit() -> None:
    answer = diagnose_lines(waited(2), stood(2, 19, 18))
    assert (answer.failure_class, answer.first_failure) == (FailureClass.UNKNOWN, None)
    assert any("last collective" in each.what for each in answer.next_evidence)


def test_rank_that_wrote_no_timeout_is_found_by_difference() -> None:
    blocks = [chunk(waited(rank), name=f"rank-{rank}.log", rank=rank) for rank in (0, 1, 3)]
    blocks.append(chunk("loading a shard", name="rank-2.log", rank=2))
    world = "n0:1:2 [0] NCCL INFO comm 0x5 rank 0 nranks 4 cudaDev 0 busId 1b000 - Init COMPLETE"
    answer = diagnose_chunks([chunk(world, name="rank-0.log", rank=0), *blocks])
    assert answer.first_failure is not None
    assert answer.first_failure.rank == 2


def test_different_operations_at_one_number_are_a_mismatch() -> None:
    answer = diagnose_lines(waited(0), waited(1, op="BROADCAST"))
    assert answer.failure_class is FailureClass.COLLECTIVE_MISMATCH
    assert "BROADCAST" in answer.what


def test_error_of_one_rank_explains_the_wait_of_the_others() -> None:
    answer = diagnose_lines(waited(0), waited(1), "[rank2]: KeyError: 'input_ids'")
    assert (answer.failure_class, answer.code) == (FailureClass.PROGRAM_ERROR, "python-exception")
    assert answer.first_failure is not None
    assert answer.first_failure.rank == 2
    assert "watchdog-timeout" in {each.code for each in answer.symptoms}


def test_first_of_two_errors_by_the_clock_is_the_cause() -> None:
    later, earlier = "2026-11-20 10:05:00,000 ValueError: late", "2026-11-20 10:00:00,000 KeyError: 'early'"
    answer = diagnose_chunks([chunk(f"x] {later}", name="a"), chunk(f"x] {earlier}", name="b")])
    assert "early" in answer.evidence[0].text


def test_contradicting_certain_lines_make_the_answer_only_likely() -> None:
    answer = diagnose_lines(OUT_OF_MEMORY, "OSError: [Errno 24] Too many open files")
    assert answer.confidence is Confidence.LIKELY
    assert answer.also_seen


def test_plain_tcp_is_not_the_cause_of_a_crash() -> None:
    answer = diagnose_lines("n1:8:9 [0] NCCL INFO NET/IB : No device found.", "[rank2]: KeyError: 'input_ids'")
    assert answer.failure_class is FailureClass.PROGRAM_ERROR


def test_every_answer_that_names_a_class_has_evidence() -> None:
    assert diagnose_lines(OUT_OF_MEMORY).evidence


def test_rank_that_the_first_to_fail_waited_for_is_the_culprit(tmp_path: Path) -> None:
    waits = "unbound_buffer.cc:78] Timed out waiting 8000ms for recv operation to complete"
    (tmp_path / "rank-0.log").write_text(f"step 3\n[rank0]: RuntimeError: [gloo/transport/tcp/{waits}\n")
    (tmp_path / "rank-1.log").write_text("step 3\n")
    answer = diagnose(LogInput((tmp_path,)), first_rank=0)
    assert (answer.code, answer.first_failure and answer.first_failure.rank) == ("collective-not-entered", 1)


def stack(name: str, *frames: str) -> LogChunk:
    text = "\n".join(('Thread 811 (idle): "MainThread"', *(f"    {frame}" for frame in frames), ""))
    return LogChunk(source=LogSource(name=name, rank=int(name[-1])), first_line=4, data=text.encode())


SLEEPING = "load (data.py:7)"
SUMMING = "all_reduce (torch/distributed/distributed_c10d.py:3211)"
GAVE_UP = (
    "RuntimeError: [../third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 2000ms for recv"
)


def test_rank_whose_stack_is_in_no_collective_is_the_one_that_never_entered() -> None:
    gave_up = chunk(f"{GAVE_UP} operation to complete", name="rank-0.log", rank=0)
    answer = diagnose_chunks([gave_up, stack("rank-1", SLEEPING, "train (train.py:9)")])
    assert (answer.failure_class, answer.confidence, answer.code) == (
        FailureClass.COLLECTIVE_MISMATCH,
        Confidence.CERTAIN,
        "collective-not-entered",
    )
    assert answer.first_failure is not None
    assert answer.first_failure.rank == 1
    assert (answer.evidence[0].where, "data.py:7 in load" in answer.evidence[0].text) == ("rank-1:4", True)


def test_stacks_alone_tell_who_is_missing_from_a_collective() -> None:
    inside = [stack(f"rank-{rank}", SUMMING, "train (train.py:9)") for rank in (0, 2)]
    answer = diagnose_chunks([*inside, stack("rank-1", SLEEPING)])
    assert (
        answer.what
        == "rank 1 never entered the collective (all_reduce) in which rank 0, 2 waited; it was at data.py:7 in load"
    )


def test_stack_beside_nccls_watchdog_is_likely_for_its_calls_return_early() -> None:
    answer = diagnose_chunks([chunk(waited(0), name="rank-0.log"), stack("rank-1", "step (train.py:9)")])
    assert (answer.confidence, answer.first_failure and answer.first_failure.rank) == (Confidence.LIKELY, 1)


def test_stacks_of_ranks_that_all_wait_or_none_name_no_root_cause() -> None:
    assert diagnose_chunks([stack(f"rank-{rank}", SUMMING) for rank in (0, 1)]).first_failure is None
    assert diagnose_chunks([stack(f"rank-{rank}", SLEEPING) for rank in (0, 1)]).first_failure is None


def test_peer_that_went_away_is_no_wrong_interface_though_it_was_on_this_host() -> None:
    gone = "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:561] Connection closed by peer [127.0.0.1]:45"
    answer = diagnose_lines(gone)
    assert (answer.failure_class, answer.code) == (FailureClass.UNKNOWN, "connection-closed")


def test_rank_that_died_in_a_collective_waited_for_nobody() -> None:
    died = chunk(
        "terminate called after throwing an instance of 'gloo::EnforceNotMet'",
        "Fatal Python error: Aborted",
        "",
        "Thread 0x00007f11 (most recent call first):",
        '  File "/opt/venv/site-packages/torch/distributed/distributed_c10d.py", line 3211 in all_reduce',
        '  File "/home/ada/train.py", line 14 in step',
        name="rank-0.log",
        rank=0,
    )
    answer = diagnose_chunks([died, chunk("step 3", name="rank-1.log", rank=1)])
    assert answer.failure_class is FailureClass.UNKNOWN
    assert answer.first_failure is None


def test_stacks_without_a_timeout_are_evidence_for_the_rank_that_wrote_none(tmp_path: Path) -> None:
    frame = (
        '  File "/opt/venv/lib/python3.12/site-packages/torch/distributed/distributed_c10d.py", line 3211 in all_reduce'
    )
    for rank in range(3):
        (tmp_path / f"rank-{rank}.log").write_text(f"Current thread 0x01 (most recent call first):\n{frame}\n")
    (tmp_path / "rank-3.log").write_text("step 3\n")
    answer = diagnose(LogInput((tmp_path,)), first_rank=0)
    assert answer.first_failure is not None
    assert (answer.first_failure.rank, bool(answer.evidence)) == (3, True)


def test_pile_without_a_word_of_a_run_asks_for_its_output_and_not_for_what_nobody_saw() -> None:
    found = diagnose_lines("# A project\nimport time\n")
    assert (found.failure_class, found.confidence) == (FailureClass.UNKNOWN, Confidence.UNSURE)
    assert [each.what for each in found.next_evidence] == [EVIDENCE_REQUESTS["output"].what]


SWITCH = "nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): "


def test_error_that_a_switch_got_over_is_not_sure_to_be_the_cause() -> None:
    assert (
        diagnose_lines(f"{SWITCH}20009, Non-fatal, Link 04 RX Short Error Rate").failure_class is FailureClass.UNKNOWN
    )
    answer = diagnose_lines(f"{SWITCH}20034, Fatal, Link 30 LTSSM Fault Up")
    assert (answer.failure_class, answer.confidence) == (FailureClass.GPU_XID, Confidence.CERTAIN)


def test_switch_that_lost_its_gpu_only_follows_from_the_gpus_own_error() -> None:
    alone = diagnose_lines(f"{SWITCH}19084, Fatal, Link 32 AN1 Heartbeat Timeout Error")
    assert alone.failure_class is FailureClass.UNKNOWN
    fallen = "NVRM: Xid (PCI:0000:1b:00): 79, pid=1234, name=python, GPU has fallen off the bus."
    both = diagnose_lines(f"{SWITCH}19084, Fatal, Link 32 AN1 Heartbeat Timeout Error", fallen)
    assert (both.failure_class, [one.code for one in both.symptoms]) == (FailureClass.GPU_XID, ["sxid-consequence"])
    assert "Xid 79" in both.what


LOOPBACK = "n0:7:91 [0] NCCL INFO Bootstrap : Using lo:127.0.0.1<0>"


def test_loopback_that_one_node_may_use_stands_behind_what_failed() -> None:
    answer = diagnose_lines(LOOPBACK, "n0:7:91 [0] NCCL INFO NET/OFI Selected Provider is tcp (found 1 nics)")
    assert answer.failure_class is FailureClass.RDMA_DEVICE_MISSING
    assert diagnose_lines(LOOPBACK, OUT_OF_MEMORY).failure_class is FailureClass.OOM_GPU


def test_loopback_beside_peers_that_do_not_meet_is_the_wrong_interface() -> None:
    answer = diagnose_lines(LOOPBACK, CLOSED)
    assert (answer.failure_class, answer.confidence, answer.code) == (
        FailureClass.WRONG_INTERFACE,
        Confidence.LIKELY,
        "loopback-interface-used",
    )


def open_of(*lines: str) -> set[FailureClass]:
    answer = diagnose_lines(*lines)
    assert answer.failure_class is FailureClass.UNKNOWN
    return {failure_class.label for missing in answer.next_evidence for failure_class in missing.distinguishes}


GENERIC = (
    "torch.distributed.DistBackendError: NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.hpp:268, unhandled "
    "system error (run with NCCL_DEBUG=INFO for details), NCCL version 2.21.5",
    "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.",
    "  exitcode  : 1 (pid: 93)",
    "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:",
)


def test_generic_lines_leave_open_what_a_person_can_look_after_the_likeliest_first() -> None:
    answer = diagnose_lines(*GENERIC)
    assert answer.next_evidence[0].distinguishes[0] is FailureClass.SHM_TOO_SMALL
    assert "NCCL WARN" in answer.next_evidence[0].what
    for lines in (GENERIC, (*GENERIC, waited(0), CLOSED), (CLOSED, waited(1), "failed (exitcode: -9) local_rank: 0")):
        assert 3 <= len(open_of(*lines)) <= MAX_OPEN_CLASSES


def test_each_generic_result_of_nccl_has_its_own_likeliest() -> None:
    cuda = diagnose_lines(GENERIC[0].replace("system error", "cuda error"))
    assert cuda.next_evidence[0].distinguishes[0] is FailureClass.VERSION_MISMATCH
    inside = diagnose_lines(GENERIC[0].replace("unhandled system error", "internal error"))
    assert inside.code == "nccl-internal"


def test_launchers_word_of_a_rank_opens_nothing_that_the_ranks_own_words_close() -> None:
    assert FailureClass.NAN_DATA in open_of(GENERIC[3])
    assert FailureClass.NAN_DATA not in open_of(*GENERIC)


def test_set_up_without_a_failure_asks_whether_it_hangs_or_is_slow() -> None:
    done = "n1:77:91 [3] NCCL INFO comm 0x5 rank 0 nranks 2 cudaDev 3 busId 1b000 commId 0x1 - Init COMPLETE"
    assert {FailureClass.ACS_IOMMU, FailureClass.COLLECTIVE_MISMATCH, FailureClass.GDR_MISSING} <= open_of(done)
    assert {FailureClass.WRONG_INTERFACE, FailureClass.RENDEZVOUS} <= open_of("NCCL version 2.28.9+cuda12.9")
    assert diagnose_lines(done).evidence == ()


def test_rank_that_stands_where_ranks_wait_for_one_and_long_work_are_a_straggler() -> None:
    stands = '    with training_args.main_process_first(desc="dataset map pre-processing"):'
    assert FailureClass.STRAGGLER in open_of(stands)
    works = "Running tokenizer on dataset:  88%|####8 | 383700/433643 [29:55<03:25, 2432.70 examples/s]"
    assert diagnose_lines(works, "Traceback (most recent call last):", stands).failure_class is FailureClass.STRAGGLER
    # an error of the work itself stands within the same lines, and is what ended it
    assert diagnose_lines(works, stands, "KeyError: 'tokens'").failure_class is FailureClass.PROGRAM_ERROR


@pytest.mark.parametrize(
    ("line", "failure_class"),
    [
        ("RuntimeError: Connection refused", FailureClass.RENDEZVOUS),
        (
            "AssertionError: batch (10) is not divisible by micro batch size (4) times data parallel size (6)",
            FailureClass.RANK_COUNT,
        ),
        ("TypeError: barrier() got an unexpected keyword argument 'x'", FailureClass.VERSION_MISMATCH),
        ("ValueError: No available memory for the cache blocks.", FailureClass.OOM_GPU),
    ],
)
def test_exception_that_speaks_of_more_than_the_program_is_not_taken_for_its_own(
    line: str, failure_class: FailureClass
) -> None:
    assert {failure_class, FailureClass.OTHER} <= open_of(line)


def test_exception_that_speaks_of_the_program_is_its_own() -> None:
    assert diagnose_lines("KeyError: 'input_ids'").failure_class is FailureClass.PROGRAM_ERROR


def test_set_up_of_which_no_line_tells_asks_the_same() -> None:
    listed = "n1:77:91 [3] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB ; OOB eth0:10.0.0.1<0>"
    assert {FailureClass.GDR_MISSING, FailureClass.ACS_IOMMU} <= open_of(listed)
    assert open_of("step 1 loss 2.3") == set()


CUT = (
    "Traceback (most recent call last):",
    '  File "/opt/venv/lib/python3.12/site-packages/torch/distributed/rendezvous.py", line 200, in _create_c10d_store',
    "    store = TCPStore(",
)


def test_traceback_that_is_cut_says_by_where_it_stands_between_what_to_look() -> None:
    assert {FailureClass.RENDEZVOUS, FailureClass.FIREWALL} <= open_of(*CUT)
    answer = diagnose_lines(*CUT, "torch.distributed.DistNetworkError: The client socket has timed out after 60000ms")
    assert answer.failure_class is FailureClass.RENDEZVOUS
    assert answer.symptoms == ()
    assert diagnose_lines(*CUT, "KeyError: 'tokens'").failure_class is FailureClass.PROGRAM_ERROR


def test_engine_that_lost_a_process_does_not_say_of_what() -> None:
    died = "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}"
    assert FailureClass.OOM_GPU in open_of(died)
    assert (
        diagnose_lines("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", died).failure_class
        is FailureClass.OOM_GPU
    )


def may_be(code: str, at: float | None) -> Hypothesis:
    """What a rule makes of one line that was written at this time."""
    return hypothesis_of(
        RULES[code], [Fact(rule=RULES[code], source="a", line=1, text=code, process=ProcessRef(), at=at)]
    )


def test_what_it_may_be_goes_by_evidence_then_by_time_then_by_depth() -> None:
    slows = replace(may_be("watchdog-timeout", 0.0), performance_only=True)
    sure = replace(may_be("watchdog-timeout", 90.0), confidence=Confidence.LIKELY)
    early, late = may_be("watchdog-timeout", 10.0), may_be("watchdog-timeout", 30.0)
    deep = replace(late, classes=(FailureClass.GPU_XID,))
    close = replace(
        early, classes=(FailureClass.NODE_LOST,), facts=(replace(early.facts[0], at=10.0 + MAX_CLOCK_SKEW_S - 1),)
    )
    nearest = replace(slows, code="nearest")
    expected = [nearest, sure, close, early, deep, late, slows]
    for causes in ([slows, late, deep, early, close, nearest, sure], expected):
        assert by_likelihood([as_suspect(cause, None) for cause in causes], nearest, CLOCKS) == expected
