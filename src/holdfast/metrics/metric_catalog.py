"""Owns what is measured of a step: a row for each metric, and how the ranks' words for one step become one.

Refuses to own where a figure comes from (train/metrics/step_meter.py), and where it is shown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from holdfast.metrics.step_breakdown import OVERLAPPED, StepPart, breakdown_metric


class Reduction(StrEnum):
    """What stands for a step of which every rank has a figure of its own."""

    FIRST = "rank 0's"
    SUM = "sum"
    MAX = "largest"
    MEAN = "mean"


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One metric; a user's own, which has no row, is rank 0's."""

    name: str
    unit: str
    help: str
    reduction: Reduction = Reduction.FIRST
    derived: bool = False
    """Whether it follows from others of the same step and its times, so that the log of a run need not hold it."""
    sticky: bool = False
    """Whether it comes with few steps, and stands until it comes again."""
    on_request: bool = False
    """Whether it is measured only when somebody asks, who then waits for it."""


def _breakdown_row(part: str, help: str) -> Metric:
    """A row of the split of a step's time; the mean over ranks adds up as each rank's does."""
    return Metric(
        name=breakdown_metric(part), unit="s", help=help, reduction=Reduction.MEAN, sticky=True, on_request=True
    )


CATALOG: tuple[Metric, ...] = (
    Metric(
        name="loss",
        unit="as given",
        help="What `commit(loss=...)` was given.",
        reduction=Reduction.MEAN,
    ),
    Metric(
        name="tokens",
        unit="tokens",
        help="What `commit(tokens=...)` was given: those of all ranks, of all replicas, in the step.",
    ),
    Metric(
        name="global_batch",
        unit="samples",
        help="Samples that all ranks took in the step, where they are dealt by the session.",
    ),
    Metric(name="replicas", unit="replicas", help="Those that took part in the step, where there are several."),
    Metric(name="total_steps", unit="steps", help="How many steps there are to be."),
    Metric(
        name="step_s",
        unit="s",
        help="From the end of the step before to the end of this one, whatever was done in between.",
        derived=True,
    ),
    Metric(name="tokens_per_s", unit="tokens/s", help="Tokens of all ranks over the step's time.", derived=True),
    Metric(
        name="tokens_per_s_per_device",
        unit="tokens/s",
        help="The same for each rank: a rank is one device.",
        derived=True,
    ),
    Metric(
        name="mfu_full",
        unit="share",
        help="Model FLOPs utilisation, attention counted in full; of the device's dense bf16 peak.",
    ),
    Metric(
        name="mfu_causal",
        unit="share",
        help="The same with attention counted as a causal mask leaves it: half of it for long sequences.",
    ),
    Metric(
        name="tflops_full", unit="TFLOP/s", help="Model FLOPs of each device in a second, attention counted in full."
    ),
    Metric(name="tflops_causal", unit="TFLOP/s", help="The same with causal attention."),
    Metric(
        name="grad_norm",
        unit="as given",
        help="What `commit(grad_norm=...)` was given, such as what `clip_grad_norm_` returns.",
    ),
    Metric(
        name="memory_peak_bytes",
        unit="bytes",
        help="Most that tensors have taken of a GPU's memory since the process began.",
        reduction=Reduction.MAX,
    ),
    Metric(
        name="memory_reserved_bytes",
        unit="bytes",
        help="What torch's allocator has taken from the GPU at the end of the step.",
        reduction=Reduction.MAX,
    ),
    Metric(
        name="host_memory_peak_bytes",
        unit="bytes",
        help="Most that a rank's process has had resident in the node's memory.",
        reduction=Reduction.MAX,
    ),
    Metric(
        name="data_wait_s",
        unit="s",
        help="Time the loop waited for its next samples, where they come through the session.",
        reduction=Reduction.MAX,
    ),
    Metric(
        name="checkpoint_stall_s",
        unit="s",
        help="Part of the step's time that the loop waited for a checkpoint.",
        derived=True,
    ),
    Metric(
        name="peer_checkpoint_s",
        unit="s",
        help="What the last copy to other nodes' memory took, beside the steps, until it was whole on all nodes.",
        sticky=True,
    ),
    _breakdown_row(
        StepPart.FORWARD, "When asked for, of a step: what comes before a backward pass, the loss included."
    ),
    _breakdown_row(StepPart.BACKWARD, "The same: backward passes."),
    _breakdown_row(
        StepPart.COMMUNICATION, "The same: the rank waited for others or for bytes, and did nothing beside."
    ),
    _breakdown_row(
        StepPart.OPTIMIZER, "The same: the optimiser's step, what leads to it such as clipping, and `zero_grad`."
    ),
    _breakdown_row(
        StepPart.DATA, "The same: the loop waited for its next samples, from a DataLoader or through the session."
    ),
    _breakdown_row(StepPart.CHECKPOINT, "The same: the loop waited for a checkpoint."),
    _breakdown_row(StepPart.OTHER, "The same: the rest. These seven add up to the step's time."),
    _breakdown_row(OVERLAPPED, "Beside them: communication that the rank computed beside."),
)

METRICS: Mapping[str, Metric] = {metric.name: metric for metric in CATALOG}
DERIVED = frozenset(metric.name for metric in CATALOG if metric.derived)
STICKY = frozenset(metric.name for metric in CATALOG if metric.sticky)
ON_REQUEST = frozenset(metric.name for metric in CATALOG if metric.on_request)

_REDUCERS: Mapping[Reduction, Callable[[list[float]], float]] = {
    Reduction.FIRST: lambda values: values[0],
    Reduction.SUM: sum,
    Reduction.MAX: max,
    Reduction.MEAN: lambda values: sum(values) / len(values),
}


def sticky_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """Those that stand until they come again."""
    return {name: metrics[name] for name in STICKY & metrics.keys()}


def has_requested(metrics: Mapping[str, float]) -> bool:
    """Whether somebody asked for one of them, and waits for it."""
    return not ON_REQUEST.isdisjoint(metrics)


def reduction_of(name: str) -> Reduction:
    """How a metric's figures come together."""
    row = METRICS.get(name)
    return Reduction.FIRST if row is None else row.reduction


def reduced_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """Those that others than rank 0 have a say in."""
    return {name: value for name, value in metrics.items() if reduction_of(name) is not Reduction.FIRST}


def reduce_metrics(head: Mapping[str, float], others: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """One step's metrics of several, each of which stands for equally many ranks; the head is rank 0, or has it."""
    values = {name: [value] for name, value in head.items()}
    for metrics in others:
        for name, value in reduced_metrics(metrics).items():
            values.setdefault(name, []).append(value)
    return {name: _REDUCERS[reduction_of(name)](each) for name, each in values.items()}
