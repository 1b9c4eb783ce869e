"""The prediction for a job: its best layouts, why they win, and how it scales."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from msgspec import Struct
from msgspec.structs import replace

from holdfast.plan.hardware import TERA, Machine
from holdfast.plan.layout import Recompute
from holdfast.plan.search import Candidate, Found, search
from holdfast.plan.step_time import StepTime, Workload, step_time, traffic_of
from holdfast.plan.traffic import step_traffic

HOUR_S = 3600.0
MAX_FACTOR = 8.0
"""The largest change of one rate that is looked at for the next layout to win."""

PARTS = {
    "recompute": "recomputing activations",
    "bubble": "pipeline bubble",
    "tensor": "tensor-parallel communication",
    "context": "context-parallel communication",
    "expert": "expert-parallel communication",
    "pipeline": "sends between pipeline stages",
    "data": "data-parallel communication",
    "elementwise": "elementwise kernels",
    "optimizer": "optimizer",
    "host": "waiting for the host",
    "scale": "jitter and stragglers",
}
"""What a step's time is lost to, by its name in StepTime."""


class Figures(Struct, frozen=True, kw_only=True):
    """What a layout gives; MFU over the bf16 peak, in both conventions, as shares of 1."""

    step_s: float
    tokens_per_s_per_gpu: float
    mfu_full: float
    mfu_causal: float
    memory_bytes: float
    gpu_hours: float | None
    """For the token budget; None without one."""
    cost: float | None
    """In the currency of the price; None without one."""


class Predicted(Struct, frozen=True, kw_only=True):
    """A layout with its figures and the largest losses, as shares of the step."""

    layout: str
    candidate: Candidate
    figures: Figures
    losses: dict[str, float]
    sent_bytes: dict[str, float]
    """Bytes that a rank of the busiest stage sends per step, by axis (`dp`, `tp`, `pp`)."""


class ScalePoint(Struct, frozen=True, kw_only=True):
    """One number of nodes; `efficiency` is tokens/s/GPU over that of the smallest number that fits."""

    nodes: int
    gpus: int
    layout: str
    tokens_per_s: float
    efficiency: float
    reason: str


class Plan(Struct, frozen=True, kw_only=True):
    """The prediction for a job."""

    machine: str
    assumed: tuple[str, ...]
    """Rates that come from the catalogue, not from a calibration."""
    nodes: int
    gpus: int
    tried: int
    fitting: int
    best: tuple[Predicted, ...]
    next_wins_if: str
    """What would have to be true for the second layout to win; empty if there is none."""
    scaling: tuple[ScalePoint, ...]
    """Best layouts from one node to all; empty if the job fixes axes."""


def losses(time: StepTime) -> dict[str, float]:
    """Shares of the step by what they are lost to, largest first."""
    shares = {name: getattr(time, name) / time.total for name in PARTS}
    return dict(sorted(((name, share) for name, share in shares.items() if share > 0), key=lambda each: -each[1]))


def figures(
    load: Workload, candidate: Candidate, machine: Machine, *, budget_tokens: int | None, price: float | None
) -> Figures:
    """Rates and costs of a layout; `price` is of one GPU for one hour."""
    layout, step_s = candidate.layout, candidate.time.total
    rate = load.tokens / step_s / layout.gpus
    flops, peak = load.model.flops(load.length), (machine.gpu.peak.peak_tflops or 0.0) * TERA
    hours = budget_tokens / rate / HOUR_S if budget_tokens else None
    return Figures(
        step_s=step_s,
        tokens_per_s_per_gpu=rate,
        mfu_full=rate * flops.full / peak,
        mfu_causal=rate * (flops.causal or 0.0) / peak,
        memory_bytes=candidate.memory.total,
        gpu_hours=hours,
        cost=hours * price if hours is not None and price is not None else None,
    )


_RATES: tuple[tuple[str, Callable[[Machine], float], Callable[[Machine, float], Machine], str], ...] = (
    ("the link", lambda m: m.link_rate / 1e9, lambda m, f: replace(m, link_rate=m.link_rate * f), "GB/s"),
    ("the network", lambda m: m.network_rate / 1e9, lambda m, f: replace(m, network_rate=m.network_rate * f), "GB/s"),
    (
        "elementwise kernels",
        lambda m: m.gpu.memory_rate * m.gpu.memory / 1e9,
        lambda m, f: replace(m, gpu=replace(m.gpu, memory=m.gpu.memory * f)),
        "GB/s",
    ),
    (
        "large bf16 products",
        lambda m: m.gpu.matmul * (m.gpu.peak.peak_tflops or 0.0),
        lambda m, f: replace(m, gpu=replace(m.gpu, matmul=m.gpu.matmul * f)),
        "TFLOP/s",
    ),
)


