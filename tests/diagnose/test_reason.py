"""From lines to the answer: who was first, what only followed, how sure, and which fact is missing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tests.diagnose.logs import block, told

from holdfast.diagnose.asking import MOST_OPEN
from holdfast.diagnose.block import Block, Source
from holdfast.diagnose.cause import Cause, cause_of
from holdfast.diagnose.classes import Class
from holdfast.diagnose.fact import Fact, Who
from holdfast.diagnose.pile import Pile
from holdfast.diagnose.pipeline import diagnose, diagnose_blocks
from holdfast.diagnose.reason import CLOCKS_S, _by_likelihood
from holdfast.diagnose.rules import RULES
from holdfast.diagnose.rules.deciding import DECIDING
from holdfast.diagnose.rules.row import Sureness

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
    answer = told(CLOSED, OUT_OF_MEMORY)
    assert (answer.klass, answer.sure) == (Class.OOM_GPU, Sureness.CERTAIN)
    assert [each.code for each in answer.consequences] == ["connection-closed"]
    assert answer.evidence[0].where == "log:2"
    assert answer.culprit is not None
    assert (answer.culprit.host, answer.culprit.pid) == ("n1", 77)


def test_secondary_lines_alone_are_unknown_and_ask_for_the_other_ranks() -> None:
    answer = told(CLOSED)
    assert answer.klass is Class.UNKNOWN
    assert any("every other rank" in each.fact for each in answer.missing)


def test_no_telling_line_is_unknown() -> None:
    answer = told("step 1 loss 2.3", "step 2 loss 2.2")
    assert (answer.klass, answer.evidence) == (Class.UNKNOWN, ())
    assert answer.missing


def test_sigkill_alone_does_not_prove_memory() -> None:
    killed = "failed (exitcode: -9) local_rank: 0 (pid: 178) of binary: /usr/bin/python"
    assert told(killed).klass is Class.UNKNOWN
    answer = told(killed, "Memory cgroup out of memory: Killed process 178 (python) total-vm:1kB")
    assert (answer.klass, answer.sure) == (Class.OOM_HOST, Sureness.CERTAIN)


def test_rank_of_host_and_process_is_joined_from_the_communicator() -> None:
    answer = told(
        "n1:77:91 [3] NCCL INFO comm 0x5 rank 11 nranks 16 cudaDev 3 busId 1b000 commId 0x1 - Init START",
        OUT_OF_MEMORY,
    )
    assert answer.culprit is not None
    assert answer.culprit.rank == 11


def test_rank_behind_in_the_sequence_is_the_one_that_never_entered() -> None:
    answer = told(waited(0), stood(0, 19, 18), waited(1), stood(1, 19, 18), stood(2, 18, 18))
    assert answer.klass is Class.COLLECTIVE_MISMATCH
    assert answer.culprit is not None
    assert answer.culprit.rank == 2
    assert "never entered" in answer.what
    assert answer.sure is not Sureness.CERTAIN


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
    answer = told(*KEY_ERROR, RETRY, RETRY)
    assert (answer.klass, answer.sure, str(answer.culprit)) == (Class.PROGRAM_ERROR, Sureness.LIKELY, "rank 3")
    assert ("completion-retry", 2) in [(each.code, each.count) for each in answer.consequences]
    apart = diagnose_blocks([block(RETRY, name="n0.log"), block(*KEY_ERROR, name="n1.log")])
    assert apart.klass is Class.PROGRAM_ERROR


def test_error_after_the_network_was_lost_is_no_cause_of_that() -> None:
    answer = told(RETRY, *KEY_ERROR)
    assert answer.klass is Class.NETWORK_LOSS


def dump(rank: int, line: int, call: str = "all_reduce") -> Block:
    frames = (
        f"    {call} (/opt/venv/lib/python3.12/site-packages/torch/distributed/distributed_c10d.py:3211)",
        f"    main (/home/ada/train.py:{line})",
    )
    return block(f'Thread {rank + 7} (idle): "MainThread"', *frames, name=f"stacks-rank-{rank}.txt", rank=rank)


def test_rank_that_waits_where_no_other_does_went_astray() -> None:
    answer = diagnose_blocks([dump(0, 31), dump(1, 44), dump(2, 31)])
    assert (answer.klass, answer.sure, str(answer.culprit)) == (
        Class.COLLECTIVE_MISMATCH,
        Sureness.LIKELY,
        "rank 1",
    )
    assert "rank 1 in all_reduce at train.py:44" in answer.what


def test_of_two_ranks_in_different_calls_neither_is_named() -> None:
    answer = diagnose_blocks([dump(0, 31), dump(1, 44)])
    assert (answer.klass, answer.culprit) == (Class.COLLECTIVE_MISMATCH, None)


def test_ranks_that_wait_for_one_other_each_may_stand_anywhere() -> None:
    answer = diagnose_blocks([dump(0, 31, "recv"), dump(1, 44, "recv"), dump(2, 31, "recv")])
    assert answer.klass is Class.UNKNOWN


def test_one_rank_that_waited_is_not_the_culprit() -> None:
    answer = told(waited(2), stood(2, 19, 18))
    assert (answer.klass, answer.culprit) == (Class.UNKNOWN, None)
    assert any("last collective" in each.fact for each in answer.missing)


def test_rank_that_wrote_no_timeout_is_found_by_difference() -> None:
    blocks = [block(waited(rank), name=f"rank-{rank}.log", rank=rank) for rank in (0, 1, 3)]
    blocks.append(block("loading a shard", name="rank-2.log", rank=2))
    world = "n0:1:2 [0] NCCL INFO comm 0x5 rank 0 nranks 4 cudaDev 0 busId 1b000 - Init COMPLETE"
    answer = diagnose_blocks([block(world, name="rank-0.log", rank=0), *blocks])
    assert answer.culprit is not None
    assert answer.culprit.rank == 2


def test_different_operations_at_one_number_are_a_mismatch() -> None:
    answer = told(waited(0), waited(1, op="BROADCAST"))
    assert answer.klass is Class.COLLECTIVE_MISMATCH
    assert "BROADCAST" in answer.what


def test_error_of_one_rank_explains_the_wait_of_the_others() -> None:
    answer = told(waited(0), waited(1), "[rank2]: KeyError: 'input_ids'")
    assert (answer.klass, answer.code) == (Class.PROGRAM_ERROR, "python-exception")
    assert answer.culprit is not None
    assert answer.culprit.rank == 2
    assert "watchdog-timeout" in {each.code for each in answer.consequences}


def test_first_of_two_errors_by_the_clock_is_the_cause() -> None:
    later, earlier = "2026-11-20 10:05:00,000 ValueError: late", "2026-11-20 10:00:00,000 KeyError: 'early'"
    answer = diagnose_blocks([block(f"x] {later}", name="a"), block(f"x] {earlier}", name="b")])
    assert "early" in answer.evidence[0].text


def test_contradicting_certain_lines_make_the_answer_only_likely() -> None:
    answer = told(OUT_OF_MEMORY, "OSError: [Errno 24] Too many open files")
    assert answer.sure is Sureness.LIKELY
    assert answer.also


def test_plain_tcp_is_not_the_cause_of_a_crash() -> None:
    answer = told("n1:8:9 [0] NCCL INFO NET/IB : No device found.", "[rank2]: KeyError: 'input_ids'")
    assert answer.klass is Class.PROGRAM_ERROR


def test_every_answer_that_names_a_class_has_evidence() -> None:
    assert told(OUT_OF_MEMORY).evidence


def test_rank_that_the_first_to_fail_waited_for_is_the_culprit(tmp_path: Path) -> None:
    waits = "unbound_buffer.cc:78] Timed out waiting 8000ms for recv operation to complete"
    (tmp_path / "rank-0.log").write_text(f"step 3\n[rank0]: RuntimeError: [gloo/transport/tcp/{waits}\n")
    (tmp_path / "rank-1.log").write_text("step 3\n")
    answer = diagnose(Pile((tmp_path,)), first_rank=0)
    assert (answer.code, answer.culprit and answer.culprit.rank) == ("never-entered", 1)


def stack(name: str, *frames: str) -> Block:
    text = "\n".join(('Thread 811 (idle): "MainThread"', *(f"    {frame}" for frame in frames), ""))
    return Block(source=Source(name=name, rank=int(name[-1])), first_line=4, data=text.encode())


SLEEPING = "load (data.py:7)"
SUMMING = "all_reduce (torch/distributed/distributed_c10d.py:3211)"
GAVE_UP = (
    "RuntimeError: [../third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 2000ms for recv"
)


def test_rank_whose_stack_is_in_no_collective_is_the_one_that_never_entered() -> None:
    gave_up = block(f"{GAVE_UP} operation to complete", name="rank-0.log", rank=0)
    answer = diagnose_blocks([gave_up, stack("rank-1", SLEEPING, "train (train.py:9)")])
    assert (answer.klass, answer.sure, answer.code) == (Class.COLLECTIVE_MISMATCH, Sureness.CERTAIN, "never-entered")
    assert answer.culprit is not None
    assert answer.culprit.rank == 1
    assert (answer.evidence[0].where, "data.py:7 in load" in answer.evidence[0].text) == ("rank-1:4", True)


def test_stacks_alone_tell_who_is_missing_from_a_collective() -> None:
    inside = [stack(f"rank-{rank}", SUMMING, "train (train.py:9)") for rank in (0, 2)]
    answer = diagnose_blocks([*inside, stack("rank-1", SLEEPING)])
    assert (
        answer.what
        == "rank 1 never entered the collective (all_reduce) that rank 0, 2 waited in; it stood at data.py:7 in load"
    )


def test_stack_beside_nccls_watchdog_is_likely_for_its_calls_return_early() -> None:
    answer = diagnose_blocks([block(waited(0), name="rank-0.log"), stack("rank-1", "step (train.py:9)")])
    assert (answer.sure, answer.culprit and answer.culprit.rank) == (Sureness.LIKELY, 1)


def test_stacks_of_ranks_that_all_wait_or_none_blame_nobody() -> None:
    assert diagnose_blocks([stack(f"rank-{rank}", SUMMING) for rank in (0, 1)]).culprit is None
    assert diagnose_blocks([stack(f"rank-{rank}", SLEEPING) for rank in (0, 1)]).culprit is None


def test_peer_that_went_away_is_no_wrong_interface_though_it_was_on_this_host() -> None:
    gone = "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:561] Connection closed by peer [127.0.0.1]:45"
    answer = told(gone)
    assert (answer.klass, answer.code) == (Class.UNKNOWN, "connection-closed")


def test_rank_that_died_in_a_collective_waited_for_nobody() -> None:
    died = block(
        "terminate called after throwing an instance of 'gloo::EnforceNotMet'",
        "Fatal Python error: Aborted",
        "",
        "Thread 0x00007f11 (most recent call first):",
        '  File "/opt/venv/site-packages/torch/distributed/distributed_c10d.py", line 3211 in all_reduce',
        '  File "/home/ada/train.py", line 14 in step',
        name="rank-0.log",
        rank=0,
    )
    answer = diagnose_blocks([died, block("step 3", name="rank-1.log", rank=1)])
    assert answer.klass is Class.UNKNOWN
    assert answer.culprit is None


def test_stacks_without_a_timeout_are_evidence_for_the_rank_that_wrote_none(tmp_path: Path) -> None:
    frame = (
        '  File "/opt/venv/lib/python3.12/site-packages/torch/distributed/distributed_c10d.py", line 3211 in all_reduce'
    )
    for rank in range(3):
        (tmp_path / f"rank-{rank}.log").write_text(f"Current thread 0x01 (most recent call first):\n{frame}\n")
    (tmp_path / "rank-3.log").write_text("step 3\n")
    answer = diagnose(Pile((tmp_path,)), first_rank=0)
    assert answer.culprit is not None
    assert (answer.culprit.rank, bool(answer.evidence)) == (3, True)


def test_pile_without_a_word_of_a_run_asks_for_its_output_and_not_for_what_nobody_saw() -> None:
    found = told("# A project\nimport time\n")
    assert (found.klass, found.sure) == (Class.UNKNOWN, Sureness.UNSURE)
    assert [each.fact for each in found.missing] == [DECIDING["output"].fact]


SWITCH = "nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): "


def test_error_that_a_switch_got_over_is_not_sure_to_be_the_cause() -> None:
    assert told(f"{SWITCH}20009, Non-fatal, Link 04 RX Short Error Rate").klass is Class.UNKNOWN
    answer = told(f"{SWITCH}20034, Fatal, Link 30 LTSSM Fault Up")
    assert (answer.klass, answer.sure) == (Class.GPU_XID, Sureness.CERTAIN)


def test_switch_that_lost_its_gpu_only_follows_from_the_gpus_own_error() -> None:
    alone = told(f"{SWITCH}19084, Fatal, Link 32 AN1 Heartbeat Timeout Error")
    assert alone.klass is Class.UNKNOWN
    fallen = "NVRM: Xid (PCI:0000:1b:00): 79, pid=1234, name=python, GPU has fallen off the bus."
    both = told(f"{SWITCH}19084, Fatal, Link 32 AN1 Heartbeat Timeout Error", fallen)
    assert (both.klass, [one.code for one in both.consequences]) == (Class.GPU_XID, ["sxid-consequence"])
    assert "Xid 79" in both.what


LOOPBACK = "n0:7:91 [0] NCCL INFO Bootstrap : Using lo:127.0.0.1<0>"


def test_loopback_that_one_node_may_use_stands_behind_what_failed() -> None:
    answer = told(LOOPBACK, "n0:7:91 [0] NCCL INFO NET/OFI Selected Provider is tcp (found 1 nics)")
    assert answer.klass is Class.RDMA_DEVICE_MISSING
    assert told(LOOPBACK, OUT_OF_MEMORY).klass is Class.OOM_GPU


def test_loopback_beside_peers_that_do_not_meet_is_the_wrong_interface() -> None:
    answer = told(LOOPBACK, CLOSED)
    assert (answer.klass, answer.sure, answer.code) == (Class.WRONG_INTERFACE, Sureness.LIKELY, "loopback-taken")


def open_of(*lines: str) -> set[Class]:
    answer = told(*lines)
    assert answer.klass is Class.UNKNOWN
    return {klass.label for missing in answer.missing for klass in missing.decides}


GENERIC = (
    "torch.distributed.DistBackendError: NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.hpp:268, unhandled "
    "system error (run with NCCL_DEBUG=INFO for details), NCCL version 2.21.5",
    "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.",
    "  exitcode  : 1 (pid: 93)",
    "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:",
)


def test_generic_lines_leave_open_what_a_person_can_look_after_the_likeliest_first() -> None:
    answer = told(*GENERIC)
    assert answer.missing[0].decides[0] is Class.SHM_TOO_SMALL
    assert "NCCL WARN" in answer.missing[0].fact
    for lines in (GENERIC, (*GENERIC, waited(0), CLOSED), (CLOSED, waited(1), "failed (exitcode: -9) local_rank: 0")):
        assert 3 <= len(open_of(*lines)) <= MOST_OPEN


def test_each_generic_result_of_nccl_has_its_own_likeliest() -> None:
    cuda = told(GENERIC[0].replace("system error", "cuda error"))
    assert cuda.missing[0].decides[0] is Class.VERSION_MISMATCH
    inside = told(GENERIC[0].replace("unhandled system error", "internal error"))
    assert inside.code == "nccl-internal"


def test_launchers_word_of_a_rank_opens_nothing_that_the_ranks_own_words_close() -> None:
    assert Class.NAN_DATA in open_of(GENERIC[3])
    assert Class.NAN_DATA not in open_of(*GENERIC)


def test_set_up_without_a_failure_asks_whether_it_hangs_or_is_slow() -> None:
    done = "n1:77:91 [3] NCCL INFO comm 0x5 rank 0 nranks 2 cudaDev 3 busId 1b000 commId 0x1 - Init COMPLETE"
    assert {Class.ACS_IOMMU, Class.COLLECTIVE_MISMATCH, Class.GDR_MISSING} <= open_of(done)
    assert {Class.WRONG_INTERFACE, Class.RENDEZVOUS} <= open_of("NCCL version 2.28.9+cuda12.9")
    assert told(done).evidence == ()


def test_rank_that_stands_where_ranks_wait_for_one_and_long_work_are_a_straggler() -> None:
    stands = '    with training_args.main_process_first(desc="dataset map pre-processing"):'
    assert Class.STRAGGLER in open_of(stands)
    works = "Running tokenizer on dataset:  88%|####8 | 383700/433643 [29:55<03:25, 2432.70 examples/s]"
    assert told(works, "Traceback (most recent call last):", stands).klass is Class.STRAGGLER
    # an error of the work itself stands within the same lines, and is what ended it
    assert told(works, stands, "KeyError: 'tokens'").klass is Class.PROGRAM_ERROR


@pytest.mark.parametrize(
    ("line", "klass"),
    [
        ("RuntimeError: Connection refused", Class.RENDEZVOUS),
        (
            "AssertionError: batch (10) is not divisible by micro batch size (4) times data parallel size (6)",
            Class.RANK_COUNT,
        ),
        ("TypeError: barrier() got an unexpected keyword argument 'x'", Class.VERSION_MISMATCH),
        ("ValueError: No available memory for the cache blocks.", Class.OOM_GPU),
    ],
)
def test_exception_that_speaks_of_more_than_the_program_is_not_taken_for_its_own(line: str, klass: Class) -> None:
    assert {klass, Class.OTHER} <= open_of(line)


def test_exception_that_speaks_of_the_program_is_its_own() -> None:
    assert told("KeyError: 'input_ids'").klass is Class.PROGRAM_ERROR


def test_set_up_of_which_no_line_tells_asks_the_same() -> None:
    listed = "n1:77:91 [3] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB ; OOB eth0:10.0.0.1<0>"
    assert {Class.GDR_MISSING, Class.ACS_IOMMU} <= open_of(listed)
    assert open_of("step 1 loss 2.3") == set()


CUT = (
    "Traceback (most recent call last):",
    '  File "/opt/venv/lib/python3.12/site-packages/torch/distributed/rendezvous.py", line 200, in _create_c10d_store',
    "    store = TCPStore(",
)


def test_traceback_that_is_cut_says_by_where_it_stands_between_what_to_look() -> None:
    assert {Class.RENDEZVOUS, Class.FIREWALL} <= open_of(*CUT)
    answer = told(*CUT, "torch.distributed.DistNetworkError: The client socket has timed out after 60000ms")
    assert answer.klass is Class.RENDEZVOUS
    assert answer.consequences == ()
    assert told(*CUT, "KeyError: 'tokens'").klass is Class.PROGRAM_ERROR


def test_engine_that_lost_a_process_does_not_say_of_what() -> None:
    died = "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}"
    assert Class.OOM_GPU in open_of(died)
    assert told("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", died).klass is Class.OOM_GPU


def may_be(code: str, at: float | None) -> Cause:
    """What a rule makes of one line that was written at this time."""
    return cause_of(RULES[code], [Fact(rule=RULES[code], source="a", line=1, text=code, who=Who(), at=at)])


def test_what_it_may_be_goes_by_evidence_then_by_time_then_by_depth() -> None:
    slows = replace(may_be("watchdog-timeout", 0.0), degrades=True)
    sure = replace(may_be("watchdog-timeout", 90.0), sure=Sureness.LIKELY)
    early, late = may_be("watchdog-timeout", 10.0), may_be("watchdog-timeout", 30.0)
    deep = replace(late, classes=(Class.GPU_XID,))
    close = replace(early, classes=(Class.NODE_LOST,), facts=(replace(early.facts[0], at=10.0 + CLOCKS_S - 1),))
    nearest = replace(slows, code="nearest")
    expected = [nearest, sure, close, early, deep, late, slows]
    assert _by_likelihood([slows, late, deep, early, close, nearest, sure], nearest) == expected
    assert _by_likelihood(expected, nearest) == expected
