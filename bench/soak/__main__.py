"""Soak: one real run with random faults, up to a given number; then its outcome.

.venv/bin/python -m bench.soak [--faults N]
    [--target local|netns|hosts|slurm|slurm-24.11|slurm-26.05|replicas|training|kubernetes]
    [--seed N] [--every-s MEAN] [--state FOLDER] [--brisk] [--spare FAULT_TARGET] [--torch]
    [--replicas N] [--forked] [--monarch] [--ledger]

Faults come at exponentially distributed times, drawn from the seed, in any state of the run: also in the first step,
during a recovery, two together. Only a fault after several others without a committed step in between is delayed: equal
failures without progress are a crash loop, which rightly ends a run. On Kubernetes (the lab), and in a training with
torch (`training`: each kind of fault once a round), they come at given steps.
With `--state` it can be interrupted: the same command continues with the same run (not with `training`). It fails when
a recovery fails, a step is lost or anything is left at the end; locally it prints the trend of descriptors, threads,
memory and files.
With `--ledger` its outcome becomes a line of bench/soak/ledger.jsonl; `python -m bench.soak.ledger` prints the totals.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import signal
import sys
import tempfile
from pathlib import Path

from tests.runs.forked_starts import ForkedStarts

from bench.paired_stats import headline, say
from bench.soak import ledger
from holdfast.errors import ExitCode
from holdfast.events import FaultTarget

TARGETS = {
    "local": ("local", 500),
    "netns": ("local", 500),
    "hosts": ("local", 50),
    "slurm": ("local", 50),
    "slurm-24.11": ("local", 50),
    "slurm-26.05": ("local", 50),
    "replicas": ("replicas", 500),
    "training": ("training", 41),
    "kubernetes": ("kubernetes", 20),
}
"""The module of each target, and its faults by default."""


def main() -> int:
    """Soak, and return nonzero unless all went well."""
    parser = argparse.ArgumentParser(
        prog="bench.soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", choices=TARGETS, default="local", help="hosts: over ssh")
    parser.add_argument("--faults", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every-s", type=float, help="mean seconds between faults")
    parser.add_argument("--ledger", action="store_true", help="add the outcome to bench/soak/ledger.jsonl")
    parser.add_argument("--state", type=Path, help="directory for all state, to resume from")
    local = parser.add_argument_group("local, netns, hosts, slurm")
    local.add_argument("--brisk", action="store_true", help="no faults whose recovery takes tens of seconds by design")
    local.add_argument(
        "--spare", choices=list(FaultTarget), help="no faults of this target: one incarnation to observe leaks"
    )
    local.add_argument(
        "--torch", action="store_true", help="run the quickstart's Llama instead of a program without torch"
    )
    local.add_argument("--monarch", action="store_true", help="Monarch places the agents, and its processes die too")
    parser.add_argument("--forked", action="store_true", help="local, replicas: fork processes, without their imports")
    parser.add_argument("--replicas", type=int, default=2, help="replicas: how many, of one rank each")
    options = parser.parse_args()
    module, faults = TARGETS[options.target]
    options.faults = options.faults or faults
    place = options.target + " with Monarch" * options.monarch
    headline(f"soak on {place}: {options.faults} random faults, seed {options.seed}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # cleans up, as at Ctrl-C
    with contextlib.ExitStack() as stack:
        state = options.state or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="soak-")))
        state.mkdir(parents=True, exist_ok=True)
        if options.forked:
            starts = stack.enter_context(contextlib.closing(ForkedStarts()))
            stack.enter_context(starts.used())
        try:
            outcome = importlib.import_module(f"bench.soak.{module}").soak(options, state.absolute())
        except KeyboardInterrupt:
            say("\ninterrupted" + ("; the same command resumes it" if options.state and module != "training" else ""))
            return ExitCode.CANCELLED
        if options.ledger:
            ledger.add(outcome, target=options.target, seed=options.seed, options=_further(options))
        return outcome.exit_code


def _further(options: argparse.Namespace) -> str:
    """The options that change what the soak shows."""
    words = ["--brisk"] * options.brisk + ["--torch"] * options.torch
    words += ["--forked"] * options.forked + ["--monarch"] * options.monarch
    words += ["--spare", options.spare] if options.spare else []
    words += ["--every-s", f"{options.every_s:g}"] if options.every_s else []
    words += ["--replicas", str(options.replicas)] if options.target == "replicas" else []
    return " ".join(words)


if __name__ == "__main__":
    sys.exit(main())
