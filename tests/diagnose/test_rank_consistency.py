"""Rank numbers, waiting ranks and exception locations, from the logs of all ranks."""

from __future__ import annotations

from tests.diagnose.log_lines import chunk, diagnose_lines

from holdfast.diagnose.failure_classes import Confidence, FailureClass
from holdfast.diagnose.pipeline import diagnose_chunks
from holdfast.diagnose.root_cause_analysis import diagnose_facts
from holdfast.diagnose.scanner import Scanner


def met(rank: int, *, world: int = 4, host: str = "n1", state: str = "START") -> str:
    return (
        f"{host}:{100 + rank}:1 [0] NCCL INFO comm 0x5 rank {rank} nranks {world} cudaDev 0 busId 1b000 "
        f"commId 0xabc - Init {state}"
    )


def test_different_world_sizes_are_a_mismatch_where_nothing_else_failed() -> None:
    answer = diagnose_lines("[rank0]: WORLD_SIZE=16 MASTER_ADDR=n0", "[rank8]: WORLD_SIZE=8 MASTER_ADDR=n0")
    assert (answer.failure_class, answer.confidence) == (FailureClass.RANK_COUNT, Confidence.LIKELY)
    assert len(answer.evidence) == 2


def test_different_world_sizes_of_two_attempts_hide_no_error() -> None:
    answer = diagnose_lines("WORLD_SIZE=16", "[rank2]: KeyError: 'input_ids'", "WORLD_SIZE=8")
    assert answer.failure_class is FailureClass.PROGRAM_ERROR


def test_two_processes_of_one_rank_are_a_mismatch() -> None:
    answer = diagnose_lines(met(1), met(1, host="n2"))
    assert answer.failure_class is FailureClass.RANK_COUNT
    assert "rank 1" in answer.what


def test_rank_that_never_came_is_named_by_set_difference() -> None:
    answer = diagnose_lines(met(0), met(1), met(3))
    assert answer.failure_class is FailureClass.UNKNOWN
    assert "rank 2 never came" in answer.what


def test_communicator_that_was_made_misses_nobody() -> None:
    assert "never came" not in diagnose_lines(met(0), met(1), met(3), met(0, state="COMPLETE")).what


def test_rank_that_neither_waited_nor_failed_is_the_one_that_never_came() -> None:
    waits = "RuntimeError: [../third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 10000ms for "
    blocks = [
        chunk(f"{waits}recv operation to complete", name="rank-0.log", rank=0),
        chunk("step 4", rank=1, name="r1"),
    ]
    scanner = Scanner()
    facts = [fact for each in blocks for fact in scanner.feed(each)]
    found = diagnose_facts(facts, counts=scanner.counts, ranks_with_logs=frozenset({0, 1}))
    assert found.code == "collective-not-entered"
    assert found.first_failure is not None
    assert found.first_failure.rank == 1


TRACEBACK = (
    "Traceback (most recent call last):",
    '  File "/home/me/train.py", line 12, in <module>',
    "    main()",
    '  File "/home/me/train.py", line 7, in main',
    "    loader[0]",
    '  File "/usr/lib/python3.11/site-packages/torch/x.py", line 99, in __getitem__',
    "    return self.data[key]",
    "KeyError: 'input_ids'",
)


def test_exception_is_told_with_the_innermost_frame_of_ones_own_code() -> None:
    answer = diagnose_chunks([chunk(*TRACEBACK, name="rank-1.log", rank=1)])
    assert answer.what == "the program raised KeyError: 'input_ids', at train.py:7 in main"
    assert not answer.next_evidence


def test_traceback_of_the_rank_that_failed_first_leaves_nothing_open() -> None:
    scanner = Scanner()
    later = list(scanner.feed(chunk("ValueError: x", name="rank-0.log", rank=0)))
    facts = [*later, *scanner.feed(chunk(*TRACEBACK, name="rank-1.log", rank=1))]
    found = diagnose_facts(facts, counts=scanner.counts, first_rank=1)
    assert found.confidence is Confidence.CERTAIN
    assert "train.py:7" in found.what


def test_rank_that_a_launcher_started_twice_is_a_mismatch() -> None:
    answer = diagnose_lines(*["initializing distributed: GLOBAL_RANK: 0, MEMBER: 1/2"] * 2)
    assert answer.failure_class is FailureClass.RANK_COUNT


def test_clocks_that_differ_a_little_turn_no_order_around() -> None:
    gpu = chunk("2026-11-20 10:00:02,000 NVRM: Xid (PCI:0000:1b:00): 79, GPU has fallen off the bus.", name="dmesg")
    ranks = chunk("2026-11-20 10:00:00,000 [rank2]: KeyError: 'input_ids'", name="rank-2.log", rank=2)
    assert diagnose_chunks([ranks, gpu]).failure_class is FailureClass.GPU_XID


def test_address_of_a_gpu_is_no_xid() -> None:
    answer = diagnose_lines("NVRM: Xid (PCI:0000:79:00): 45, pid=8812, name=python, Ch 00000008")
    assert answer.failure_class is FailureClass.UNKNOWN


def member(rank: int, world: int = 4) -> str:
    return f"initializing ddp: GLOBAL_RANK: {rank}, MEMBER: {rank + 1}/{world}"


def test_rank_of_lightning_that_never_came_is_asked_for_where_nothing_else_is_known() -> None:
    answer = diagnose_lines(member(0), member(1), member(3))
    assert (answer.failure_class, answer.code) == (FailureClass.UNKNOWN, "communicator-incomplete")
    assert "rank 2" in answer.what
    assert any(FailureClass.RANK_COUNT in missing.distinguishes for missing in answer.next_evidence)


def test_ranks_of_lightning_of_the_other_node_are_not_missed_where_something_failed() -> None:
    answer = diagnose_lines(
        member(0), member(1), "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
    )
    assert (answer.failure_class, answer.code) == (FailureClass.OOM_GPU, "gpu-out-of-memory")
    answer = diagnose_lines(member(0), member(1), "RuntimeError: DataLoader timed out after 600 seconds")
    assert (answer.code, answer.also_seen) == ("dataloader-timeout", ())


def test_ranks_of_lightning_that_all_came_or_of_which_few_did_tell_of_nothing() -> None:
    for ranks in (range(4), range(1)):
        answer = diagnose_lines(*(member(rank) for rank in ranks))
        assert (answer.code, answer.evidence) == ("", ())
