"""Converts the verdict on the fabric into facts for the root-cause analysis, and what it rules out."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from holdfast.diagnose.fact import Fact
from holdfast.diagnose.failure_classes import Confidence
from holdfast.diagnose.nccl_transport.fabric_verdict import ONE_NODE
from holdfast.diagnose.nccl_transport.transport_report import FabricOutcome, TransportReport
from holdfast.diagnose.rules.nccl_setup import FOR_CAUSE


def to_facts(transport: TransportReport, *, expected_known: bool) -> Sequence[Fact]:
    """What made the run slow, one fact for each line that proves it.

    `expected_known` is whether the job's fabric is known.
    """
    verdict = transport.verdict
    rule = FOR_CAUSE.get(verdict.cause)
    if rule is None:
        return ()
    if expected_known:
        rule = replace(rule, confidence=Confidence.CERTAIN)
    elif verdict.outcome is FabricOutcome.TCP_FALLBACK and not verdict.expected:  # perhaps nothing better is available
        rule = replace(rule, confidence=Confidence.UNSURE, needs=("rdma-on-node", *rule.needs))
    values = {"what": verdict.what, "remedy": verdict.remedy}
    return tuple(
        Fact(rule=rule, source=line.source, line=line.line, text=line.text, values=values) for line in verdict.evidence
    )


def is_fabric_ok(transport: TransportReport) -> bool:
    """Whether lines about sockets or missing devices mean nothing: the fabric is sound, or was not needed."""
    return transport.verdict.outcome is FabricOutcome.VERIFIED or transport.verdict.cause == ONE_NODE
