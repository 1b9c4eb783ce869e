"""Soak of a training with torch on three nodes: each kind of fault of docs/drills.md in turn, in rounds.

A round is one run with one fault of each kind in `ROWS`, in an order drawn from the seed, each at its step. It passes
when every fault was injected, each failure was recovered from, nothing is left, and every step that was kept has the
digests (of samples, random state, weights, optimizer) of a run of the same steps without faults. Nodes are network
namespaces, so it needs root; the disks that faults fill are small ones, mounted for the soak.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import NamedTuple

from bench.fault_outcomes import fault_outcomes
from bench.paired_stats import percentile, say, table
from bench.soak.faults import end
from bench.soak.ledger import SoakOutcome
from holdfast import api
from holdfast.accept.restart_check import first_difference
from holdfast.cli.event_text import event_line
from holdfast.events import (
    CheckpointCommitted,
    FaultAction,
    FaultInjected,
    FaultRequested,
    FaultTarget,
    Outcome,
    StepCommitted,
)
from holdfast.report.formatting import percentage
from holdfast.run_dir import RunDir

NODES = 3
"""With three, a comparison shows which rank computes wrongly."""
FIRST_STEP, APART = 20, 40
"""Step of the first fault, and steps between two."""
PACE_S = 0.05
DISK = "256m"
ROUND_S = 3600.0
"""A run that lasts longer makes no progress."""
FAILED = "failed-run"
"""Folder to which a run that went wrong is copied from its small disk, with `--state`."""


class Kind(NamedTuple):
    """A kind of fault; without `for_s` it is permanent."""

    action: FaultAction
    target: FaultTarget
    for_s: float | None = None
    amount: float | None = None


ROWS = (
    Kind(FaultAction.KILL, FaultTarget.RANK),
    Kind(FaultAction.KILL, FaultTarget.NODE),
    Kind(FaultAction.KILL, FaultTarget.AGENT),
    Kind(FaultAction.KILL, FaultTarget.CONTROLLER),
    Kind(FaultAction.STOP, FaultTarget.RANK),
    Kind(FaultAction.STOP, FaultTarget.NODE, for_s=3.0),
    Kind(FaultAction.STOP, FaultTarget.AGENT, for_s=3.0),
    Kind(FaultAction.STOP, FaultTarget.CONTROLLER, for_s=3.0),
    Kind(FaultAction.PARTITION, FaultTarget.NODE, for_s=3.0),
    Kind(FaultAction.CLOCK_SKEW, FaultTarget.AGENT, amount=3600.0),
    Kind(FaultAction.CLOCK_SKEW, FaultTarget.CONTROLLER, amount=-3600.0),
    Kind(FaultAction.FILL, FaultTarget.RUN_DIR, for_s=3.0),
    Kind(FaultAction.FILL, FaultTarget.CHECKPOINTS, for_s=3.0),
    Kind(FaultAction.RAISE, FaultTarget.RANK),
    Kind(FaultAction.HANG, FaultTarget.RANK),
    Kind(FaultAction.HANG, FaultTarget.COLLECTIVE),
    Kind(FaultAction.NAN, FaultTarget.LOSS),
    Kind(FaultAction.NAN, FaultTarget.GRADIENT),
    Kind(FaultAction.SPIKE, FaultTarget.LOSS, amount=1000.0),
    Kind(FaultAction.SPIKE, FaultTarget.GRADIENT, amount=1000.0),
    Kind(FaultAction.BITFLIP, FaultTarget.WEIGHTS),
    Kind(FaultAction.BITFLIP, FaultTarget.OPTIMIZER),
    Kind(FaultAction.BITFLIP, FaultTarget.GRADIENT),
    Kind(FaultAction.BITFLIP, FaultTarget.ACTIVATIONS),
    Kind(FaultAction.FAIL, FaultTarget.GPU),
    Kind(FaultAction.ECC_ERROR, FaultTarget.GPU),
    Kind(FaultAction.FAIL, FaultTarget.NVLINK),
    Kind(FaultAction.FAIL, FaultTarget.NIC),
    Kind(FaultAction.THROTTLE, FaultTarget.GPU, for_s=3.0),
    Kind(FaultAction.LINK_ERRORS, FaultTarget.NIC, for_s=3.0),
    Kind(FaultAction.SLOW, FaultTarget.NODE, for_s=3.0, amount=3.0),
    Kind(FaultAction.SLOW, FaultTarget.DATA, for_s=3.0, amount=1.5),
    Kind(FaultAction.SLOW, FaultTarget.FORWARD, for_s=3.0, amount=1.5),
    Kind(FaultAction.SLOW, FaultTarget.BACKWARD, for_s=3.0, amount=1.5),
    Kind(FaultAction.SLOW, FaultTarget.OPTIMIZER, for_s=3.0, amount=1.5),
    Kind(FaultAction.SLOW, FaultTarget.COMMUNICATION, for_s=3.0, amount=1.5),
    Kind(FaultAction.SLOW, FaultTarget.HOST, for_s=3.0, amount=1.5),
    Kind(FaultAction.DATA_STALL, FaultTarget.RANK, for_s=3.0, amount=0.2),
    Kind(FaultAction.OOM, FaultTarget.NODE),
    Kind(FaultAction.LEAK, FaultTarget.RANK, amount=250.0),
    Kind(FaultAction.REMOVE, FaultTarget.NODE),
)
"""All kinds of the catalogue but two: the lighthouse's needs replicas (`--target replicas`), and `restore`, without a
step, follows `remove`."""
MACHINES = 24
"""Enough for the nodes, the machine that is removed, and those that are quarantined for a device that fails."""


def soak(options: argparse.Namespace, state: Path) -> SoakOutcome:
    """Soak round by round, and print the outcome."""
    if any(state.iterdir()):
        raise SystemExit(f"{state} has a soak already: a round is one run from start to end, and does not resume")
    rounds = -(-options.faults // len(ROWS))
    steps = FIRST_STEP + APART * (len(ROWS) + 1)
    with _small_disks(state, ("reference", *map(str, range(rounds)))):
        say(f"{steps} steps without faults")
        reference = _run(state / "reference", steps, pace_s=0.0)
        expected = _steps(reference)
        if not expected or expected[-1].step != steps or "digest_result" not in expected[-1].metrics:
            shutil.copytree(reference.path, state / "reference" / FAILED)
            raise SystemExit(f"the run without faults failed: {state / 'reference' / FAILED}")
        found = [_round(state / str(number), steps, options.seed + number, expected) for number in range(rounds)]
    faults = Counter[str]()
    for each in found:
        faults.update(each.faults)
    return SoakOutcome(
        faults=faults,
        recoveries=sum(each.recoveries for each in found),
        failed=sum(each.failed for each in found),
        wrong=sum(each.wrong for each in found),
        steps=sum(each.steps for each in found),
        minutes=round(sum(each.minutes for each in found), 1),
    )


def plan(seed: int) -> list[FaultRequested]:
    """One fault of each kind, in random order, each at its step and on a random rank or node."""
    chance = random.Random(seed)
    rows = chance.sample(ROWS, len(ROWS))
    return [
        FaultRequested(
            at=time.time(),
            target=row.target,
            action=row.action,
            index=chance.randrange(NODES) if row.target.is_numbered else 0,
            at_step=FIRST_STEP + APART * number + chance.randrange(APART // 2),
            for_s=row.for_s,
            amount=row.amount,
        )
        for number, row in enumerate(rows)
    ]


def _round(base: Path, steps: int, seed: int, expected: Sequence[StepCommitted]) -> SoakOutcome:
    planned = plan(seed)
    run = _run(base, steps, pace_s=PACE_S, faults=planned)
    left = end(run)
    events, summary = api.events(run), api.summary(run)
    came = fault_outcomes(events, summary, {})
    injected = len({event.requested_at for event in events if isinstance(event, FaultInjected)})
    succeeded = summary.outcome is Outcome.SUCCEEDED
    problems = [*came.problems, *left]
    if not succeeded:
        problems.append(f"the run did not succeed: {summary.reason}")
    if injected < len(planned):
        problems.append(f"{len(planned) - injected} of {len(planned)} faults were not injected")
    if (different := first_difference(expected, _steps(run)) if succeeded else None) is not None:
        problems.append(f"step {different.step} of attempt {different.attempt} differs: {different.lost}")
    every = [second for seconds in came.recovered_s.values() for second in seconds]
    spread = [f"{percentile(every, each):.2f} s" for each in (50, 100)] if every else ["-", "-"]
    ettr = percentage(summary.account.ettr) if summary.account.ettr is not None else "-"
    head = ("seed", "faults", "recoveries", "p50", "longest", "steps", "recomputed", "ETTR", "digests")
    figures = (str(came.faults), str(len(every)), *spread, str(summary.account.steps))
    equal = "DIFFER" if different else "equal" if succeeded else "-"
    say(table(head, [(str(seed), *figures, str(summary.account.recomputed_steps), ettr, equal)]))
    for problem in problems:
        say(f"FAILED: {problem}")
    if problems:
        shutil.copytree(run.path, base / FAILED, ignore=shutil.ignore_patterns("*.sock"))
        say("\n".join(event_line(each) for each in events if not isinstance(each, StepCommitted | CheckpointCommitted)))
    return SoakOutcome(
        faults=came.requested,
        recoveries=len(every),
        failed=came.unrecovered + (not succeeded),
        wrong=len(problems) - (not succeeded),
        steps=summary.account.steps,
        minutes=round(summary.account.total_s / 60, 1),
    )


def _run(base: Path, steps: int, *, pace_s: float, faults: Sequence[FaultRequested] = ()) -> RunDir:
    """A run from start to end, with these faults."""
    targets = base / ".holdfast" / "targets"
    targets.mkdir(parents=True)
    (targets / "soak.yaml").write_text(f"isolation: netns\ncapacity: {MACHINES}\n")
    os.environ["HOLDFAST_HOME"] = str(base / "home")
    command = (
        *(sys.executable, "-m", "holdfast.train.acceptance_program"),
        *("--compare", "--steps", str(steps), "--pace", str(pace_s)),
    )
    overrides = (
        "name=soak",
        f"nodes={NODES}",
        "env={OMP_NUM_THREADS: '1'}",
        "resources.memory=3GiB",
        f"checkpoint={{path: {base / 'checkpoints'}, every_steps: 10}}",
        "recovery={max_restarts: 1000, step_timeout_s: 5, verify_every_steps: 10}",
        "watch.spikes=act",
    )
    run = api.start(api.load_job(None, command=command, overrides=overrides), "soak", base=base)
    try:
        if faults:
            api.inject_faults(run, faults)
        ends_at = time.monotonic() + ROUND_S
        removals: dict[float, int] = {}
        for event in api.follow(run):
            if isinstance(event, FaultRequested) and event.action is FaultAction.REMOVE:
                removals[event.at] = event.index
            elif isinstance(event, FaultInjected) and (node := removals.pop(event.requested_at, None)) is not None:
                api.inject_fault(run, target=FaultTarget.NODE, index=node, action=FaultAction.RESTORE)
            if time.monotonic() > ends_at:
                break
    except BaseException:
        end(run)
        raise
    return run


def _steps(run: RunDir) -> list[StepCommitted]:
    return [event for event in api.events(run) if isinstance(event, StepCommitted)]


@contextlib.contextmanager
def _small_disks(state: Path, names: Sequence[str]) -> Generator[None]:
    """Each run's folder and its checkpoints on separate small disks, which faults fill."""
    with contextlib.ExitStack() as stack:
        for name in names:
            for disk in (state / name / "home", state / name / "checkpoints"):
                disk.mkdir(parents=True)
                subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK}", "none", disk], check=True)
                stack.callback(subprocess.run, ["umount", "--lazy", disk], check=True)
        yield
