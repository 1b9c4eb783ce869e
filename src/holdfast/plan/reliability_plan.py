"""What failures cost a job, by simulation, and the checkpoint interval and the standbys that cost it least; pure."""

from __future__ import annotations

import difflib
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev

from msgspec import Struct
from msgspec.structs import replace

from holdfast.errors import ExitCode, failure
from holdfast.failure_rates import DAY_S, FAILURE_RATES
from holdfast.job.spec import Job
from holdfast.plan.fault_table import HOUR_S, STEP_S, Input, causes, failure_scale, fleet, inputs
from holdfast.plan.reliability import FaultKind, Fleet, Loss, Trial, simulate
from holdfast.protocol.watch_levels import WatchLevel

TRIALS = 20
"""Simulated runs of which the result is the mean."""
SEARCH_TRIALS, SEARCH_FAILURES = 4, 200
"""Runs for each value that is tried, and failures in each: how often they fail decides which value is best."""
INTERVAL_FACTORS = tuple(2.0 ** (power / 2) for power in range(-4, 9))
"""Checkpoint intervals that are tried, over Young's."""
STANDBYS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
NORMAL_95 = 1.96


class ReliabilityRequest(Struct, frozen=True, kw_only=True):
    """What is simulated."""

    fleet: Fleet
    causes: tuple[FaultKind, ...]
    detectors: frozenset[str]
    days: float
    rate: str
    """Whose failure rate."""
    gpus: int
    inputs: tuple[Input, ...]


class MeanShare(Struct, frozen=True, kw_only=True):
    """A mean share of 1 over simulated runs, with its 95 % confidence interval."""

    mean: float
    low: float
    high: float


class LostTime(Struct, frozen=True, kw_only=True):
    """GPU-hours that one cause costs, in all and by how."""

    cause: str
    gpu_hours: float
    by_loss: Mapping[Loss, float]


class BestValue(Struct, frozen=True, kw_only=True):
    """The best of several values, with the job's own."""

    own: float
    own_ettr: float
    best: float
    best_ettr: float


class ReliabilityPlan(Struct, frozen=True, kw_only=True):
    """What failures cost a job."""

    nodes: int
    gpus: int
    days: float
    rate: str
    failures_per_day: float
    ettr: MeanShare
    """Training that counts, at full speed, over all time."""
    ettr_at_any_speed: float
    """The same, where a slow step counts like any other, as published figures count."""
    lost: tuple[LostTime, ...]
    """Largest first."""
    actions: Mapping[str, float]
    """Mean number of each action in a run."""
    checkpoint_s: BestValue
    """Seconds between checkpoints; the best gives the highest ETTR."""
    standbys: BestValue
    """The best gives most training per GPU-hour, those of standbys included."""
    inputs: tuple[Input, ...]


def reliability_request(job: Job, *, rate: str, days: float, step_s: float | None) -> ReliabilityRequest:
    """The input of the simulation of a job.

    `rate` is a published fleet or a number of failures per 1,000 node-days; `step_s` None means that a step of 10 s is
    assumed. Raises HoldfastError for an unknown rate, or a job without GPUs.
    """
    name, per_1000_node_days = find_rate(rate)
    if job.gpus_per_node == 0:
        what = f"job `{job.name}` has no GPUs, and only runs on GPUs are predicted"
        raise failure(
            "no-gpus", what, exit_code=ExitCode.INVALID_JOB, where="gpus_per_node", remedy="Set `gpus_per_node`."
        )
    machines, recovery, gpus = job.nodes.max, job.recovery, job.nodes.max * job.gpus_per_node
    nodes = max(machines, recovery.replicas)  # a replica that is a part of a machine counts as a node
    scale = failure_scale(machines, per_1000_node_days)
    step = step_s or STEP_S
    return ReliabilityRequest(
        fleet=fleet(
            nodes=nodes,
            gpus_per_node=gpus // nodes,
            scale=scale,
            step_s=step,
            standbys=job.standbys,
            checkpoint_every_s=_interval_s(job, step, days),
            recovery=recovery,
        ),
        causes=causes(scale=scale, step_s=step, recovery=recovery),
        detectors=_detectors(job),
        days=days,
        rate=name,
        gpus=gpus,
        inputs=inputs(step_s=step, is_predicted=step_s is not None, recovery=recovery),
    )


def find_rate(rate: str) -> tuple[str, float]:
    """The name and value of a failure rate; raises HoldfastError if it is neither published nor a positive number."""
    known = {each.fleet.lower().replace(" ", "-"): each for each in FAILURE_RATES}
    if rate.lower() in known:
        found = known[rate.lower()]
        return found.fleet, found.per_1000_node_days
    try:
        number = float(rate)
    except ValueError:
        number = 0.0
    if 0 < number < 1000:
        return f"{number:g} per 1,000 node-days", number
    near = difflib.get_close_matches(rate.lower(), known, 1)
    remedy = f"Did you mean `{near[0]}`? " if near else f"Known: {', '.join(known)}. "
    raise failure(
        "unknown-failure-rate",
        f"no published fleet is called `{rate}`, and it is no number of failures per 1,000 node-days",
        exit_code=ExitCode.USAGE,
        where="--failures",
        remedy=f"{remedy}Or give the failures of your own nodes per 1,000 node-days, below 1,000.",
    )


