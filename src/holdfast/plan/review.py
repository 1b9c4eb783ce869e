"""The four artefacts of a design review, from one job and its target; pure.

Each line is predicted, measured or assumed. A setting is assumed to do what it is for until something proves it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from enum import StrEnum
from types import MappingProxyType

from msgspec import Struct

from holdfast.fabric.catalog import AUTO, resolve
from holdfast.findings import Finding, Severity
from holdfast.job.spec import Job
from holdfast.job.targets import LOCAL, ManifestTemplate, TargetSpec
from holdfast.plan.predict import Plan
from holdfast.plan.reliability_plan import ReliabilityPlan


class Standing(StrEnum):
    """What supports a line."""

    PREDICTED = "predicted"
    MEASURED = "measured"
    ASSUMED = "assumed"


class ArtefactKind(StrEnum):
    """What a design review asks for."""

    LAYOUT = "parallelism layout"
    TEMPLATE = "job template"
    NETWORK = "network and placement assumptions"
    RECOVERY = "recovery plan"


class ReviewLine(Struct, frozen=True, kw_only=True):
    """One statement of an artefact."""

    name: str
    value: str
    standing: Standing
    proof: str
    """How it was predicted or measured; if it is assumed, what would prove it."""


class Artefact(Struct, frozen=True, kw_only=True):
    """One of the four."""

    kind: ArtefactKind
    lines: tuple[ReviewLine, ...]
    missing: tuple[str, ...]
    """Why it is incomplete; empty if it is complete."""


class Review(Struct, frozen=True, kw_only=True):
    """The artefacts of a job on a target."""

    job: str
    target: str
    template: ManifestTemplate
    artefacts: tuple[Artefact, ...]
    not_guaranteed: tuple[str, ...]
    """What the target's template does not ensure."""

    @property
    def missing(self) -> tuple[str, ...]:
        return tuple(f"{each.kind}: {why}" for each in self.artefacts for why in each.missing)


class Difference(Struct, frozen=True, kw_only=True):
    """A line that two jobs do not share; empty where a job has no such line."""

    kind: ArtefactKind
    name: str
    value: str
    other: str


class Predictions(Struct, frozen=True, kw_only=True):
    """What was predicted for a job, or why it could not be."""

    plan: Plan | None = None
    no_plan: str = ""
    reliability: ReliabilityPlan | None = None
    no_reliability: str = ""


NOT_GUARANTEED: Mapping[ManifestTemplate, tuple[str, ...]] = MappingProxyType(
    {
        ManifestTemplate.DEMO: (
            "that the fabric carries collectives",
            "that checkpoints outlive their node",
            "that all nodes are admitted together",
            "that the number of restarts is limited on purpose",
        ),
        ManifestTemplate.PRODUCTION: (
            "that the fabric is as fast as expected: `holdfast check --full` measures it",
            "that the program resumes where it stopped: `holdfast drill` shows it",
            "that the predicted step time is reached: compare with the first hour of the run",
            "that the nodes fail as rarely as the published fleet",
        ),
    }
)

RATES = ("matmul_tflops", "memory_gb_s", "link_gb_s", "network_gb_s")
"""Rates of the machines that a calibration can give."""

_ARTEFACT_OF = {
    "fabric-not-verified": ArtefactKind.NETWORK,
    "checkpoint-not-shared": ArtefactKind.RECOVERY,
    "no-restart-budget": ArtefactKind.RECOVERY,
}
"""Artefacts of findings; all others are about the template."""


