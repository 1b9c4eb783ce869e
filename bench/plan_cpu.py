"""Compares predicted step times of small trainings on CPUs with measured ones, on 1, 2 and 4 ranks.

.venv/bin/python -m bench.plan_cpu [--ranks N ...] [--rounds N] [--burn-in SECONDS] [--json FILE]

In each round and for each number of ranks the probes of `holdfast check --full` measure this machine, and decoders
train with Gloo right after: both with as many processes, and threads per process, as `holdfast run` would start. The
prediction is that of `holdfast plan --machine cpu --calibration`. Nothing of the trainings is used to predict them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from msgspec.structs import replace

from bench.paired_stats import say, table
from bench.plan_cpu_rank import CASES, Case
from bench.replica_program import free_port
from bench.result_file import Figure, Result, command, save, today
from holdfast.plan.hardware import CPU
from holdfast.plan.layout import Layout
from holdfast.plan.request import find_machine
from holdfast.plan.step_time import SOFTWARE, Precision, Workload, step_time
from holdfast.plan.transformer import from_config

RANKS, ROUNDS, BURN_IN_S = (1, 2, 4), 5, 5.0
PROBE = ("-m", "holdfast.train.probe", "--backend=gloo", "--deadline-s=600", f"--most-bytes={1 << 26}")
GOAL = 0.10
Times = dict[tuple[str, int], list[float]]
"""Seconds of a step in each round, by case and number of ranks."""


def main() -> None:
    """Measure, print, and write the results."""
    parser = argparse.ArgumentParser(prog="bench.plan_cpu", description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--burn-in", type=float, default=BURN_IN_S)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    predicted, measured = measure(args.ranks, args.rounds, args.burn_in)
    rows = [_row(*key, predicted[key], times) for key, times in measured.items()]
    say(table(("training", "ranks", "predicted s", "measured s", "error", "noise floor"), rows))
    save(args.json, "Predicted steps on CPUs", [_result(predicted, measured)])


def _row(name: str, ranks: int, predicted: Sequence[float], measured: Sequence[float]) -> tuple[str, ...]:
    seconds = f"{median(predicted):.3f}", f"{median(measured):.3f}"
    return name, str(ranks), *seconds, f"{error(predicted, measured):+.1%}", f"{floor(measured):.1%}"


def measure(ranks: Sequence[int], rounds: int, burn_in_s: float) -> tuple[Times, Times]:
    """Predicted and measured step times."""
    predicted, measured = (
        defaultdict[tuple[str, int], list[float]](list),
        defaultdict[tuple[str, int], list[float]](list),
    )
    for _ in range(rounds):
        for count in ranks:
            calibration = {"probe": json.loads(_last_line([*PROBE, f"--burn-in-s={burn_in_s:g}"], count))}
            measured_now = json.loads(_last_line(["-m", "bench.plan_cpu_rank"], count))
            for case in CASES:
                if case.name in measured_now:
                    predicted[case.name, count].append(predict(case, count, calibration))
                    measured[case.name, count].append(measured_now[case.name])
    return predicted, measured


def predict(case: Case, ranks: int, calibration: object) -> float:
    """Seconds of a step, from nothing but the sizes of the training and the calibration."""
    model = from_config(case.config, case.name)
    assert model is not None
    load = Workload(
        model=model,
        length=case.length,
        batch=ranks * case.sequences,
        precision=Precision.FP32,
        software=SOFTWARE["eager"],
    )
    layout = Layout(dp=ranks, micro_batch=case.sequences, sharding=case.sharding)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "rates.json"
        path.write_text(json.dumps(calibration))
        return step_time(load, layout, find_machine(CPU, path)).total


def error(predicted: Sequence[float], measured: Sequence[float]) -> float:
    """Median of the predictions over that of the measured times, less one."""
    return median(predicted) / median(measured) - 1


def floor(measured: Sequence[float]) -> float:
    """Median relative difference of two successive rounds: what no prediction can be better than."""
    return median([abs(after / before - 1) for before, after in pairwise(measured)] or [0.0])


def _result(predicted: Times, measured: Times) -> Result:
    errors = {key: error(predicted[key], times) for key, times in measured.items()}
    worst = max(map(abs, errors.values()))
    return replace(
        Result(
            claim="predicted steps on CPUs: largest error",
            command=command(),
            date=today(),
            figure=Figure(value=100 * worst, unit="%", decimals=1),
            floor=Figure(value=100 * max(map(floor, measured.values())), unit="%", decimals=1),
            goal=f"≤ {100 * GOAL:g} %",
            met="yes" if worst <= GOAL else "no",
            conditions="Gloo; calibrated by the probes of holdfast check, between the trainings",
            headline=worst > GOAL,
        ),
        details={f"{name}, {ranks} ranks": f"{wrong:+.1%}" for (name, ranks), wrong in errors.items()},
    )


def _last_line(arguments: Sequence[str], ranks: int) -> str:
    """Start a module once per rank, as an agent does, and return the last line that rank 0 prints."""
    threads = max(1, (os.cpu_count() or 1) // ranks)
    shared = {
        "OMP_NUM_THREADS": str(threads),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    started = [
        subprocess.Popen(
            [sys.executable, *arguments],
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    outputs = [each.communicate()[0] for each in started]
    failed = [each.returncode for each in started if each.returncode]
    if failed:
        sys.exit(f"{' '.join(arguments)}: a rank ended with {failed[0]}\n{outputs[0][-2000:]}")
    return outputs[0].splitlines()[-1]


if __name__ == "__main__":
    main()
