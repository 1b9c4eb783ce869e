"""The catalogue of step metrics, one row each, and their reduction over ranks.

train/metrics/step_meter.py measures them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum

from msgspec import Struct

from holdfast.metrics.step_breakdown import OVERLAPPED, StepPart, breakdown_metric


class Reduction(StrEnum):
    """How the ranks' values of one step are reduced to one."""

    FIRST = "rank 0's"
    SUM = "sum"
    MAX = "largest"
    MEAN = "mean"


class Metric(Struct, frozen=True, kw_only=True):
    """One metric; a user-defined metric has no row and is rank 0's."""

    name: str
    unit: str
    help: str
    reduction: Reduction = Reduction.FIRST
    derived: bool = False
    """Whether it is computed from other metrics of the step, so that the event log need not store it."""
    sticky: bool = False
    """Whether it is reported with few steps, and its last value remains valid until the next."""
    on_request: bool = False
    """Whether it is measured only on request, and the requester waits for it."""


def _breakdown_row(part: str, help: str) -> Metric:
    """A row of the step breakdown; reduced by the mean, so the parts still add up to the step time."""
    return Metric(
        name=breakdown_metric(part), unit="s", help=help, reduction=Reduction.MEAN, sticky=True, on_request=True
    )


TCP_SENT_BYTES, TCP_RETRANSMITS = "tcp_sent_bytes", "tcp_retransmits"
_OF = "@"

CATALOG: tuple[Metric, ...] = (
    Metric(
        name="loss",
        unit="as given",
        help="The value of `commit(loss=...)`.",
        reduction=Reduction.MEAN,
    ),
    Metric(
        name="tokens",
        unit="tokens",
        help="The value of `commit(tokens=...)`: tokens of all ranks of all replicas in the step.",
    ),
    Metric(
        name="global_batch",
        unit="samples",
        help="Samples of all ranks in the step, if the session distributes them.",
    ),
    Metric(name="replicas", unit="replicas", help="Replicas in the step, if there are several."),
    Metric(name="total_steps", unit="steps", help="Total number of steps of the training."),
    Metric(
        name="step_s",
        unit="s",
        help="Time from the end of the previous step to the end of this one, including all work in between.",
        derived=True,
    ),
    Metric(name="tokens_per_s", unit="tokens/s", help="Tokens of all ranks per second of step time.", derived=True),
    Metric(
        name="tokens_per_s_per_device",
        unit="tokens/s",
        help="The same per rank; a rank is one device.",
        derived=True,
    ),
    Metric(
        name="mfu_full",
        unit="share",
        help="Model FLOPs utilisation with full attention, relative to the device's dense bf16 peak.",
    ),
    Metric(
        name="mfu_causal",
        unit="share",
        help="The same with causal attention: half the attention FLOPs for long sequences.",
    ),
    Metric(name="tflops_full", unit="TFLOP/s", help="Model FLOPs per device and second, with full attention."),
    Metric(name="tflops_causal", unit="TFLOP/s", help="The same with causal attention."),
    Metric(
        name="grad_norm",
        unit="as given",
        help="The value of `commit(grad_norm=...)`, such as the result of `clip_grad_norm_`.",
    ),
    Metric(
        name="memory_peak_bytes",
        unit="bytes",
        help="Peak GPU memory of tensors since the process started.",
        reduction=Reduction.MAX,
    ),
    Metric(
        name="memory_reserved_bytes",
        unit="bytes",
        help="GPU memory reserved by torch's allocator at the end of the step.",
        reduction=Reduction.MAX,
    ),
    Metric(
        name="host_memory_peak_bytes",
        unit="bytes",
        help="Peak resident memory of a rank's process.",
        reduction=Reduction.MAX,
    ),
    Metric(
        name="data_wait_s",
        unit="s",
        help="Time the loop waited for its next samples, if they come through the session.",
        reduction=Reduction.MAX,
    ),
    Metric(
        name="checkpoint_stall_s",
        unit="s",
        help="Part of the step time in which the loop waited for a checkpoint.",
        derived=True,
    ),
    Metric(
        name="peer_checkpoint_s",
        unit="s",
        help="Duration of the last peer checkpoint, in the background, until complete on all nodes.",
        sticky=True,
    ),
    Metric(
        name=TCP_SENT_BYTES,
        unit="bytes",
        help="Bytes that the ranks of a node send to other machines by TCP, per step: mean of the nodes that report "
        "it with this step, about once a second. One for each network interface, as `tcp_sent_bytes@eth0`.",
        reduction=Reduction.MEAN,
        sticky=True,
    ),
    Metric(
        name=TCP_RETRANSMITS,
        unit="segments",
        help="Segments of these that were sent again, per step: the most of any of these nodes. Also by interface.",
        reduction=Reduction.MAX,
        sticky=True,
    ),
    _breakdown_row(
        StepPart.FORWARD, "Part of a profiled step: everything before the backward pass, including the loss."
    ),
    _breakdown_row(StepPart.BACKWARD, "The same: backward passes."),
    _breakdown_row(
        StepPart.COMMUNICATION, "The same: the rank waited for other ranks or for data in transit, without computing."
    ),
    _breakdown_row(
        StepPart.OPTIMIZER, "The same: the optimizer's step, preparation such as clipping, and `zero_grad`."
    ),
    _breakdown_row(
        StepPart.DATA, "The same: the loop waited for its next samples, from a DataLoader or through the session."
    ),
    _breakdown_row(StepPart.CHECKPOINT, "The same: the loop waited for a checkpoint."),
    _breakdown_row(StepPart.OTHER, "The same: the rest. These seven add up to the step time."),
    _breakdown_row(OVERLAPPED, "In addition: communication overlapped with computation."),
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


def metric_of(name: str, part: str) -> str:
    """The name of a metric of one part, such as a network interface; the catalogue has one row for all of them."""
    return f"{name}{_OF}{part}"


def sticky_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """The sticky metrics among these."""
    return {name: value for name, value in metrics.items() if name.partition(_OF)[0] in STICKY}


def has_requested(metrics: Mapping[str, float]) -> bool:
    """Whether one of these is measured on request."""
    return not ON_REQUEST.isdisjoint(metrics)


def reduction_of(name: str) -> Reduction:
    """How a metric is reduced over ranks."""
    row = METRICS.get(name.partition(_OF)[0])
    return Reduction.FIRST if row is None else row.reduction


def reduced_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics that are reduced over all ranks, not just rank 0's."""
    return {name: value for name, value in metrics.items() if reduction_of(name) is not Reduction.FIRST}


def reduce_metrics(head: Mapping[str, float], others: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Reduce one step's metrics of several groups of equal size; `head` is rank 0 or its group."""
    values = {name: [value] for name, value in head.items()}
    for metrics in others:
        for name, value in reduced_metrics(metrics).items():
            values.setdefault(name, []).append(value)
    return {name: _REDUCERS[reduction_of(name)](each) for name, each in values.items()}
