"""Shows a plan as tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

from holdfast.cli.output import print_rich, print_text

if TYPE_CHECKING:
    from holdfast.plan.predict import Plan, Predicted
    from holdfast.plan.rank_layout import RankLayout

SHOWN_LOSSES = 2


def print_plan(plan: Plan) -> None:
    """Print the best layouts, the reason for their order, and the scaling curve."""
    print_text(
        f"{plan.nodes} nodes, {plan.gpus} GPUs ({plan.machine}): {plan.fitting} of {plan.tried} layouts fit in memory\n"
    )
    print_rich(_layouts(plan))
    if plan.next_wins_if:
        print_text(f"\n{plan.next_wins_if}")
    if len(plan.scaling) > 1:
        print_text("")
        print_rich(_scaling(plan))
    if plan.assumed:
        print_text(f"\nassumed, not measured: {', '.join(plan.assumed)} (`--calibration FILE` replaces them)")


def print_rank_layout(placed: RankLayout) -> None:
    """Print the bytes that cross each level of the topology per step, and the nodes in the order of ranks."""
    table = _table("GB that cross", "this order", "given order", "random order")
    for level, sent in placed.crossing.items():
        others = (placed.given[level], placed.at_random[level])
        table.add_row(level, *(f"{each / 1e9:,.1f}" for each in (sent, *others)))
    print_text("")
    print_rich(table)
    print_text(f"\nnodes in the order of ranks: {' '.join(placed.nodes)}")


def _table(*headings: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in headings:
        table.add_column(heading, no_wrap=True, justify="left" if heading in ("layout", "lost to") else "right")
    return table


def _layouts(plan: Plan) -> Table:
    budget = any(each.figures.gpu_hours is not None for each in plan.best)
    cost = any(each.figures.cost is not None for each in plan.best)
    extra = [*(["GPU-hours"] if budget else []), *(["cost"] if cost else [])]
    table = _table("", "step s", "tokens/s/GPU", "MFU full", "causal", "GB/GPU", *extra, "layout", "lost to")
    for place, each in enumerate(plan.best, 1):
        shown = each.figures
        more = [f"{shown.gpu_hours:,.0f}"] if shown.gpu_hours is not None else []
        more += [f"{shown.cost:,.0f}"] if shown.cost is not None else []
        table.add_row(
            str(place),
            f"{shown.step_s:.3g}",
            f"{shown.tokens_per_s_per_gpu:,.0f}",
            f"{shown.mfu_full:.1%}",
            f"{shown.mfu_causal:.1%}",
            f"{shown.memory_bytes / 1e9:.0f}",
            *more,
            each.layout,
            _losses(each),
        )
    return table


def _losses(predicted: Predicted) -> str:
    from holdfast.plan.predict import PARTS

    largest = list(predicted.losses.items())[:SHOWN_LOSSES]
    return ", ".join(f"{PARTS[name]} {share:.1%}" for name, share in largest if share >= 0.001)


def _scaling(plan: Plan) -> Table:
    table = _table("nodes", "GPUs", "tokens/s", "efficiency", "lost to", "layout")
    for point in plan.scaling:
        rate = f"{point.tokens_per_s:,.0f}" if point.layout else ""
        share = f"{point.efficiency:.1%}" if point.layout else ""
        table.add_row(str(point.nodes), str(point.gpus), rate, share, point.reason, point.layout)
    return table