def review(
    job: Job, target: str, spec: TargetSpec, predictions: Predictions, findings: Iterable[Finding] = ()
) -> Review:
    """The artefacts of a job; `findings` are those of the job's check on the target."""
    refused: dict[ArtefactKind, list[str]] = {kind: [] for kind in ArtefactKind}
    for finding in findings:
        if finding.severity is Severity.ERROR:
            refused[_ARTEFACT_OF.get(finding.code, ArtefactKind.TEMPLATE)].append(finding.what)
    parts = {
        ArtefactKind.LAYOUT: (_layout(job, predictions), _layout_gaps(job, predictions)),
        ArtefactKind.TEMPLATE: (_template(job, target, spec), _template_gaps(job, spec)),
        ArtefactKind.NETWORK: (_network(job, spec, predictions), _network_gaps(job, spec)),
        ArtefactKind.RECOVERY: (_recovery(job, predictions), _recovery_gaps(job, predictions)),
    }
    return Review(
        job=job.name,
        target=target,
        template=spec.template,
        artefacts=tuple(
            Artefact(kind=kind, lines=tuple(lines), missing=(*gaps, *refused[kind]))
            for kind, (lines, gaps) in parts.items()
        ),
        not_guaranteed=NOT_GUARANTEED[spec.template],
    )


def differences(one: Review, other: Review) -> tuple[Difference, ...]:
    """The lines that differ, in the order of the artefacts."""
    found: list[Difference] = []
    for mine, theirs in zip(one.artefacts, other.artefacts, strict=True):
        values, others = ({line.name: line.value for line in each.lines} for each in (mine, theirs))
        found += [
            Difference(kind=mine.kind, name=name, value=values.get(name, ""), other=others.get(name, ""))
            for name in values | others
            if values.get(name) != others.get(name)
        ]
    return tuple(found)


def _predicted(name: str, value: str, how: str) -> ReviewLine:
    return ReviewLine(name=name, value=value, standing=Standing.PREDICTED, proof=how)


def _assumed(name: str, value: str, would_prove: str) -> ReviewLine:
    return ReviewLine(name=name, value=value, standing=Standing.ASSUMED, proof=would_prove)


def _measured(name: str, value: str, how: str) -> ReviewLine:
    return ReviewLine(name=name, value=value, standing=Standing.MEASURED, proof=how)


def _layout(job: Job, predictions: Predictions) -> Iterator[ReviewLine]:
    found = predictions.plan
    if found is None:
        if job.parallel is not None:
            axes = {name: size for name, size in job.parallel.model_dump().items() if size not in (None, 1)}
            shown = ", ".join(f"{name.upper()} {size}" for name, size in axes.items()) or "data parallel only"
            yield _assumed("layout", shown, "a run that reports its groups; `model` in the job to predict it")
        return
    best, model = found.best[0], "the cost model of `holdfast plan`"
    yield _predicted("layout", best.layout, f"fastest of {found.fitting} that fit in memory, by {model}")
    yield _predicted("step time", f"{best.figures.step_s:.3g} s", model)
    yield _predicted("memory of a GPU", f"{best.figures.memory_bytes / 1e9:.0f} GB", model)
    yield _predicted("MFU", f"{best.figures.mfu_full:.1%}", model)
    for rate in RATES:
        if rate in found.assumed:
            yield _assumed(rate, "of the catalogue", "`holdfast check --full -o json`, given as `--calibration`")
        else:
            yield _measured(rate, "of the calibration", "`--calibration`")


def _layout_gaps(job: Job, predictions: Predictions) -> Iterator[str]:
    if predictions.plan is None and job.parallel is None:
        yield predictions.no_plan


def _template(job: Job, target: str, spec: TargetSpec) -> Iterator[ReviewLine]:
    size = f"{job.nodes.max} nodes of {job.local_world_size} ranks, {job.gpus_per_node} GPUs each"
    yield _predicted("size", size, "`holdfast render` shows what is sent")
    yield _predicted("target", f"{target} ({spec.kind}), template {spec.template}", "the target's file")
    if spec.kind != LOCAL:
        yield _assumed("image", job.image or "none", "`holdfast image check`, then `holdfast check`")
        yield _assumed("queue", job.queue or spec.queue or "none", "`holdfast check`: the queue admits this many GPUs")
    yield _assumed("command", " ".join(job.command), "a run on one node: `holdfast run --nodes 1`")


