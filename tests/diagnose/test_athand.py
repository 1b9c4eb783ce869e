"""What was read is not asked for."""

from __future__ import annotations

from holdfast.diagnose.answer import Answer, Missing
from holdfast.diagnose.athand import OF_A_RUN, without
from holdfast.diagnose.classes import Class
from holdfast.diagnose.rules.deciding import DECIDING
from holdfast.diagnose.rules.row import Sureness


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
