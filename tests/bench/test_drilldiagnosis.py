"""Every drill, done for real, is diagnosed for what it is by somebody who does not know of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench.drilldiagnosis import CASES, Case, Unavailable, diagnosed, judged

from holdfast.diagnose.answer import Answer, Culprit
from holdfast.diagnose.classes import Class
from holdfast.diagnose.rules.row import Sureness
from holdfast.events import DrillAction, DrillTarget
from holdfast.job.drills import DRILLS

QUICK = {(DrillAction.KILL, DrillTarget.RANK)}

OF_ONE_REPLICA = [
    (DrillAction.KILL, DrillTarget.RANK),
    (DrillAction.STOP, DrillTarget.RANK),
    (DrillAction.HANG, DrillTarget.RANK),
    (DrillAction.RAISE, DrillTarget.RANK),
    (DrillAction.KILL, DrillTarget.NODE),
]


def test_every_drill_has_its_case() -> None:
    assert CASES.keys() == DRILLS.keys()


def _parameters() -> list[object]:
    found: list[object] = []
    for drill, case in CASES.items():
        marks = [] if drill in QUICK else [pytest.mark.slow]
        marks += [pytest.mark.root] if case.needs not in ("", "netns") else []
        found.append(pytest.param(*drill, marks=marks, id="-".join(drill)))
    return found


@pytest.mark.parametrize(("action", "target"), _parameters())
def test_drill_is_diagnosed_for_what_it_is(tmp_path: Path, action: DrillAction, target: DrillTarget) -> None:
    try:
        answer = diagnosed(action, target, tmp_path)
    except Unavailable as error:
        pytest.skip(str(error))
    case = CASES[action, target]
    assert judged(case, answer, case.replicas), answer


@pytest.mark.slow
def test_rank_that_hangs_in_a_collective_is_named_whichever_it_is(tmp_path: Path) -> None:
    drill = DrillAction.HANG, DrillTarget.COLLECTIVE
    answer = diagnosed(*drill, tmp_path, number=0)
    assert judged(CASES[drill], answer, number=0), answer


@pytest.mark.slow
@pytest.mark.parametrize(("action", "target"), OF_ONE_REPLICA)
def test_drill_of_one_replica_of_two_is_diagnosed_likewise(
    tmp_path: Path, action: DrillAction, target: DrillTarget
) -> None:
    answer = diagnosed(action, target, tmp_path, 2)
    assert judged(CASES[action, target], answer, 2), answer


@pytest.mark.parametrize(
    ("klass", "rank", "right"),
    [(Class.KILLED, 1, True), (Class.KILLED, 0, False), (Class.OOM_HOST, 1, False), (Class.UNKNOWN, 1, False)],
)
def test_answer_is_right_only_with_class_and_culprit(klass: Class, rank: int, *, right: bool) -> None:
    case = Case(klass=Class.KILLED, culprit="rank {0} on node{0}")
    culprit = Culprit(rank=rank, node="node1")
    answer = Answer(what="", klass=klass, code="run-rank-killed", sure=Sureness.LIKELY, culprit=culprit)
    assert judged(case, answer) is right
    assert not judged(Case(), answer)