def _template_gaps(job: Job, spec: TargetSpec) -> Iterator[str]:
    if spec.kind != LOCAL and job.image is None:
        yield "the job has no `image`"


def _network(job: Job, spec: TargetSpec, predictions: Predictions) -> Iterator[ReviewLine]:
    fabric = resolve(job.fabric.name, spec.fabric)
    verify = "ranks' logs with NCCL_DEBUG=INFO, read by `holdfast diagnose`; then `fabric_verified` in the target"
    if spec.fabric_verified:
        yield _measured("fabric", fabric.name, spec.fabric_verified)
    else:
        yield _assumed("fabric", fabric.name, verify)
    yield _assumed("bandwidth", fabric.expected_bandwidth, "`holdfast check --full`")
    fallback = "stop" if spec.template is ManifestTemplate.PRODUCTION else job.fabric.on_fallback.value
    yield _assumed("on another network", f"`fabric.on_fallback` is {fallback}", "`holdfast drill`")
    place = job.placement
    where = f"all nodes in one {place.level}, {place.mode}" if place else "any nodes, without a condition"
    yield _assumed("placement", where, "`holdfast check --full`: bandwidth between all pairs of nodes")
    if predictions.plan is not None:
        for axis, sent in predictions.plan.best[0].sent_bytes.items():
            if sent:
                how = "NCCL's rings; compare with the interfaces' counters"
                yield _predicted(f"a rank sends along {axis}", f"{sent / 1e9:.3g} GB a step", how)


def _network_gaps(job: Job, spec: TargetSpec) -> Iterator[str]:
    if job.nodes.max > 1 and spec.kind != LOCAL and job.fabric.name == AUTO and spec.fabric is None:
        yield "neither the job nor the target names a fabric"


def _recovery(job: Job, predictions: Predictions) -> Iterator[ReviewLine]:
    recovery, saves = job.recovery, job.checkpoint
    drill = "`holdfast drill` on this target"
    lost = "its replica restarts" if recovery.replicas > 1 else "all ranks restart from the last checkpoint"
    yield _assumed("a rank or node fails", lost, drill)
    yield _assumed("replicas", f"{recovery.replicas}", drill)
    yield _assumed("standbys", f"{job.standbys}", drill)
    budget = f"{recovery.max_restarts} in {recovery.restart_window_s:g} s"
    yield _assumed("restarts allowed", budget, "failures of a day of the run")
    every_s = saves.every or (f"{saves.every_s:g} s" if saves.every_s else "")
    every_steps = f"{saves.every_steps} steps" if saves.every_steps else ""
    every = " or ".join(filter(None, (every_steps, every_s)))
    if every:
        yield _assumed("checkpoint interval", every, "`holdfast status` shows the last committed one")
    yield _assumed("checkpoints", saves.path or "the target's folder", "a drill that loses a node, then a resume")
    found = predictions.reliability
    if found is None:
        return
    how = f"simulation with the controller's policy, failure rate of {found.rate}"
    ettr = f"{found.ettr.mean:.2%} ({found.ettr.low:.2%} to {found.ettr.high:.2%})"
    yield _predicted("ETTR", ettr, how)
    yield _predicted("best checkpoint interval", f"{found.checkpoint_s.best:,.0f} s", how)
    yield _predicted("best number of standbys", f"{found.standbys.best:g}", how)
    for each in found.inputs:
        if each.is_assumed:
            yield _assumed(each.name, f"{each.value:g} {each.unit}", "the first weeks of the run")


def _recovery_gaps(job: Job, predictions: Predictions) -> Iterator[str]:
    saves = job.checkpoint
    if saves.every is None and saves.every_steps is None and saves.every_s is None:
        yield "`checkpoint` has no interval, so that none is saved before the end"
    if predictions.reliability is None:
        yield predictions.no_reliability
