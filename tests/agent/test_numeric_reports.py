"""What a rank reports of its numbers reaches the controller with node, replica and attempt, after its step."""

from __future__ import annotations

from typing import Any

from holdfast.agent.rank_reports import RankReports
from holdfast.agent.rate_limits import FINDING_LIMIT
from holdfast.agent.step_aggregator import StepAggregator
from holdfast.clock import Clock
from holdfast.events import AgentEvent, NumericFault, NumericFaultObserved, StepCommitted
from holdfast.findings import Finding
from holdfast.protocol.orders import Progress, StartRanks
from holdfast.protocol.rank_messages import NumericFaultReported


def reports_of(sent: list[Any], dropped: list[Finding]) -> RankReports:
    order = StartRanks(replica=1, attempt=3, ranks=())

    def send(event: AgentEvent | Progress) -> int:
        sent.append(event)
        return len(sent)

    none: Any = None
    return RankReports(
        order,
        node=4,
        clock=Clock(),
        hang_detector=none,
        step_aggregator=StepAggregator(order, node=4, send=send),
        send=send,
        report_finding=dropped.append,
        on_step=none,
        on_first_step=none,
        on_program_ended=none,
        on_trace_written=none,
        on_gpu_memory=none,
    )


def fault(*, damaged: bool) -> NumericFaultReported:
    return NumericFaultReported(
        step=9,
        fault=NumericFault.NON_FINITE,
        quantity="gradient",
        parameter_group="1 (head.bias)",
        damaged=damaged,
        is_origin=False,
        finding=Finding(code="weights-not-finite", what="weights are not finite", evidence=("x" * 100_000,)),
    )


def test_report_is_forwarded_with_all_it_says_and_clipped() -> None:
    sent: list[Any] = []
    reports_of(sent, []).on_message(5, fault(damaged=True), {})
    (event,) = sent
    assert isinstance(event, NumericFaultObserved)
    assert (event.node, event.replica, event.attempt, event.rank, event.step) == (4, 1, 3, 5, 9)
    assert (event.quantity, event.parameter_group) == ("gradient", "1 (head.bias)")
    assert (event.damaged, event.is_origin) == (True, False)
    assert len(event.finding.evidence[0]) < 100_000


def test_rank_that_reports_without_end_is_limited_but_damage_is_always_reported() -> None:
    sent: list[Any] = []
    dropped: list[Finding] = []
    reports = reports_of(sent, dropped)
    for _ in range(int(FINDING_LIMIT.burst) + 50):
        reports.on_message(5, fault(damaged=False), {})
    assert len(sent) <= FINDING_LIMIT.burst + 1
    assert dropped
    before = len(sent)
    reports.on_message(5, fault(damaged=True), {})
    assert [event.damaged for event in sent[before:]] == [True]
    assert not [event for event in sent if isinstance(event, StepCommitted)]
