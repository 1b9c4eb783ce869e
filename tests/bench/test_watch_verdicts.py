"""What an event log tells of a planted fault: its kind and rank, and nodes that were replaced without need."""

from __future__ import annotations

from bench.watch_verdicts import KINDS, Kind, Seen, healthy_replaced, is_right, read_log, told, without_drills

from holdfast.diagnose.failure_classes import FailureClass
from holdfast.events import (
    AnyEvent,
    FaultAction,
    FaultRequested,
    FaultTarget,
    FindingRaised,
    NodeRequested,
    NumericFault,
    NumericFaultObserved,
    RecoveryDecided,
)
from holdfast.findings import Finding


def kind(name: str) -> Kind:
    return next(each for each in KINDS if each.name == name)


def decided(code: str, rank: int) -> RecoveryDecided:
    found = Finding(code=code, what=f"rank {rank} on node{rank} failed", where=f"rank {rank} on node{rank}")
    return RecoveryDecided(
        at=2.0, replica=0, attempt=0, action="restart", failed_at=1.0, finding=found, first_failed_rank=rank
    )


def damaged(rank: int, quantity: str) -> NumericFaultObserved:
    found = Finding(code="weights-not-finite", what="", where=f"rank {rank}")
    return NumericFaultObserved(
        at=1.0, node=rank, replica=0, attempt=0, rank=rank, step=9, fault=NumericFault.NON_FINITE, quantity=quantity,
        damaged=True, finding=found,
    )  # fmt: skip


def raised(code: str, rank: int) -> FindingRaised:
    return FindingRaised(at=2.0, finding=Finding(code=code, what="", where=f"rank {rank}"))


def seen(*events: AnyEvent, failure_class: FailureClass | None = None) -> Seen:
    return read_log(events, failure_class)


def test_kind_is_told_by_what_was_no_number_first_and_by_the_diagnosis() -> None:
    decision = decided("weights-not-finite", 2)
    assert told(seen(damaged(2, "loss"), damaged(0, "gradient"), decision)) == [("NaN loss", 2)]
    assert told(seen(damaged(2, "gradient"), damaged(2, "loss"), decision)) == [("NaN gradient", 2)]
    hung = decided("rank-hung", 1)
    assert told(seen(hung, failure_class=FailureClass.HANG_UNKNOWN)) == [("stopped rank", 1)]
    assert told(seen(hung, failure_class=FailureClass.UNKNOWN)) == []


def test_verdict_is_wrong_for_another_rank_or_two_kinds() -> None:
    assert is_right(kind("crash of a rank"), 3, seen(decided("rank-killed", 3)))
    assert not is_right(kind("crash of a rank"), 2, seen(decided("rank-killed", 3)))
    assert not is_right(kind("crash of a rank"), 3, seen(decided("rank-killed", 3), raised("straggler", 3)))


def test_replaced_node_is_wrong_unless_its_own_fault_calls_for_it() -> None:
    log = seen(decided("gpu-failed", 1), NodeRequested(at=3.0, node=1, generation=1))
    assert is_right(kind("lost GPU"), 1, log)
    assert healthy_replaced(kind("crash of a rank"), 1, log) == {1}
    assert not is_right(kind("crash of a rank"), 1, seen(decided("rank-killed", 1), log_of_replacement(1)))
    assert not is_right(kind("lost GPU"), 1, seen(decided("gpu-failed", 1), log_of_replacement(0)))


def log_of_replacement(node: int) -> NodeRequested:
    return NodeRequested(at=3.0, node=node, generation=1)


def test_blind_log_has_no_record_of_the_drill() -> None:
    drill = FaultRequested(at=1.0, target=FaultTarget.RANK, index=1, action=FaultAction.KILL)
    assert without_drills([drill, decided("rank-killed", 1)]) == [decided("rank-killed", 1)]


def test_each_kind_has_a_drill_of_its_own() -> None:
    assert len({(each.action, each.target) for each in KINDS}) == len({each.name for each in KINDS}) == 14
