"""Fits the planner's constants to published runs.

Every constant has a factor over its value in the source, so that factors near 1 say that the source has the optimum.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from bench.published_runs import PublishedRun
from holdfast.plan.hardware import Machine
from holdfast.plan.step_time import DEFAULT, Constants, Software, step_time

A100, H100 = ("A100 80GB", "A100 40GB"), ("H100 SXM", "H100 500W", "H200")
B200, B300 = ("B200", "GB200"), ("B300", "GB300")
MEGATRON = ("megatron", "megatron-without-graphs", "megatron-fused-experts")
PRIOR = 0.004
"""Weight of squared logarithms of factors: a constant that hardly matters stays where it is."""
QUADRATIC_BELOW = 0.1
"""Relative error above which a run counts linearly, so that outliers do not decide."""
ROUNDS = 30


@dataclass(frozen=True, kw_only=True)
class Constant:
    """One fitted constant: a field of the GPUs or kinds of software with these names, or of `Constants`."""

    field: str
    of: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Such as `matmul of B200, GB200`."""
        return f"{self.field} of {', '.join(self.of)}" if self.of else self.field


FITTED = (
    Constant(field="matmul", of=A100),
    Constant(field="matmul", of=H100),
    Constant(field="matmul_fp8", of=H100),
    Constant(field="matmul", of=(*B200, *B300)),
    Constant(field="matmul_fp8", of=(*B200, *B300)),
    Constant(field="matmul", of=B300),
    Constant(field="matmul_fp8", of=B300),
    Constant(field="attention", of=H100),
    Constant(field="attention", of=(*B200, *B300)),
    Constant(field="attention_portable", of=A100),
    Constant(field="attention_portable", of=H100),
    Constant(field="attention_early", of=A100),
    Constant(field="attention_early", of=H100),
    Constant(field="memory", of=(*A100, *H100, *B200, *B300)),
    Constant(field="traffic", of=("eager", "eager-2023")),
    Constant(field="traffic", of=("compiled",)),
    Constant(field="traffic", of=MEGATRON),
    Constant(field="traffic", of=("megatron-2022",)),
    Constant(field="host_s", of=("eager", "eager-2023")),
    Constant(field="host_s", of=("compiled", *MEGATRON)),
    Constant(field="expert_host_s", of=("eager", "compiled", "megatron-without-graphs")),
    Constant(field="tensor_overlap", of=MEGATRON),
    Constant(field="expert_speedup", of=("megatron-fused-experts",)),
    Constant(field="operand_share"),
    Constant(field="backward_attention"),
    Constant(field="narrow_heads"),
    Constant(field="fp8_casts"),
    Constant(field="fsdp_overlap"),
    Constant(field="contention"),
    Constant(field="expert_overlap"),
    Constant(field="expert_imbalance"),
    Constant(field="scale_loss"),
)
SHARES = {"matmul", "matmul_fp8", "memory", "tensor_overlap", "fsdp_overlap", "expert_overlap"}
"""Fields that do not exceed 1."""

Factors = Mapping[Constant, float]


def error(run: PublishedRun, factors: Factors) -> float:
    """Relative error of a run's predicted step time."""
    software = _scaled(run.load.software, run.load.software.name, factors)
    machine = replace(run.machine, gpu=_scaled(run.machine.gpu, run.machine.gpu.name, factors))
    constants = _scaled(DEFAULT, None, factors)
    return _seconds(run, software, machine, constants) / run.step_s - 1


def _seconds(run: PublishedRun, software: Software, machine: Machine, constants: Constants) -> float:
    return step_time(replace(run.load, software=software), run.layout, machine, constants).total


def _scaled(thing: Any, name: str | None, factors: Factors) -> Any:
    changed: dict[str, Any] = {}
    for constant, factor in factors.items():
        known = getattr(thing, constant.field, None)
        if known is None or (name not in constant.of if name else constant.of):
            continue
        value = changed.get(constant.field, known) * factor
        changed[constant.field] = min(1.0, value) if constant.field in SHARES else value
    return replace(thing, **changed)


def loss(runs: Sequence[PublishedRun], factors: Factors) -> float:
    """Mean error of the runs, in which each source and machine counts with the root of its number of runs."""
    counts = Counter((run.group, run.machine.name) for run in runs)
    weights = [1 / math.sqrt(counts[run.group, run.machine.name]) for run in runs]
    errors = (_counted(math.log1p(error(run, factors))) for run in runs)
    prior = PRIOR * sum(math.log(factor) ** 2 for factor in factors.values())
    return sum(weight * each for weight, each in zip(weights, errors, strict=True)) / sum(weights) + prior


def _counted(distance: float) -> float:
    size = abs(distance)
    return size**2 / QUADRATIC_BELOW if size < QUADRATIC_BELOW else 2 * size - QUADRATIC_BELOW


def fit(runs: Sequence[PublishedRun]) -> Factors:
    """Factors with the least loss, found along one constant after the other."""
    factors = dict.fromkeys(FITTED, 1.0)
    best = loss(runs, factors)
    steps = dict.fromkeys(FITTED, 0.1)
    for _ in range(ROUNDS):
        for constant in FITTED:
            for scale in (1 + steps[constant], 1 / (1 + steps[constant])):
                tried = {**factors, constant: factors[constant] * scale}
                found = loss(runs, tried)
                if found < best:
                    factors, best = tried, found
                    steps[constant] *= 1.3
                    break
            else:
                steps[constant] /= 2
    return factors
