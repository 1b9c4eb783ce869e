"""What was read is not asked for."""

from __future__ import annotations

from holdfast.diagnose.answer import Answer, Culprit, Evidence, Missing
from holdfast.diagnose.athand import OF_A_RUN, nothing_failed, placed, without
from holdfast.diagnose.classes import Class
from holdfast.diagnose.rules.deciding import DECIDING
from holdfast.diagnose.rules.row import Sureness
from holdfast.events import Outcome


def unknown(*names: str) -> Answer:
    missing = tuple(
        Missing(fact=DECIDING[name].fact, get=DECIDING[name].get, decides=(Class.OOM_HOST,)) for name in names
    )
    return Answer(what="", klass=Class.UNKNOWN, code="", sure=Sureness.UNSURE, missing=missing)


def test_logs_that_were_read_are_not_asked_for() -> None:
    (left,) = without(unknown("all-ranks", "stacks", "who-joined"), OF_A_RUN).missing
    assert left.fact == DECIDING["stacks"].fact


def test_unknown_always_asks_for_something() -> None:
    (left,) = without(unknown("first-traceback"), OF_A_RUN).missing
    assert (left.fact, left.decides) == (DECIDING["own-words"].fact, (Class.OOM_HOST,))


def test_answer_with_a_class_may_ask_for_nothing() -> None:
    answer = Answer(what="", klass=Class.STORAGE, code="", sure=Sureness.LIKELY, missing=unknown("all-ranks").missing)
    assert without(answer, OF_A_RUN).missing == ()


def test_errors_in_the_logs_of_a_run_that_succeeded_have_ended_nothing() -> None:
    seen = Evidence(where="rank-0.log:3", text="ValueError: caught", code="python-exception")
    answer = Answer(what="", klass=Class.PROGRAM_ERROR, code="python-exception", sure=Sureness.LIKELY, evidence=(seen,))
    told = nothing_failed(answer, Outcome.SUCCEEDED)
    assert (told.klass, told.code, told.missing, told.also) == (Class.UNKNOWN, "", (), (seen,))
    assert told.what == "nothing failed: the run succeeded"


def test_culprit_of_whom_only_the_rank_is_known_gets_its_node() -> None:
    answer = Answer(what="", klass=Class.OTHER, code="x", sure=Sureness.LIKELY, culprit=Culprit(rank=3))
    assert str(placed(answer, {3: "node1"}).culprit) == "rank 3 on node1"
    assert placed(answer, {2: "node1"}) is answer


def test_what_slows_a_run_is_said_though_it_succeeded() -> None:
    slow = Answer(what="", klass=Class.TCP_FALLBACK, code="fabric-on-tcp", sure=Sureness.LIKELY)
    assert nothing_failed(slow, Outcome.SUCCEEDED) == slow
