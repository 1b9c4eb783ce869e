"""What each feature buys at 16,384 GPUs, and how long a simulated run of 100,000 GPUs takes.

.venv/bin/python -m bench.plan_reliability [--seeds N]

Each row has what the row before has. All meet the same faults: Llama 3's rate, plan/fault_table.py. No part of it was
run: it is arithmetic over these inputs.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import msgspec
from msgspec.structs import replace

from bench import result_file
from bench.paired_stats import headline, say, table
from holdfast.failure_rates import DAY_S, FAILURE_RATES, standby_count
from holdfast.job.spec import Recovery
from holdfast.plan.fault_table import DETECTORS, FANOUT_S, GPUS_PER_NODE, NODES, SMALL_RESTART, causes, failure_scale
from holdfast.plan.fault_table import fleet as fleet_of
from holdfast.plan.reliability import Fleet, Restarting, Trial, simulate
from holdfast.plan.reliability_plan import MeanShare, mean_share

SEEDS = 30
DAYS = 30.0
REPLICAS = 8
LONG_INTERVAL = 8.0
"""Checkpoint interval of the last rows, over Young's: replicas hold the state, so few failures need a checkpoint."""
RATES = {each.fleet: each.per_1000_node_days for each in FAILURE_RATES if each.fleet in ("Llama 3", "RSC-1")}
SCALES, SCALE_SEEDS = (1_024, 4_096, 16_384, 65_536), 10
"""Numbers of GPUs at which runs are compared."""
COMPARED = (0, 1, 3, 4, -2)
"""Rows of that comparison."""
LARGE_GPUS, LARGE_DAYS, LARGE_TRIALS = 100_000, 90.0, 5


@dataclass(frozen=True)
class Row:
    """A run with certain features."""

    name: str
    fleet: Fleet
    detectors: frozenset[str] = DETECTORS


def rows(nodes: int = NODES) -> Iterator[Row]:
    """The features, each in addition to those before."""
    whole = fleet_of(nodes=nodes, scale=nodes / NODES)
    fleet = replace(whole, restarting=Restarting.PERSON, standbys=0, quarantine=False, pool=standby_count(nodes))
    yield Row("a person restarts", fleet, frozenset())
    fleet = replace(fleet, restarting=Restarting.REQUEUE)
    yield Row("torchrun, and the scheduler requeues", fleet, frozenset())
    yield Row("+ detection by Watch", fleet)
    fleet = replace(fleet, restarting=Restarting.POLICY)
    yield Row("+ restart in place by the policy", fleet)
    fleet = replace(fleet, standbys=standby_count(nodes))
    yield Row(f"+ {fleet.standbys} standbys", fleet)
    fleet = replace(fleet, recovery=Recovery(replicas=REPLICAS))
    yield Row(f"+ {REPLICAS} replicas", fleet)
    fleet = replace(fleet, quarantine=True)
    yield Row("+ quarantine", fleet)
    fleet = replace(fleet, checkpoint_every_s=fleet.checkpoint_every_s * LONG_INTERVAL)
    yield Row(f"+ checkpoints {LONG_INTERVAL:g} times as rarely", fleet)
    yield Row("the same, restart as measured on 2 nodes", replace(fleet, restart_s=SMALL_RESTART.seconds + FANOUT_S))


def runs(row: Row, seeds: int) -> list[Trial]:
    """The month once for each seed."""
    every = causes(scale=row.fleet.nodes / NODES)
    return [simulate(row.fleet, every, row.detectors, total_s=DAYS * DAY_S, seed=seed) for seed in range(seeds)]


def large_trials(fleet_rate: float) -> list[float]:
    """Seconds of a trial of 100,000 GPUs for 90 days."""
    nodes = LARGE_GPUS // GPUS_PER_NODE
    scale = failure_scale(nodes, fleet_rate)
    every, fleet = causes(scale=scale), fleet_of(nodes=nodes, scale=scale)
    found: list[float] = []
    for seed in range(LARGE_TRIALS):
        began = time.process_time()
        simulate(fleet, every, DETECTORS, total_s=LARGE_DAYS * DAY_S, seed=seed)
        found.append(time.process_time() - began)
    return found


