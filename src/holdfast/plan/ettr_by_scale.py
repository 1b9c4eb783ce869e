"""Simulates a job on fewer and more nodes, as it is and with what others do after a failure; pure."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean

from msgspec import Struct
from msgspec.structs import replace

from holdfast.failure_rates import DAY_S, standby_count
from holdfast.job.spec import MAX_NODES, Job, Nodes
from holdfast.plan.reliability import Fleet, Restarting, simulate
from holdfast.plan.reliability_plan import ReliabilityRequest, reliability_request

FACTORS = (1 / 8, 1 / 4, 1 / 2, 1, 2, 4, 8)
"""Numbers of nodes, over the job's."""
TRIALS = 16


class EttrCurve(Struct, frozen=True, kw_only=True):
    """ETTR of one way to recover, by number of GPUs."""

    name: str
    ettr: dict[int, float]


def ettr_by_scale(job: Job, *, rate: str, days: float, step_s: float | None) -> tuple[EttrCurve, ...]:
    """The job as it is, restarted in place only, and restarted by the scheduler as with torchrun."""
    requests: list[ReliabilityRequest] = []
    for nodes in sorted({max(1, round(job.nodes.max * factor)) for factor in FACTORS}):
        if nodes <= MAX_NODES:
            scaled = job.model_copy(update={"nodes": Nodes(min=nodes, max=nodes)})
            requests.append(reliability_request(scaled, rate=rate, days=days, step_s=step_s))
    found: dict[str, dict[int, float]] = {}
    for request in requests:
        for name, fleet, detectors in _ways(request):
            trials = [
                simulate(fleet, request.causes, detectors, total_s=days * DAY_S, seed=seed) for seed in range(TRIALS)
            ]
            found.setdefault(name, {})[request.gpus] = fmean(trial.ettr for trial in trials)
    return tuple(EttrCurve(name=name, ettr=ettr) for name, ettr in found.items())


def _ways(request: ReliabilityRequest) -> Iterator[tuple[str, Fleet, frozenset[str]]]:
    own = request.fleet
    yield "this job", own, request.detectors
    spare = standby_count(own.nodes)
    one = own.recovery.model_copy(update={"replicas": 1, "min_replicas": 1})
    alone = replace(own, standbys=0, quarantine=False, pool=spare, recovery=one)
    yield "restart in place, no standbys or replicas", alone, request.detectors
    yield "torchrun, requeued by the scheduler", replace(alone, restarting=Restarting.REQUEUE), frozenset()
