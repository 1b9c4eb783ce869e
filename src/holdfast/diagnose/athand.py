"""Owns what a person is not asked for, because it was read already: the logs of a run of holdfast's own."""

from __future__ import annotations

from dataclasses import replace

from holdfast.diagnose.answer import Answer, Missing
from holdfast.diagnose.classes import Class
from holdfast.diagnose.rules.deciding import DECIDING

OF_A_RUN = ("all-ranks", "peer-log", "first-traceback", "who-joined")
"""Facts (rules/deciding.py) that are at hand where the logs of all ranks of an attempt, and the run's, were read."""
OF_STACKS = ("stacks",)
"""The same where its agents took stacks, and they were read."""
_INSTEAD = "own-words"


def without(answer: Answer, names: tuple[str, ...]) -> Answer:
    """The answer that asks for none of these facts; an unknown one asks why nobody wrote of it, if for nothing else."""
    known = {DECIDING[name].fact for name in names}
    missing = tuple(each for each in answer.missing if each.fact not in known)
    if not missing and answer.klass is Class.UNKNOWN:
        instead = DECIDING[_INSTEAD]
        decides = tuple(dict.fromkeys(klass for each in answer.missing for klass in each.decides))
        missing = (Missing(fact=instead.fact, get=instead.get, decides=decides),)
    return replace(answer, missing=missing)