def main() -> None:
    """Simulate all rows, and print tables."""
    parser = argparse.ArgumentParser(prog="bench.plan_reliability", description=__doc__)
    parser.add_argument("--seeds", type=int, default=SEEDS, help="number of simulated months")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args()
    seeds: int = options.seeds
    headline(f"{NODES * GPUS_PER_NODE:,} GPUs, {DAYS:g} days, {seeds} seeds")
    shares: dict[str, MeanShare] = {}
    lines: list[tuple[str, str, str, str]] = []
    for row in rows():
        found = runs(row, seeds)
        share = mean_share([trial.ettr for trial in found])
        gained = share.mean - [*shares.values()][-1].mean if shares else 0.0
        lost = fmean(trial.total_s - trial.kept_s for trial in found) / 3600 * NODES * GPUS_PER_NODE
        lines.append((row.name, str(_figure(share)), f"{100 * gained:+.2f}" if shares else "", f"{lost:,.0f}"))
        shares[row.name] = share
    say(table(("run", "ETTR", "points", "GPU-hours lost"), lines))
    scales = by_scale()
    compared = [[row.name for row in rows()][place] for place in COMPARED]
    say("")
    say(table(("GPUs", *compared), [
        (f"{gpus:,}", *(f"{share:.1%}" for share in found)) for gpus, found in scales.items()
    ]))  # fmt: skip
    speed = {rate: large_trials(rate) for rate in RATES.values()}
    say(f"\n{LARGE_GPUS:,} GPUs, {LARGE_DAYS:g} days: " + "; ".join(
        f"{fmean(each):.2f} s of CPU a trial at {rate:g} failures per 1,000 node-days" for rate, each in speed.items()
    ))  # fmt: skip
    names = [*shares]
    conditions = f"{seeds} seeds; simulated, with the real policy; inputs in plan/fault_table.py"
    result_file.save(options.json, "What each feature buys", [
        result_file.Result(
            claim=f"simulated month of {NODES * GPUS_PER_NODE:,} GPUs, published failure rates: ETTR with all features",
            command=result_file.command(),
            date=result_file.today(),
            figure=_figure(shares[names[-2]]),
            peer=result_file.Peer(name=names[1], figure=_figure(shares[names[1]])),
            goal="≥ 99 %",
            met="yes" if shares[names[-2]].mean >= 0.99 else "no",
            conditions=conditions,
            details={name: str(_figure(share)) for name, share in shares.items()}
            | {
                f"{name}, {gpus:,} GPUs": f"{share:.1%}"
                for gpus, found in scales.items()
                for name, share in zip(compared, found, strict=True)
            },
            headline=True,
        ),
        *(_speed(fleet, fmean(speed[rate])) for fleet, rate in RATES.items()),
    ])  # fmt: skip


def by_scale() -> dict[int, tuple[float, ...]]:
    """ETTR of the compared rows, by number of GPUs."""
    found: dict[int, tuple[float, ...]] = {}
    for gpus in SCALES:
        every = [*rows(gpus // GPUS_PER_NODE)]
        found[gpus] = tuple(fmean(trial.ettr for trial in runs(every[row], SCALE_SEEDS)) for row in COMPARED)
    return found


def _speed(fleet: str, seconds: float) -> result_file.Result:
    claim = f"a simulated run of {LARGE_GPUS:,} GPUs for {LARGE_DAYS:g} days, failure rate of {fleet}: CPU time"
    result = result_file.absolute(claim, seconds, "s", goal=1.0)
    return msgspec.structs.replace(result, headline=result.met == "no")


def _figure(share: MeanShare) -> result_file.Figure:
    mean, low, high = (100 * each for each in (share.mean, share.low, share.high))
    return result_file.Figure(value=mean, low=low, high=high, unit="%", decimals=2)


if __name__ == "__main__":
    main()
