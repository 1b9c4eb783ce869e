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
    if told:
        rule = replace(rule, sure=Sureness.CERTAIN)
    elif verdict.outcome is Outcome.TCP_FALLBACK and not verdict.expected:  # perhaps there is nothing better
        rule = replace(rule, sure=Sureness.UNSURE, decides=("rdma-on-node", *rule.decides))
    values = {"what": verdict.what, "remedy": verdict.remedy}
    return tuple(
        Fact(rule=rule, source=line.source, line=line.line, text=line.text, values=values) for line in verdict.evidence
    )


def is_sound(transport: Transport) -> bool:
    """Whether lines that speak of sockets or missing devices mean nothing: the fabric is right, or was not needed."""
    return transport.verdict.outcome is Outcome.VERIFIED or transport.verdict.cause == ONE_NODE