def _interval_s(job: Job, step_s: float, days: float) -> float | None:
    """Seconds between checkpoints; None for Young's. A job without an interval saves none before its end."""
    spec = job.checkpoint
    by_steps = spec.every_steps * step_s if spec.every_steps else math.inf
    if spec.every is not None and not spec.every_steps:
        return None
    return min(by_steps, spec.every_s or math.inf, 2 * days * DAY_S)


def _detectors(job: Job) -> frozenset[str]:
    recovery, watch = job.recovery, job.watch
    runs = {
        "hangs": recovery.step_timeout_s is not None,
        "comparison": recovery.verify_every_steps > 0,
        "devices": watch.device_faults is WatchLevel.ACT,
        "numbers": watch.non_finite is WatchLevel.ACT,
        "stragglers": watch.stragglers is WatchLevel.ACT,
    }
    return frozenset(name for name, does_run in runs.items() if does_run)


def predict_reliability(request: ReliabilityRequest) -> ReliabilityPlan:
    """Simulate the job, and search the interval and the number of standbys."""
    found = [_trial(request, request.fleet, seed, request.days) for seed in range(TRIALS)]
    return ReliabilityPlan(
        nodes=request.fleet.nodes,
        gpus=request.gpus,
        days=request.days,
        rate=request.rate,
        failures_per_day=sum(cause.per_day for cause in request.causes),
        ettr=mean_share([trial.ettr for trial in found]),
        ettr_at_any_speed=fmean(trial.ettr_at_any_speed for trial in found),
        lost=lost_time(found, request.gpus),
        actions=_mean_actions(found),
        checkpoint_s=best_interval(request),
        standbys=best_standbys(request),
        inputs=request.inputs,
    )


def mean_share(values: Sequence[float]) -> MeanShare:
    """The mean of shares of at least two runs."""
    mean, error = fmean(values), NORMAL_95 * stdev(values) / math.sqrt(len(values))
    return MeanShare(mean=mean, low=max(0.0, mean - error), high=min(1.0, mean + error))


def lost_time(trials: Sequence[Trial], gpus: int) -> tuple[LostTime, ...]:
    """Mean GPU-hours that each cause costs a run, largest first."""
    found = [
        LostTime(cause=cause, gpu_hours=sum(by_loss.values()), by_loss=by_loss)
        for cause in sorted({cause for trial in trials for cause, _ in trial.lost_s})
        for by_loss in ({how: _mean_hours(trials, cause, how) * gpus for how in Loss},)
    ]
    return tuple(sorted(found, key=lambda each: -each.gpu_hours))


def _mean_hours(trials: Sequence[Trial], cause: str, how: Loss) -> float:
    return fmean(trial.lost_s.get((cause, how), 0.0) for trial in trials) / HOUR_S


def best_interval(request: ReliabilityRequest) -> BestValue:
    """The checkpoint interval with the highest ETTR, of multiples of Young's."""
    own = request.fleet.checkpoint_every_s
    mtbf_s = DAY_S / sum(cause.per_day for cause in request.causes)
    young_s = math.sqrt(2 * request.fleet.checkpoint_cost_s * mtbf_s)
    tried = {
        every_s: _searched(request, replace(request.fleet, checkpoint_every_s=every_s))
        for every_s in (own, *(young_s * factor for factor in INTERVAL_FACTORS))
    }
    best = max(tried, key=lambda each: tried[each])
    return BestValue(own=own, own_ettr=tried[own], best=best, best_ettr=tried[best])


def best_standbys(request: ReliabilityRequest) -> BestValue:
    """The number of standbys with most training per GPU-hour, of which standbys use some too."""
    own, nodes = request.fleet.standbys, request.fleet.nodes
    tried = {
        standbys: _searched(request, replace(request.fleet, standbys=standbys))
        for standbys in (own, *(each for each in STANDBYS if each <= nodes // 8 + 1))
    }
    best = max(tried, key=lambda each: tried[each] * nodes / (nodes + each))
    return BestValue(own=own, own_ettr=tried[own], best=best, best_ettr=tried[best])


def _searched(request: ReliabilityRequest, changed: Fleet) -> float:
    days = SEARCH_FAILURES / sum(cause.per_day for cause in request.causes)
    return fmean(_trial(request, changed, seed, days).ettr for seed in range(SEARCH_TRIALS))


def _trial(request: ReliabilityRequest, changed: Fleet, seed: int, days: float) -> Trial:
    return simulate(changed, request.causes, request.detectors, total_s=days * DAY_S, seed=seed)


def _mean_actions(trials: Sequence[Trial]) -> dict[str, float]:
    sums = sum((Counter(trial.actions) for trial in trials), Counter[str]())
    return {action: number / len(trials) for action, number in sums.most_common()}
