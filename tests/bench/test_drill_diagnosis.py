"""Every drill, done for real, is diagnosed for what it is by somebody who does not know of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench.drill_diagnosis import CASES, Case, Unavailable, diagnose_drill, is_correct
from tests.runs.forked_starts import FORKABLE, ForkedStarts

from holdfast.diagnose.diagnosis import Diagnosis
from holdfast.diagnose.fact import ProcessRef
from holdfast.diagnose.failure_classes import Confidence, FailureClass
from holdfast.events import FaultAction, FaultTarget
from holdfast.job.fault_catalog import FAULTS

QUICK = {(FaultAction.KILL, FaultTarget.RANK)}

SEEN_IN_STACKS = {FaultAction.HANG, FaultAction.STOP}
"""Diagnosed by stacks, in which a fork shows its parent's frames too."""

Drill = tuple[FaultAction, FaultTarget]

OF_ONE_REPLICA = [
    (FaultAction.KILL, FaultTarget.RANK),
    (FaultAction.STOP, FaultTarget.RANK),
    (FaultAction.HANG, FaultTarget.RANK),
    (FaultAction.RAISE, FaultTarget.RANK),
    (FaultAction.KILL, FaultTarget.NODE),
]


def test_every_drill_has_its_case() -> None:
    assert CASES.keys() == FAULTS.keys()


def _parameters() -> list[object]:
    found: list[object] = []
    for drill, case in CASES.items():
        marks = [] if drill in QUICK else [pytest.mark.slow]
        marks += [pytest.mark.root] if case.needs not in ("", "netns") else []
        found.append(pytest.param(drill, marks=marks, id="-".join(drill)))
    return found


def _diagnose(starts: ForkedStarts, drill: Drill, base: Path, replicas: int = 1, number: int = 1) -> Diagnosis:
    """The bench's answer, where possible with processes that are forks: half of the CPU time is that of imports."""
    action, _ = drill
    if action in SEEN_IN_STACKS or CASES[drill].needs == "resources.memory":
        return diagnose_drill(*drill, base, replicas, number)
    with starts.used():
        return diagnose_drill(*drill, base, replicas, number, FORKABLE)


@pytest.mark.slow
@pytest.mark.parametrize("drill", _parameters())
def test_drill_is_diagnosed_for_what_it_is(tmp_path: Path, drill: Drill, forked_starts: ForkedStarts) -> None:
    try:
        answer = _diagnose(forked_starts, drill, tmp_path)
    except Unavailable as error:
        pytest.skip(str(error))
    case = CASES[drill]
    assert is_correct(case, answer, case.replicas), answer


@pytest.mark.slow
def test_rank_that_hangs_in_a_collective_is_named_whichever_it_is(tmp_path: Path) -> None:
    drill = FaultAction.HANG, FaultTarget.COLLECTIVE
    answer = diagnose_drill(*drill, tmp_path, number=0)
    assert is_correct(CASES[drill], answer, number=0), answer


@pytest.mark.slow
@pytest.mark.parametrize("drill", OF_ONE_REPLICA, ids="-".join)
def test_drill_of_one_replica_of_two_is_diagnosed_likewise(
    tmp_path: Path, drill: Drill, forked_starts: ForkedStarts
) -> None:
    answer = _diagnose(forked_starts, drill, tmp_path, 2)
    assert is_correct(CASES[drill], answer, 2), answer


@pytest.mark.parametrize(
    ("failure_class", "rank", "right"),
    [
        (FailureClass.KILLED, 1, True),
        (FailureClass.KILLED, 0, False),
        (FailureClass.OOM_HOST, 1, False),
        (FailureClass.UNKNOWN, 1, False),
    ],
)
def test_answer_is_right_only_with_class_and_culprit(failure_class: FailureClass, rank: int, *, right: bool) -> None:
    case = Case(failure_class=FailureClass.KILLED, first_failure="rank {0} on node{0}")
    culprit = ProcessRef(rank=rank, node="node1")
    answer = Diagnosis(
        what="",
        failure_class=failure_class,
        code="run-rank-killed",
        confidence=Confidence.LIKELY,
        first_failure=culprit,
    )
    assert is_correct(case, answer) is right
    assert not is_correct(Case(), answer)
