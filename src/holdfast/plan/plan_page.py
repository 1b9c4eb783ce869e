"""A plan as a single HTML file with its curves. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from holdfast.plan.ettr_by_scale import EttrCurve
from holdfast.plan.predict import PARTS, Plan, ScalePoint
from holdfast.plan.reliability_plan import ReliabilityPlan
from holdfast.report.html_page import Number, curve_keys, html_page, section, table, text
from holdfast.report.svg_chart import Line, line_chart


def plan_page(job: str, plan: Plan) -> str:
    """The best layouts, and how the best one scales."""
    fitting = f"{plan.nodes} nodes, {plan.gpus} GPUs ({plan.machine}): {plan.fitting} of {plan.tried} layouts fit"
    assumed = f"Assumed, not measured: {', '.join(plan.assumed)}." if plan.assumed else ""
    return html_page(
        f"plan of {job}",
        (
            f"<h1>Plan of {text(job)}</h1><p class='dim'>{text(fitting)}</p>",
            section("Layouts", _layouts(plan)),
            f"<p>{text(plan.next_wins_if)}</p>" if plan.next_wins_if else "",
            section("Scaling", _scaling([point for point in plan.scaling if point.layout])),
            f"<p class='dim'>{text(assumed)}</p>",
        ),
    )


def reliability_page(job: str, plan: ReliabilityPlan, curves: Sequence[EttrCurve]) -> str:
    """ETTR against scale, and what each cause costs."""
    ettr = plan.ettr
    what = (
        f"{plan.nodes:,} nodes, {plan.gpus:,} GPUs, {plan.days:g} days; failure rate: {plan.rate}; "
        f"ETTR {ettr.mean:.2%} (95 % interval {ettr.low:.2%} to {ettr.high:.2%})"
    )
    lines = [
        Line(curve.name, [[(math.log2(gpus), 100 * share) for gpus, share in curve.ettr.items()]]) for curve in curves
    ]
    lost = [(each.cause, Number(f"{each.gpu_hours:,.0f}")) for each in plan.lost]
    chart = line_chart(lines, unit="%", x_name="GPUs", x_labels=_places(curves[0].ettr))
    return html_page(
        f"failures of {job}",
        (
            f"<h1>Failures of {text(job)}, simulated</h1><p class='dim'>{text(what)}</p>",
            section("ETTR by number of GPUs", f"{curve_keys(curve.name for curve in curves)}{chart}"),
            section("GPU-hours lost", table(("to", "GPU-hours"), lost)),
        ),
    )


def _layouts(plan: Plan) -> str:
    rows = [
        (
            each.layout,
            Number(f"{each.figures.step_s:.3g}"),
            Number(f"{each.figures.tokens_per_s_per_gpu:,.0f}"),
            Number(f"{each.figures.mfu_full:.1%}"),
            Number(f"{each.figures.memory_bytes / 1e9:.0f}"),
            ", ".join(f"{PARTS[name]} {share:.1%}" for name, share in list(each.losses.items())[:3]),
        )
        for each in plan.best
    ]
    return table(("layout", "step, s", "tokens/s/GPU", "MFU, full attention", "GB/GPU", "lost to"), rows)


def _scaling(points: Sequence[ScalePoint]) -> str:
    if len(points) < 2:
        return ""
    places = _places(point.gpus for point in points)
    first = points[0]
    ideal = [(math.log2(point.gpus), first.tokens_per_s / first.gpus) for point in points]
    reached = [(math.log2(point.gpus), point.tokens_per_s / point.gpus) for point in points]
    names = ("predicted", f"as on {first.gpus} GPUs")
    lines = [Line(name, [line]) for name, line in zip(names, (reached, ideal), strict=True)]
    rows = [
        (
            Number(str(point.nodes)),
            Number(f"{point.gpus:,}"),
            Number(f"{point.efficiency:.1%}"),
            point.reason,
            point.layout,
        )
        for point in points
    ]
    chart = line_chart(lines, unit="tokens/s/GPU", x_name="GPUs", x_labels=places)
    return curve_keys(names) + chart + table(("nodes", "GPUs", "efficiency", "lost to", "layout"), rows)


def _places(gpus: Iterable[int]) -> Mapping[float, str]:
    """Doublings of the number of GPUs are equally far apart."""
    return {math.log2(each): f"{each:,}" for each in gpus}