def next_wins_if(load: Workload, machine: Machine, best: Candidate, other: Candidate) -> str:
    """The smallest change of one rate with which the other layout is faster."""
    gap = other.time.total / best.time.total - 1
    changes = [
        (found, f"{what} reached {now(machine) * found:,.0f} {unit} instead of {now(machine):,.0f}")
        for what, now, scaled, unit in _RATES
        for up in (True, False)
        if (found := _turning_point(load, machine, best, other, scaled, up)) is not None
    ]
    behind = f"{other.layout} is {gap:.1%} slower"
    if not changes:
        return f"{behind}; no single rate, changed by up to {MAX_FACTOR:g} times, would make it faster"
    return f"{behind}; it would win if {min(changes, key=lambda each: max(each[0], 1 / each[0]))[1]}"


def _turning_point(
    load: Workload,
    machine: Machine,
    best: Candidate,
    other: Candidate,
    scaled: Callable[[Machine, float], Machine],
    up: bool,
) -> float | None:
    def wins(factor: float) -> bool:
        changed = scaled(machine, factor if up else 1 / factor)
        return step_time(load, other.layout, changed).total < step_time(load, best.layout, changed).total

    low, high = 1.0, MAX_FACTOR
    if not wins(high):
        return None
    for _ in range(20):
        middle = (low * high) ** 0.5
        low, high = (low, middle) if wins(middle) else (middle, high)
    return high if up else 1 / high


def scaling(load: Workload, machine: Machine, nodes: int, per_node: int) -> tuple[ScalePoint, ...]:
    """The best layout for powers of two of nodes up to `nodes`, with what each loses to the smallest that fits."""
    counts = sorted({*(1 << power for power in range(nodes.bit_length()) if 1 << power <= nodes), nodes})
    points: list[ScalePoint] = []
    first: Candidate | None = None
    for count in counts:
        found = search(load, machine, count * per_node, keep=1)
        if not found.best:
            why = "does not fit in memory" if found.tried else "no layout divides the batch over these GPUs"
            points.append(
                ScalePoint(nodes=count, gpus=count * per_node, layout="", tokens_per_s=0.0, efficiency=0.0, reason=why)
            )
            continue
        best = found.best[0]
        first = first or best
        points.append(_point(load, count, first, best))
    return tuple(points)


def _point(load: Workload, nodes: int, first: Candidate, best: Candidate) -> ScalePoint:
    each, base = best.time.total * best.layout.gpus, first.time.total * first.layout.gpus
    grown = {
        what: (getattr(best.time, name) * best.layout.gpus - getattr(first.time, name) * first.layout.gpus) / each
        for name, what in PARTS.items()
    }
    what, share = max(grown.items(), key=lambda item: item[1])
    same = best is first
    reason = "the smallest that fits" if same else f"{what} +{share:.1%}" if share > 0.001 else "loses nothing"
    return ScalePoint(
        nodes=nodes,
        gpus=best.layout.gpus,
        layout=describe(best),
        tokens_per_s=load.tokens / best.time.total,
        efficiency=base / each,
        reason=reason,
    )


def describe(candidate: Candidate) -> str:
    """Such as `TP 8, PP 16, DP 128, micro-batch 1, ZeRO-1, full recomputation`."""
    layout = candidate.layout
    sharding = "" if layout.dp * layout.cp == 1 else f", {SHARDING_TEXT[layout.sharding.value]}"
    again = "" if layout.recompute is Recompute.NONE else f", {layout.recompute.value} recomputation"
    return f"{layout}{sharding}{again}"


SHARDING_TEXT = {"ddp": "DDP", "optimizer": "ZeRO-1", "fsdp": "FSDP", "hsdp": "HSDP"}


def predict(
    load: Workload,
    machine: Machine,
    *,
    nodes: int,
    per_node: int,
    fixed: Mapping[str, int],
    budget_tokens: int | None = None,
    price: float | None = None,
) -> tuple[Plan, Found]:
    """The plan of a job on `nodes` machines; `fixed` gives the axes that the job sets."""
    gpus = nodes * per_node
    found = search(load, machine, gpus, fixed=fixed)
    best = tuple(
        Predicted(
            layout=describe(each),
            candidate=each,
            figures=figures(load, each, machine, budget_tokens=budget_tokens, price=price),
            losses=losses(each.time),
            sent_bytes=step_traffic(traffic_of(load, each.layout, machine)),
        )
        for each in found.best
    )
    rates = {"matmul_tflops", "memory_gb_s", "link_gb_s", "network_gb_s"}
    plan = Plan(
        machine=machine.name,
        assumed=tuple(sorted(rates - {*machine.measured})),
        nodes=nodes,
        gpus=gpus,
        tried=found.tried,
        fitting=found.fitting,
        best=best,
        next_wins_if=next_wins_if(load, machine, found.best[0], found.best[1]) if len(found.best) > 1 else "",
        scaling=() if fixed or not best else scaling(load, machine, nodes, per_node),
    )
    return plan, found
