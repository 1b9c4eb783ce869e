"""Checks that the same training on more nodes is close to linear, and explains what is lost."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from holdfast import api
from holdfast.accept.agreement import CheckName, ScalingTerms
from holdfast.accept.check_report import CheckReport, Figure, Verdict
from holdfast.accept.site import ObservedRun, Site
from holdfast.errors import HoldfastError
from holdfast.events import AnyEvent, StepCommitted
from holdfast.findings import Finding, Owner
from holdfast.metrics.step_breakdown import StepPart, breakdown_metric
from holdfast.plan.traffic import ddp_bytes
from holdfast.report.formatting import count, percentage
from holdfast.report.run_comparison import Ratio, step_time_ratio
from holdfast.report.run_record import RunRecord, record_run
from holdfast.run_dir import RunDir

PROFILE_S = 120.0
PROFILED_FROM = 2 / 3
"""Share of a run's steps after which a step is profiled."""
GRADIENT_BYTES = 4
"""Of a parameter: the program computes in float32."""
STRAGGLES_OFTEN, STRAGGLES_BY = 0.5, 0.15
"""A rank explains a loss if it was the slowest in so many comparisons, by this share of the median."""
CAUSES: Mapping[StepPart, tuple[str, str]] = {
    StepPart.COMMUNICATION: (
        "ranks wait for the network or for one another",
        "Run the check `fabric`; larger batches or fewer bytes (sharding, lower precision) hide more of it.",
    ),
    StepPart.DATA: (
        "ranks wait for samples",
        "Give the loader more workers, or move the data closer; every node reads the same storage.",
    ),
    StepPart.CHECKPOINT: ("ranks wait for checkpoints", "Save less often, or to faster storage."),
}
COMPUTES = (
    "computing takes longer",
    "Look at clocks, power limits and other processes of the nodes; ranks that share a CPU slow each other.",
)


OUTLASTING = 10
"""Runs that use the rest of a machine have so many times the steps of the measured run."""
REPEATED = 2
"""An inconclusive comparison is made once more, with runs of so many times the steps."""
MAX_WIDTH = 0.1
"""Of the interval of an efficiency, within which its middle decides."""


class Interval(NamedTuple):
    """An efficiency, with the interval that holds 95 of 100 resamples."""

    value: float
    low: float
    high: float

    @property
    def shown(self) -> str:
        return f"[{percentage(self.low)}, {percentage(self.high)}]"

    def __str__(self) -> str:
        return f"{percentage(self.value)} {self.shown}"


