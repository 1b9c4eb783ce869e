"""Shows what failures cost a job as tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

from holdfast.cli.output import print_rich, print_text

if TYPE_CHECKING:
    from holdfast.plan.reliability_plan import ReliabilityPlan


def print_reliability(plan: ReliabilityPlan) -> None:
    """Print ETTR, the GPU-hours that each cause costs, and the best interval and number of standbys."""
    hours, lost, ettr = plan.gpus * plan.days * 24, sum(each.gpu_hours for each in plan.lost), plan.ettr
    print_text(
        f"{plan.nodes:,} nodes, {plan.gpus:,} GPUs, {plan.days:g} days; failure rate: {plan.rate}, "
        f"{plan.failures_per_day:.3g} faults a day\n"
        f"ETTR {ettr.mean:.2%} (95 % interval {ettr.low:.2%} to {ettr.high:.2%}); "
        f"{plan.ettr_at_any_speed:.2%} if slow steps count fully\n"
        f"{lost:,.0f} of {hours:,.0f} GPU-hours are lost\n"
    )
    print_rich(_lost(plan))
    every, standbys = plan.checkpoint_s, plan.standbys
    print_text(
        f"\nbest checkpoint interval: {every.best:,.0f} s, ETTR {every.best_ettr:.2%}; "
        f"the job's: {every.own:,.0f} s, {every.own_ettr:.2%}\n"
        f"best number of standbys: {standbys.best:g}, ETTR {standbys.best_ettr:.2%}; "
        f"the job's: {standbys.own:g}, {standbys.own_ettr:.2%}"
    )
    assumed = [f"{each.name} {each.value:g} {each.unit}".strip() for each in plan.inputs if each.is_assumed]
    print_text(f"\nassumed, neither measured nor published: {'; '.join(assumed)} (`-o json` has all inputs)")


def _lost(plan: ReliabilityPlan) -> Table:
    from holdfast.plan.reliability import Loss

    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("GPU-hours lost to", no_wrap=True)
    for heading in ("all", *Loss):
        table.add_column(heading, no_wrap=True, justify="right")
    for each in plan.lost:
        parts = (f"{each.by_loss[how]:,.0f}" if each.by_loss[how] else "" for how in Loss)
        table.add_row(each.cause, f"{each.gpu_hours:,.0f}", *parts)
    return table
