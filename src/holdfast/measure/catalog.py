"""Owns what is measured of a step: a row for each metric, and how the ranks' words for one step become one.

Refuses to own where a figure comes from (train/meter.py), and where it is shown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from holdfast.measure.split import HIDDEN, Part, split_name


class Across(StrEnum):
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
    across: Across = Across.FIRST
    derived: bool = False
    """Whether it follows from others of the same step and its times, so that the log of a run need not hold it."""
    lasting: bool = False
    """Whether it comes with few steps, and stands until it comes again."""
    asked: bool = False
    """Whether it is measured only when somebody asks, who then waits for it."""


def _share(part: str, help: str) -> Metric:
    """A row of the split of a step's time; the mean over ranks adds up as each rank's does."""
    return Metric(name=split_name(part), unit="s", help=help, across=Across.MEAN, lasting=True, asked=True)


CATALOG: tuple[Metric, ...] = (
    Metric(
        name="loss",
        unit="as given",
        help="What `commit(loss=...)` was given.",
        across=Across.MEAN,
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
        across=Across.MAX,
    ),
    Metric(
        name="memory_reserved_bytes",
        unit="bytes",
        help="What torch's allocator has taken from the GPU at the end of the step.",
        across=Across.MAX,
    ),
    Metric(
        name="host_memory_peak_bytes",
        unit="bytes",
        help="Most that a rank's process has had resident in the node's memory.",
        across=Across.MAX,
    ),
    Metric(
        name="data_wait_s",
        unit="s",
        help="Time the loop waited for its next samples, where they come through the session.",
        across=Across.MAX,
    ),
    Metric(
        name="checkpoint_stall_s",
        unit="s",
        help="Part of the step's time that the loop waited for a checkpoint.",
        derived=True,
    ),
    Metric(
        name="peer_copy_s",
        unit="s",
        help="What the last copy to other nodes' memory took, beside the steps, until it was whole on all nodes.",
        lasting=True,
    ),
    _share(Part.FORWARD, "When asked for, of a step: what comes before a backward pass, the loss included."),
    _share(Part.BACKWARD, "The same: backward passes."),
    _share(Part.COMMUNICATION, "The same: the rank waited for others or for bytes, and did nothing beside."),
    _share(Part.OPTIMIZER, "The same: the optimiser's step, what leads to it such as clipping, and `zero_grad`."),
    _share(Part.DATA, "The same: the loop waited for its next samples, from a DataLoader or through the session."),
    _share(Part.CHECKPOINT, "The same: the loop waited for a checkpoint."),
    _share(Part.OTHER, "The same: the rest. These seven add up to the step's time."),
    _share(HIDDEN, "Beside them: communication that the rank computed beside."),
)

ROWS: Mapping[str, Metric] = {metric.name: metric for metric in CATALOG}
DERIVED = frozenset(metric.name for metric in CATALOG if metric.derived)
LASTING = frozenset(metric.name for metric in CATALOG if metric.lasting)
ASKED = frozenset(metric.name for metric in CATALOG if metric.asked)

_FOLDS: Mapping[Across, Callable[[list[float]], float]] = {
    Across.FIRST: lambda values: values[0],
    Across.SUM: sum,
    Across.MAX: max,
    Across.MEAN: lambda values: sum(values) / len(values),
}


def lasting(metrics: Mapping[str, float]) -> dict[str, float]:
    """Those that stand until they come again."""
    return {name: metrics[name] for name in LASTING & metrics.keys()}


def waited_for(metrics: Mapping[str, float]) -> bool:
    """Whether somebody asked for one of them, and waits for it."""
    return not ASKED.isdisjoint(metrics)


def across(name: str) -> Across:
    """How a metric's figures come together."""
    row = ROWS.get(name)
    return Across.FIRST if row is None else row.across


def shared(metrics: Mapping[str, float]) -> dict[str, float]:
    """Those that others than rank 0 have a say in."""
    return {name: value for name, value in metrics.items() if across(name) is not Across.FIRST}


def together(head: Mapping[str, float], others: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """One step's metrics of several, each of which stands for equally many ranks; the head is rank 0, or has it."""
    values = {name: [value] for name, value in head.items()}
    for metrics in others:
        for name, value in shared(metrics).items():
            values.setdefault(name, []).append(value)
    return {name: _FOLDS[across(name)](each) for name, each in values.items()}