class ScalingRun(Struct, frozen=True, kw_only=True):
    """The training on one number of nodes."""

    nodes: int
    run: ObservedRun
    breakdown: Mapping[str, float]
    """Mean seconds of each part of a step; empty if no step could be profiled."""
    was_alone: bool = False
    """Whether other runs should have used the rest of its machine, and did not until its end."""

    @property
    def compared(self) -> RunRecord:
        """Its record without the steps after `PROFILED_FROM`, some of which a profiler slows."""
        last = self.run.steps[-1].step if self.run.steps else 0
        before = (each for each in self.run.events if not (isinstance(each, StepCommitted) and _is_late(each, last)))
        return record_run(before, self.run.folder.run_id)

    @property
    def step_s(self) -> float:
        """Mean time of the steps that are compared, without the first fifth."""
        last = self.run.steps[-1].step if self.run.steps else 0
        steps = [each for each in self.run.steps if not _is_late(each, last) and each.step > last // 5]
        return sum(each.ended - each.started for each in steps) / max(1, sum(each.steps for each in steps))

    @property
    def tokens(self) -> float:
        """Of a step, on all nodes; 0 if the program does not report them."""
        return self.run.steps[-1].metrics.get("tokens", 0.0) if self.run.steps else 0.0

    @property
    def batch(self) -> int | None:
        """Samples of each rank and step, if the program reports them."""
        reported = self.run.steps[-1].metrics.get("batch") if self.run.steps else None
        return None if reported is None else int(reported)

    @property
    def tokens_per_s(self) -> float:
        """Of all nodes."""
        return self.tokens / self.step_s if self.step_s else 0.0


def check_scaling(site: Site, bus_bytes_s: float | None) -> CheckReport:
    """Run on each number of nodes; `bus_bytes_s` is the measured bandwidth, if the check `fabric` ran."""
    terms = site.agreement.scaling
    counts = sorted({count for count in terms.nodes if count <= site.nodes})
    if len(counts) < 2:
        why = f"scaling compares two numbers of nodes, and of those agreed the target has {counts or 'none'}"
        remedy = "Add nodes to the target, or agree on other numbers as `scaling.nodes`."
        found = Finding(code="acceptance-not-applicable", what=why, where="scaling.nodes", remedy=remedy)
        return CheckReport(check=CheckName.SCALING, verdict=Verdict.NOT_APPLICABLE, finding=found)
    report = judge_scaling(_train_on_each(site, counts, terms), terms, bus_bytes_s)
    if report.finding is None or report.finding.code != "scaling-inconclusive":
        return report
    site.log(f"{report.finding.what}; each run again, {REPEATED} times as long")
    longer = terms.model_copy(update={"steps": REPEATED * terms.steps, "deadline_s": REPEATED * terms.deadline_s})
    return judge_scaling(_train_on_each(site, counts, longer), longer, bus_bytes_s)


def _train_on_each(site: Site, counts: Sequence[int], terms: ScalingTerms) -> list[ScalingRun]:
    """A run on each number of nodes, up to one that fails."""
    runs: list[ScalingRun] = []
    for nodes in counts:
        site.log(f"training on {nodes} of {counts[-1]} nodes, {terms.steps} steps")
        runs.append(_train(site, nodes, terms, most_nodes=counts[-1], batch=runs[0].batch if runs else None))
        if runs[-1].run.problem:
            break
    return runs


def _is_late(step: StepCommitted, last: int) -> bool:
    return step.step > PROFILED_FROM * last


def _train(site: Site, nodes: int, terms: ScalingTerms, *, most_nodes: int, batch: int | None) -> ScalingRun:
    work = ("--step-s", f"{terms.step_s:g}") if batch is None else ("--batch", str(batch))
    wide = () if site.agreement.program else ("--large", *work)
    # Nodes of one machine share its CPUs and memory: a run on few of them computes while others do on the rest.
    fields = {"env__OMP_NUM_THREADS": max(1, site.cpus // most_nodes)} if site.is_one_machine else {}
    beside = most_nodes // nodes - 1 if site.shares_machine else 0

    def start(steps: int) -> RunDir:
        return site.start("scaling", site.program("--steps", str(steps), *wide), nodes=nodes, **fields)

    with contextlib.ExitStack() as stack:
        others: list[RunDir] = []
        for _ in range(beside):
            others.append(start(OUTLASTING * terms.steps))
            stack.enter_context(site.ended(others[-1]))
        for other in others:
            site.await_step(other, deadline_s=terms.deadline_s)
        measured = _observe(site, start(terms.steps), nodes, terms)
        return replace(measured, was_alone=any(map(api.is_finished, others)))


def _observe(site: Site, run: RunDir, nodes: int, terms: ScalingTerms) -> ScalingRun:
    breakdown: dict[str, float] = {}

    def profile_late(event: AnyEvent) -> None:
        if isinstance(event, StepCommitted) and not breakdown and _is_late(event, terms.steps):
            breakdown["tried"] = 1.0
            with contextlib.suppress(HoldfastError):
                breakdown.update(api.profile_steps(run, ranks=(), timeout_s=PROFILE_S).breakdown)

    observed = site.observe(run, deadline_s=terms.deadline_s, on_event=profile_late)
    breakdown.pop("tried", None)
    return ScalingRun(nodes=nodes, run=observed, breakdown=breakdown)


def judge_scaling(runs: Sequence[ScalingRun], terms: ScalingTerms, bus_bytes_s: float | None) -> CheckReport:
    """Efficiency on the most nodes, with the reason for what is lost and what was predicted."""
    first, last = runs[0], runs[-1]
    failed = next((found for each in runs if (found := each.run.problem)), None)
    ratio = None if failed else step_time_ratio(first.compared, last.compared)
    efficiency = _efficiency(first, last, ratio) if ratio else Interval(0.0, 0.0, 0.0)
    finding = failed or _too_few(first, ratio) or _lost(first, last, efficiency, ratio, terms)
    figures = [
        Figure(name=count(each.nodes, "node"), value=f"{each.tokens_per_s:,.0f} tokens/s, {each.step_s:.4g} s per step")
        for each in runs
        if each.run.steps
    ]
    if ratio:
        agreed = f"at least {percentage(terms.min_efficiency)}"
        figures += [
            Figure(name="efficiency", value=str(efficiency), agreed=agreed, met=finding is None),
            Figure(name="the same run, halves compared", value=f"{ratio.floor_low:.3f} to {ratio.floor_high:.3f}"),
            *_predicted(first, last, bus_bytes_s),
        ]
    return CheckReport(
        check=CheckName.SCALING,
        verdict=Verdict.FAILED if finding else Verdict.PASSED,
        finding=finding,
        figures=tuple(figures),
        evidence=() if finding else tuple(line for each in runs if (line := _breakdown_line(each))),
        runs=tuple(each.run.folder.run_id for each in runs),
    )


def _too_few(first: ScalingRun, ratio: Ratio | None) -> Finding | None:
    if ratio is not None:
        return None
    return Finding(
        code="acceptance-run-failed",
        what=f"{first.run.folder.run_id} has too few steps to compare",
        where="scaling.steps",
        remedy="Raise `scaling.steps`; a program of your own needs a Session that commits each step.",
    )


def _efficiency(first: ScalingRun, last: ScalingRun, ratio: Ratio) -> Interval:
    """Work per node and second on the most nodes, as a share of that on the fewest.

    The work is the tokens that the program reports; without them a rank has the same work on any number of nodes.
    """
    work = (last.tokens / last.nodes) / (first.tokens / first.nodes) if first.tokens and last.tokens else 1.0
    return Interval(work / ratio.value, work / ratio.high, work / ratio.low)


def _lost(
    first: ScalingRun, last: ScalingRun, efficiency: Interval, ratio: Ratio | None, terms: ScalingTerms
) -> Finding | None:
    """Why the efficiency is below what was agreed, or why that is not known; None if it is not below."""
    if ratio is None or efficiency.low >= terms.min_efficiency:
        return None
    if first.was_alone:
        return Finding(
            code="scaling-inconclusive",
            what=f"the run on {count(first.nodes, 'node')} had its machine for itself, since others ended early",
            where=first.run.folder.run_id,
            remedy="`holdfast ps` shows the other runs named accept-scaling, and `holdfast diagnose` why they ended.",
        )
    is_narrow = efficiency.high - efficiency.low <= MAX_WIDTH
    if efficiency.value >= terms.min_efficiency and is_narrow:
        return None
    if efficiency.high >= terms.min_efficiency and not is_narrow:
        return Finding(
            code="scaling-inconclusive",
            what=f"times of steps vary so much that the efficiency is somewhere in {efficiency.shown}",
            where=last.run.folder.run_id,
            evidence=(
                f"halves of {first.run.folder.run_id}: a ratio of {ratio.floor_low:.3f} to {ratio.floor_high:.3f}",
            ),
            remedy="Run the check again while nothing else runs on the nodes, or raise `scaling.steps`.",
            owner=Owner.CLUSTER,
        )
    cause, remedy = explain(first, last)
    return Finding(
        code="scaling-below-agreed",
        what=(
            f"on {count(last.nodes, 'node')} each does {percentage(efficiency.value)} of its work on {first.nodes}, "
            f"less than the agreed {percentage(terms.min_efficiency)}: {cause}"
        ),
        where=last.run.folder.run_id,
        evidence=tuple(line for each in (first, last) if (line := _breakdown_line(each))),
        remedy=remedy,
    )


def explain(first: ScalingRun, last: ScalingRun) -> tuple[str, str]:
    """What makes steps on more nodes longer, and what to do: one slow rank, else the part that grew most."""
    times = last.run.record.rank_times
    slowest = times.slowest[0] if times and times.slowest else None
    if slowest and slowest.lag >= STRAGGLES_BY and slowest.times >= STRAGGLES_OFTEN * slowest.compared:
        return (
            f"rank {slowest.rank} takes {percentage(slowest.lag)} longer than the median, mostly in `{slowest.phase}`",
            "Replace its node, or look at what else runs there; `holdfast check --full` measures it.",
        )
    grown = {
        part: last.breakdown.get(breakdown_metric(part), 0.0) - first.breakdown.get(breakdown_metric(part), 0.0)
        for part in StepPart
    }
    if not first.breakdown or not last.breakdown:
        return "no step could be profiled", "Run the check again; `holdfast profile RUN` says why."
    worst = max(grown, key=lambda part: grown[part])
    cause, remedy = CAUSES.get(worst, COMPUTES)
    return f"{cause} ({grown[worst] * 1e3:.3g} ms more per step in `{worst}`)", remedy


def _predicted(first: ScalingRun, last: ScalingRun, bus_bytes_s: float | None) -> list[Figure]:
    """Efficiency from the time of a step on the fewest nodes, the bytes of gradients and the measured bandwidth."""
    parameters = last.run.steps[-1].metrics.get("parameters")
    if not parameters or not bus_bytes_s or not first.step_s:
        return []
    ranks = last.run.status.leader.world_size
    sending_s = ddp_bytes(parameters, ranks, gradient_bytes=GRADIENT_BYTES) / bus_bytes_s
    none_hidden = first.step_s / (first.step_s + sending_s)
    value = f"{percentage(none_hidden)} if no communication is hidden, 100 % if all is"
    return [Figure(name="predicted efficiency", value=value)]


def _breakdown_line(each: ScalingRun) -> str:
    parts = [
        f"{part} {seconds * 1e3:.3g} ms"
        for part in StepPart
        if (seconds := each.breakdown.get(breakdown_metric(part), 0.0)) >= 1e-4
    ]
    return f"{count(each.nodes, 'node')}, a profiled step: {', '.join(parts)}" if parts else ""
