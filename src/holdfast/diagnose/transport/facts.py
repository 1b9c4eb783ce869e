"""Owns what the verdict on the fabric gives to the answer: facts for the reasoning, and what it rules out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from holdfast.diagnose.fact import Fact
from holdfast.diagnose.rules.fabric import FOR_CAUSE
from holdfast.diagnose.rules.row import Sureness
from holdfast.diagnose.transport.result import Outcome, Transport
from holdfast.diagnose.transport.verdict import ONE_NODE


def facts(transport: Transport, *, told: bool) -> Sequence[Fact]:
    """What made the run slow, one fact for each line that proves it; `told` is whether the job's fabric is known."""
    verdict = transport.verdict
    rule = FOR_CAUSE.get(verdict.cause)
    if rule is None:
        return ()
    rule = replace(rule, sure=Sureness.CERTAIN if told else rule.sure)
    values = {"what": verdict.what, "remedy": verdict.remedy}
    return tuple(
        Fact(rule=rule, source=line.source, line=line.line, text=line.text, values=values) for line in verdict.evidence
    )


def is_sound(transport: Transport) -> bool:
    """Whether lines that speak of sockets or missing devices mean nothing: the fabric is right, or was not needed."""
    return transport.verdict.outcome is Outcome.VERIFIED or transport.verdict.cause == ONE_NODE
