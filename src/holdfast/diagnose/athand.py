"""Owns what is known of a run of holdfast's own besides its logs: that they were all read, and how it ended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from holdfast.diagnose.answer import Answer, Missing
from holdfast.diagnose.classes import Class
from holdfast.diagnose.rules import RULES
from holdfast.diagnose.rules.deciding import DECIDING
from holdfast.diagnose.rules.row import Sureness
from holdfast.events import DrillDone, Outcome
from holdfast.job.drilled import to_do, words

OF_A_RUN = ("all-ranks", "peer-log", "first-traceback", "who-joined")
"""Facts (rules/deciding.py) that are at hand where the logs of all ranks of an attempt, and the run's, were read."""
OF_STACKS = ("stacks",)
"""The same where its agents took stacks, and they were read."""
_INSTEAD = "own-words"

_NOTHING: Mapping[Outcome | None, str] = {
    None: "nothing has failed so far: the run goes on",
    Outcome.SUCCEEDED: "nothing failed: the run succeeded",
    Outcome.CANCELLED: "nothing failed: the run was cancelled",
}


def without(answer: Answer, names: tuple[str, ...]) -> Answer:
    """The answer that asks for none of these facts; an unknown one asks why nobody wrote of it, if for nothing else."""
    known = {DECIDING[name].fact for name in names}
    missing = tuple(each for each in answer.missing if each.fact not in known)
    if not missing and answer.klass is Class.UNKNOWN:
        instead = DECIDING[_INSTEAD]
        decides = tuple(dict.fromkeys(klass for each in answer.missing for klass in each.decides))
        missing = (Missing(fact=instead.fact, get=instead.get, decides=decides),)
    return replace(answer, missing=missing)


def is_vague(answer: Answer) -> bool:
    """Whether it says no more than that a rank ended: nothing that one wrote speaks for it."""
    return answer.klass is Class.UNKNOWN or all(each.code.startswith("run-") for each in answer.evidence)


def placed(answer: Answer, nodes: Mapping[int, str]) -> Answer:
    """The answer with the node of its culprit, where only the rank is known."""
    culprit = answer.culprit
    if culprit is None or culprit.rank is None or culprit.node or culprit.host or culprit.rank not in nodes:
        return answer
    return replace(answer, culprit=replace(culprit, node=nodes[culprit.rank]))


def asked_for(answer: Answer, drill: DrillDone) -> Answer:
    """The answer of a failure that a drill brought about: nobody is to be looked for, and nothing to be mended."""
    said = words(drill)
    return replace(
        answer,
        what=answer.what if said in answer.what else f"{answer.what}; {said}",
        sure=Sureness.CERTAIN if answer.klass is not Class.UNKNOWN else answer.sure,
        remedy=(to_do(drill),),
        missing=(),
    )


def standing(answer: Answer, what: str) -> Answer:
    """The answer for a run that shows no sign of work: `what` says since when, and where its ranks stand."""
    known = answer.klass is not Class.UNKNOWN
    return replace(answer, what=f"{answer.what}; {what}" if known else f"the run stands still: {what}")


def nothing_failed(answer: Answer, outcome: Outcome | None) -> Answer:
    """The answer for a run in which nothing failed: what its ranks wrote of errors has ended nothing.

    `outcome` is None while it goes on. What only slows a run is said all the same.
    """
    rule = RULES.get(answer.code)
    # A fallback is a warning that nobody knows: it ended nothing, and nothing says that it slows anything.
    if answer.code.startswith("fabric-") or (rule is not None and rule.degrades and not rule.fallback):
        return answer
    return Answer(
        what=_NOTHING[outcome],
        klass=Class.UNKNOWN,
        code="",
        sure=Sureness.UNSURE,
        also=answer.evidence,
        transport=answer.transport,
        notes=answer.notes,
    )
