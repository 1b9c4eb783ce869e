"""What was read is not asked for."""

from __future__ import annotations

from holdfast.diagnose.diagnosis import Diagnosis, Evidence, NextEvidence
from holdfast.diagnose.fact import ProcessRef
from holdfast.diagnose.failure_classes import Confidence, FailureClass
from holdfast.diagnose.rules.evidence_requests import EVIDENCE_REQUESTS
from holdfast.diagnose.run_context import RUN_LOGS_EVIDENCE, nothing_failed, with_node, without_evidence
from holdfast.events import Outcome


def unknown(*names: str) -> Diagnosis:
    missing = tuple(
        NextEvidence(
            what=EVIDENCE_REQUESTS[name].what, how=EVIDENCE_REQUESTS[name].how, distinguishes=(FailureClass.OOM_HOST,)
        )
        for name in names
    )
    return Diagnosis(
        what="", failure_class=FailureClass.UNKNOWN, code="", confidence=Confidence.UNSURE, next_evidence=missing
    )


def test_logs_that_were_read_are_not_asked_for() -> None:
    (left,) = without_evidence(unknown("all-ranks", "stacks", "who-joined"), RUN_LOGS_EVIDENCE).next_evidence
    assert left.what == EVIDENCE_REQUESTS["stacks"].what


def test_unknown_always_asks_for_something() -> None:
    (left,) = without_evidence(unknown("first-traceback"), RUN_LOGS_EVIDENCE).next_evidence
    assert (left.what, left.distinguishes) == (EVIDENCE_REQUESTS["exit-reason"].what, (FailureClass.OOM_HOST,))


def test_answer_with_a_class_may_ask_for_nothing() -> None:
    answer = Diagnosis(
        what="",
        failure_class=FailureClass.STORAGE,
        code="",
        confidence=Confidence.LIKELY,
        next_evidence=unknown("all-ranks").next_evidence,
    )
    assert without_evidence(answer, RUN_LOGS_EVIDENCE).next_evidence == ()


def test_errors_in_the_logs_of_a_run_that_succeeded_have_ended_nothing() -> None:
    seen = Evidence(where="rank-0.log:3", text="ValueError: caught", code="python-exception")
    answer = Diagnosis(
        what="",
        failure_class=FailureClass.PROGRAM_ERROR,
        code="python-exception",
        confidence=Confidence.LIKELY,
        evidence=(seen,),
    )
    told = nothing_failed(answer, Outcome.SUCCEEDED)
    assert (told.failure_class, told.code, told.next_evidence, told.also_seen) == (
        FailureClass.UNKNOWN,
        "",
        (),
        (seen,),
    )
    assert told.what == "nothing failed: the run succeeded"


def test_culprit_of_whom_only_the_rank_is_known_gets_its_node() -> None:
    answer = Diagnosis(
        what="",
        failure_class=FailureClass.OTHER,
        code="x",
        confidence=Confidence.LIKELY,
        first_failure=ProcessRef(rank=3),
    )
    assert str(with_node(answer, {3: "node1"}).first_failure) == "rank 3 on node1"
    assert with_node(answer, {2: "node1"}) is answer


def test_what_slows_a_run_is_said_though_it_succeeded() -> None:
    slow = Diagnosis(
        what="", failure_class=FailureClass.TCP_FALLBACK, code="fabric-on-tcp", confidence=Confidence.LIKELY
    )
    assert nothing_failed(slow, Outcome.SUCCEEDED) == slow
