"""Predicted step times beside published ones, per source, and the time of the search.

.venv/bin/python -m bench.plan_accuracy [--all] [--fit] [--runs FILE] [--json FILE]

The planner's constants are fitted on a part of the published runs (bench/plan_fit.py); the errors are of the others. A
run is held out if its source is in `WHOLLY_HELD_OUT`, or if the first byte of the SHA-256 of its source, model and
hardware is even: no model on the same hardware of the same source is on both sides. Published runs of one
configuration differ too; that is printed with the errors. `--all` lists every run. `--fit`
fits again and shows by what factor each constant would change. `--runs` compares other runs, in the same format, all of
which count as held out.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import median, quantiles

from msgspec.structs import replace

from bench.paired_stats import table
from bench.plan_fit import error, fit
from bench.published_runs import FILE, PublishedRun, read_runs, repeats
from bench.result_file import absolute, save
from holdfast.plan.hardware import MACHINES
from holdfast.plan.model_catalog import MODELS
from holdfast.plan.search import search
from holdfast.plan.step_time import Workload

MEAN_GOAL, MAX_GOAL, SEARCH_GOAL_S = 6.0, 15.0, 5.0
Errors = list[tuple[PublishedRun, float]]
"""Runs with their relative errors."""


def main() -> None:
    """Compare, print, and write the results."""
    parser = argparse.ArgumentParser(prog="bench.plan_accuracy", description=__doc__)
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--fit", action="store_true")
    parser.add_argument("--runs", type=Path, default=FILE)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    runs, left_out = read_runs(args.runs)
    if args.fit:
        factors = fit([run for run in runs if not run.is_held_out])
        print(table(("constant", "factor"), [(each.name, f"{factor:.3f}") for each, factor in factors.items()]), "\n")
    errors = [(run, error(run, {})) for run in runs]
    if args.all:
        rows = [_run_row(run, wrong) for run, wrong in sorted(errors, key=lambda each: each[1])]
        print(table(("id", "source", "model", "machine", "layout", "published s", "error", "part"), rows), "\n")
    held = [each for each in errors if each[0].is_held_out]
    print(table(("source", "fitted", "held out", "mean error", "max", "bias"), _source_rows(errors)))
    print("\nleft out:")
    for why, count in Counter(each.why for each in left_out).most_common():
        print(f"  {count:3d}  {why}")
    _print_repeats(repeats(args.runs))
    search_s = _search_s()
    print(f"\nsearch of all layouts of Llama 3 405B on 16,384 GPUs: {search_s:.2f} s")
    sources = len({run.group for run, _ in held})
    dense = [each for each in held if not each[0].load.model.mixture_layers]
    conditions = f"{len(held)} published runs of {sources} sources, held out from the fit; {len(dense)} of dense models"
    save(
        args.json,
        "Accuracy of holdfast plan",
        [
            replace(
                absolute("predicted step times: mean error", _mean(held), "%", goal=MEAN_GOAL), conditions=conditions
            ),
            replace(
                absolute("predicted step times: largest", _largest(held), "%", goal=MAX_GOAL), conditions=conditions
            ),
            replace(absolute("dense models: mean error", _mean(dense), "%", goal=MEAN_GOAL), conditions=conditions),
            absolute("search of all layouts, Llama 3 405B on 16,384 GPUs", search_s, "s", goal=SEARCH_GOAL_S),
        ],
    )


def _print_repeats(differences: Sequence[float]) -> None:
    if len(differences) > 1:
        typical, most = median(differences), quantiles(differences, n=10)[-1]
        print(f"\n{len(differences)} pairs of published runs of one configuration differ by {typical:.1%} (median),")
        print(f"nine in ten by at most {most:.1%}, and at most by {max(differences):.0%}")


def _run_row(run: PublishedRun, wrong: float) -> tuple[str, ...]:
    part = "held out" if run.is_held_out else "fitted"
    layout = f"{run.layout}, {run.layout.recompute}"
    name = run.load.model.name
    return str(run.id), run.group, name, run.machine.name, layout, f"{run.step_s:.2f}", f"{wrong:+.1%}", part


def _source_rows(errors: Errors) -> list[tuple[str, ...]]:
    kinds: dict[str, Errors] = defaultdict(list)
    for run, wrong in errors:
        kind = "mixtures" if run.load.model.mixture_layers else "dense"
        kinds[f"{run.group}, {run.machine.gpu.name}, {kind}"].append((run, wrong))
    rows = [_row(name, kinds[name]) for name in sorted(kinds)]
    return [
        *rows,
        _row("all dense", [each for each in errors if not each[0].load.model.mixture_layers]),
        _row("all", errors),
    ]


def _row(name: str, errors: Errors) -> tuple[str, ...]:
    held = [each for each in errors if each[0].is_held_out]
    counts = (name, str(len(errors) - len(held)), str(len(held)))
    if not held:
        return (*counts, "", "", "")
    bias = 100 * sum(wrong for _, wrong in held) / len(held)
    return (*counts, f"{_mean(held):.1f} %", f"{_largest(held):.1f} %", f"{bias:+.1f} %")


def _mean(errors: Sequence[tuple[PublishedRun, float]]) -> float:
    return 100 * sum(abs(wrong) for _, wrong in errors) / len(errors)


def _largest(errors: Sequence[tuple[PublishedRun, float]]) -> float:
    return 100 * max(abs(wrong) for _, wrong in errors)


def _search_s() -> float:
    load = Workload(model=MODELS["llama-3-405b"], length=8192, batch=2048)
    begin = time.perf_counter()
    search(load, MACHINES["h100-roce"], 16_384)
    return time.perf_counter() - begin


if __name__ == "__main__":
    main()
