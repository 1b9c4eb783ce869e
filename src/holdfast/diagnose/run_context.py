"""What is known of holdfast's own run besides its logs: that all were read, and how it ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from holdfast.diagnose.diagnosis import Diagnosis, Evidence, NextEvidence
from holdfast.diagnose.failure_classes import Confidence, FailureClass
from holdfast.diagnose.native_groups import describe_missing, describe_native
from holdfast.diagnose.rules import RULES
from holdfast.diagnose.rules.evidence_requests import EVIDENCE_REQUESTS
from holdfast.diagnose.stack_groups import describe_stacks
from holdfast.events import FaultInjected, Outcome, StacksCompared, StacksDumped
from holdfast.findings import Finding
from holdfast.job.fault_attribution import format_fault, remedy_for

RUN_LOGS_EVIDENCE = ("all-ranks", "peer-log", "first-traceback", "who-joined")
"""Evidence requests (rules/evidence_requests.py) that are already met when all ranks' logs of an attempt, and the
run's, were read.
"""
STACKS_EVIDENCE = ("stacks",)
"""The same if its agents dumped stacks, and those were read."""
_EXIT_REASON = "exit-reason"

_NOTHING_FAILED: Mapping[Outcome | None, str] = {
    None: "nothing has failed so far: the run continues",
    Outcome.SUCCEEDED: "nothing failed: the run succeeded",
    Outcome.CANCELLED: "nothing failed: the run was cancelled",
}


def without_evidence(answer: Diagnosis, names: tuple[str, ...]) -> Diagnosis:
    """The diagnosis without requests for this evidence; an unknown one still requests the reason for the end."""
    known = {EVIDENCE_REQUESTS[name].what for name in names}
    missing = tuple(each for each in answer.next_evidence if each.what not in known)
    if not missing and answer.failure_class is FailureClass.UNKNOWN:
        instead = EVIDENCE_REQUESTS[_EXIT_REASON]
        decides = tuple(
            dict.fromkeys(failure_class for each in answer.next_evidence for failure_class in each.distinguishes)
        )
        missing = (NextEvidence(what=instead.what, how=instead.how, distinguishes=decides),)
    return replace(answer, next_evidence=missing)


def is_inconclusive(answer: Diagnosis) -> bool:
    """Whether it shows no more than that a rank ended: no rank's log supports it."""
    return answer.failure_class is FailureClass.UNKNOWN or all(each.code.startswith("run-") for each in answer.evidence)


def with_node(answer: Diagnosis, nodes: Mapping[int, str]) -> Diagnosis:
    """The diagnosis with the node of its culprit, where only the rank is known."""
    culprit = answer.first_failure
    if culprit is None or culprit.rank is None or culprit.node or culprit.host or culprit.rank not in nodes:
        return answer
    return replace(answer, first_failure=replace(culprit, node=nodes[culprit.rank]))


def caused_by_drill(answer: Diagnosis, drill: FaultInjected) -> Diagnosis:
    """The diagnosis of a failure that a drill caused: there is no culprit and nothing to fix."""
    drill_text = format_fault(drill)
    return replace(
        answer,
        what=answer.what if drill_text in answer.what else f"{answer.what}; {drill_text}",
        confidence=Confidence.CERTAIN if answer.failure_class is not FailureClass.UNKNOWN else answer.confidence,
        remedy=(remedy_for(drill),),
        next_evidence=(),
    )


def with_standstill(answer: Diagnosis, what: str) -> Diagnosis:
    """The diagnosis of a run without progress: `what` says since when, and where its ranks wait."""
    known = answer.failure_class is not FailureClass.UNKNOWN
    return replace(answer, what=f"{answer.what}; {what}" if known else f"the run makes no progress: {what}")


def with_stacks(answer: Diagnosis, compared: StacksCompared, where: str) -> Diagnosis:
    """The diagnosis with what the stacks of all ranks show together."""
    lines = (Evidence(where=where, text=line, code="") for line in describe_stacks(compared))
    return replace(answer, evidence=(*answer.evidence, *lines))


def with_native_stacks(answer: Diagnosis, taken: Sequence[StacksDumped], where: str) -> Diagnosis:
    """The diagnosis with what each rank does in C and C++, and a note where that could not be read."""
    lines = (Evidence(where=where, text=line, code="") for line in describe_native(taken))
    return replace(answer, evidence=(*answer.evidence, *lines), notes=(*answer.notes, *describe_missing(taken)))


def nothing_failed(answer: Diagnosis, outcome: Outcome | None) -> Diagnosis:
    """The diagnosis of a run in which nothing failed: the errors that its ranks logged ended nothing.

    `outcome` is None while it continues. Causes that only slow a run are reported all the same.
    """
    rule = RULES.get(answer.code)
    # A fallback rule matches an unknown warning: it ended nothing, and nothing shows that it slows the run.
    if answer.code.startswith("fabric-") or (rule is not None and rule.performance_only and not rule.fallback):
        return answer
    return Diagnosis(
        what=_NOTHING_FAILED[outcome],
        failure_class=FailureClass.UNKNOWN,
        code="",
        confidence=Confidence.UNSURE,
        also_seen=answer.evidence,
        transport=answer.transport,
        notes=answer.notes,
    )


def without_controller(answer: Diagnosis, dead: Finding) -> Diagnosis:
    """The diagnosis of an unfinished run that nothing controls, for the reason in the finding."""
    if answer.what == _NOTHING_FAILED[None]:
        answer = replace(answer, what="nothing has failed so far, but the run has no controller")
    return replace(answer, notes=(*answer.notes, f"{dead.what}. What to do: {dead.remedy}"))
