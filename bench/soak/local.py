"""Soak of two nodes, of this machine, over ssh or of Slurm: faults of every process; with `netns` of networks too."""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import statistics
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.runs.forked_starts import FORKABLE

from bench import leak_slopes
from bench.fault_outcomes import FaultOutcomes, RecordedSteps, fault_outcomes, recorded_steps
from bench.paired_stats import percentile, say, table
from bench.soak.faults import Fault, FaultRow, RunStuck, Watch, end, find_or_start
from bench.soak.ledger import SoakOutcome
from bench.soak.monarch_faults import kill_beside, killed_beside
from holdfast import api
from holdfast.events import (
    AnyEvent,
    FaultAction,
    FaultInjected,
    FaultRequested,
    FaultTarget,
    StepCommitted,
)
from holdfast.report.formatting import percentage
from holdfast.report.goodput import Account
from holdfast.report.run_status import RunPhase, RunStatus
from holdfast.report.status_reducer import update_status
from holdfast.run_dir import RunDir
from lab.slurm_cluster import slurm_cluster
from lab.slurm_conf import SlurmRelease
from lab.ssh_hosts import ssh_hosts

ROOT = Path(__file__).resolve().parents[2]
TORCH_FREE_TRAINER = ROOT / "tests" / "programs" / "torch_free_trainer.py"
QUICKSTART = ROOT / "examples" / "quickstart"
NODES = 2
CHECKPOINTS = "checkpoints"
BESIDE = "monarch-faults.txt"
"""Record of the faults of Monarch's processes, which the run's log does not have."""
SLURM = {
    "slurm": SlurmRelease.INSTALLED,
    "slurm-24.11": SlurmRelease.V24_11,
    "slurm-26.05": SlurmRelease.V26_05,
}
EVERY_S, TORCH_EVERY_S = 3.0, 25.0
SETTLED_S = 2.0
"""A step that begins this long after a fault was carried out has survived it: steps need all ranks."""
MOST_UNSTEPPED = 2
"""Faults without progress between them; a third equal one is a crash loop, which rightly ends a run."""

_KILL, _STOP, _PARTITION, _SKEW = FaultAction.KILL, FaultAction.STOP, FaultAction.PARTITION, FaultAction.CLOCK_SKEW
_RANK, _NODE, _AGENT, _CONTROLLER = FaultTarget.RANK, FaultTarget.NODE, FaultTarget.AGENT, FaultTarget.CONTROLLER

ROWS = (
    FaultRow(action=_KILL, target=_RANK, weight=30),
    FaultRow(action=_KILL, target=_NODE, weight=14),
    FaultRow(action=_KILL, target=_AGENT, weight=12),
    FaultRow(action=_KILL, target=_CONTROLLER, weight=16),
    FaultRow(action=_STOP, target=_RANK, weight=6),
    FaultRow(action=_STOP, target=_RANK, weight=6, for_s=(0.1, 4.0)),
    FaultRow(action=_STOP, target=_NODE, weight=5, for_s=(0.1, 5.0)),
    FaultRow(action=_STOP, target=_AGENT, weight=5, for_s=(0.1, 5.0)),
    FaultRow(action=_STOP, target=_CONTROLLER, weight=4, for_s=(0.1, 5.0)),
    FaultRow(action=_SKEW, target=_AGENT, weight=3, amount=(-7200.0, 7200.0)),
    FaultRow(action=_SKEW, target=_CONTROLLER, weight=3, amount=(-7200.0, 7200.0)),
    FaultRow(action=_STOP, target=_NODE, weight=1, slow=True),
    FaultRow(action=_STOP, target=_AGENT, weight=1, slow=True),
    FaultRow(action=_STOP, target=_CONTROLLER, weight=1, slow=True),
    FaultRow(action=_PARTITION, target=_NODE, weight=6, for_s=(0.2, 6.0), netns=True),
    FaultRow(action=_PARTITION, target=_NODE, weight=1, slow=True, netns=True),
)


class LocalWatch(Watch):
    """Allows two faults without progress, and knows when the run has outlived the last."""

    def __init__(self, run: RunDir) -> None:
        self.undone: set[float] = set()
        """Faults that were requested and not yet carried out, by request time."""
        self.unstepped = 0
        """Faults since the last step that was committed for the first time: done again up to the same step, a run has
        made no progress. Agents may report a step late that was done before the fault."""
        self.furthest = 0
        self.status = RunStatus()
        self.fault_at = self.step_at = 0.0
        """When the last fault was carried out, and when the last step began, on the run's clock."""
        self.fault_seen = self.step_seen = 0.0
        """When they were received: a controller that was stopped receives them late."""
        super().__init__(run)

    def take(self, event: AnyEvent) -> None:
        self.status = update_status(self.status, event)
        match event:
            case StepCommitted():
                self.step_at, self.step_seen = event.started, time.monotonic()
                if event.step > self.furthest and event.started > self.fault_at:
                    self.unstepped = len(self.undone)
                self.furthest = max(self.furthest, event.step)
            case FaultRequested():
                self.unstepped += 1
                if event.target is not _CONTROLLER:  # of two simultaneous ones, one is carried out
                    self.undone.add(event.at)
            case FaultInjected():
                self.undone.discard(event.requested_at)
                self.fault_at, self.fault_seen = event.at, time.monotonic()
            case _:
                pass

    def allows(self, fault: Fault) -> bool:
        return self.unstepped < MOST_UNSTEPPED

    @property
    def well(self) -> bool:
        """Whether everything is as before the first fault."""
        return not self.unstepped and not self.undone and self.status.phase is RunPhase.RUNNING

    @property
    def outlived(self) -> bool:
        """Whether all faults were carried out, and the last step began, and was received, long after the last."""
        times = ((self.step_at, self.fault_at), (self.step_seen, self.fault_seen))
        return self.well and all(step >= fault + SETTLED_S for step, fault in times)


def soak(options: argparse.Namespace, state: Path) -> SoakOutcome:
    """Soak, and print the outcome."""
    with contextlib.ExitStack() as stack:
        if options.target == "hosts":
            hosts = stack.enter_context(ssh_hosts(state / "hosts", "alpha", "beta", "gamma"))
            ssh = f"{{python: {sys.executable}, config: {hosts.config}}}"
            target = f"kind: hosts\nhosts: [{', '.join(hosts.names)}]\nssh: {ssh}\n"
        elif release := SLURM.get(options.target):
            cluster = stack.enter_context(slurm_cluster(state / "slurm", "n1", "n2", "n3", release=release))
            os.environ.update(cluster.environ)
            target = f"kind: slurm\nslurm: {{address: {cluster.address}, spares: 1, folder: {state / 'nodes'}}}\n"
        else:
            target = f"isolation: {'netns' if options.target == 'netns' else 'process'}\ncode: shipped\n"
        return _soak(options, state, target)


def _soak(options: argparse.Namespace, state: Path, target: str) -> SoakOutcome:
    netns, torch = options.target == "netns", options.torch
    settings = ("orchestrator=monarch",) if options.monarch else FORKABLE if options.forked else ()
    run = find_or_start(state, lambda: _start(state, target, settings, torch=torch))
    rows = [
        row
        for row in ROWS
        if (netns or not row.netns) and not (options.brisk and row.slow) and row.target != options.spare
    ]
    every_s = options.every_s or (TORCH_EVERY_S if torch else EVERY_S)
    kept = state / "samples.jsonl"
    stuck = ""
    if not api.is_finished(run):
        try:
            watch = LocalWatch(run)
            for _ in watch.inject(options.seed, options.faults, rows, every_s, NODES):
                if options.monarch:
                    kill_beside(run, options.seed, watch.faults, state / BESIDE)
                if watch.well:
                    leak_slopes.append_samples(kept, leak_slopes.samples(run, watch.faults))
            watch.wait(lambda: watch.outlived)
            leak_slopes.append_samples(kept, leak_slopes.samples(run, watch.faults))
        except RunStuck as error:
            stuck = str(error)
    left = end(run)
    notes: RecordedSteps = {} if torch else recorded_steps(state / CHECKPOINTS, NODES)
    summary = api.summary(run)
    came = fault_outcomes(api.events(run), summary, notes)
    found = outcome(came, summary.account, beside=killed_beside(state / BESIDE), stuck=stuck, left=left)
    _tell(found, came, summary.account, leak_slopes.load_samples(kept))
    for problem in (*filter(None, [stuck]), *left, *came.problems):
        say(f"\nFAILED: {problem}")
    return found


def _start(state: Path, target: str, own: Sequence[str], *, torch: bool) -> RunDir:
    targets = state / ".holdfast" / "targets"
    targets.mkdir(parents=True)
    (targets / "soak.yaml").write_text(target)
    checkpoints = f"checkpoint.path={state / CHECKPOINTS}"
    overrides = [f"nodes={NODES}", "recovery.max_restarts=1000000", "name=soak", checkpoints, *own]
    if torch:
        shutil.copy(QUICKSTART / "train.py", state)
        command = (sys.executable, "train.py")
        overrides += ["env={STEPS: 100000000}", "checkpoint.every_steps=10", "recovery.step_timeout_s=10"]
    else:
        shutil.copy(TORCH_FREE_TRAINER, state)
        command = (sys.executable, "torch_free_trainer.py", "100000000", "0.03")
        overrides += ["recovery.step_timeout_s=2"]
    return api.start(api.load_job(None, command=command, overrides=overrides), "soak", base=state.absolute())


def outcome(
    came: FaultOutcomes, account: Account, *, beside: Mapping[str, int], stuck: str, left: Sequence[str]
) -> SoakOutcome:
    """What came of a soak; `stuck` says how the run got stuck, empty if it did not, and `left` what it left."""
    return SoakOutcome(
        faults=Counter(came.requested) + Counter(beside),
        recoveries=sum(map(len, came.recovered_s.values())),
        failed=came.unrecovered + bool(stuck),
        wrong=len(came.problems) + len(left),
        steps=account.steps,
        minutes=round(account.total_s / 60, 1),
    )


def _tell(found: SoakOutcome, came: FaultOutcomes, account: Account, samples: Sequence[leak_slopes.Sample]) -> None:
    every = [second for seconds in came.recovered_s.values() for second in seconds]
    rows = [(code, str(len(seconds)), *_spread(seconds)) for code, seconds in sorted(came.recovered_s.items())]
    ettr = percentage(account.ettr) if account.ettr is not None else "-"
    kinds = ", ".join(f"{count} {kind}" for kind, count in Counter(found.faults).most_common())
    say("")
    say(f"{sum(found.faults.values())} faults in {found.minutes} min ({kinds})")
    say(f"recoveries {found.recoveries}, failed recoveries {found.failed}, ETTR {ettr}")
    doubled, left = len(came.problems), found.wrong - len(came.problems)
    say(f"steps {account.steps}, recomputed {account.recomputed_steps}, not exactly once {doubled}, left {left}")
    say("")
    say(
        table(("what failed", "recovered", "p50", "p99", "longest"), [*rows, ("all", str(len(every)), *_spread(every))])
    )
    say("")
    say(table(("who", "what", "first", "last", "slope per 100 faults", "processes"), _trend_rows(samples)))


def _spread(seconds: Sequence[float]) -> tuple[str, str, str]:
    if not seconds:
        return ("-", "-", "-")
    return (f"{statistics.median(seconds):.2f} s", f"{percentile(seconds, 99):.2f} s", f"{max(seconds):.2f} s")


def _trend_rows(samples: Sequence[leak_slopes.Sample]) -> list[tuple[str, ...]]:
    return [
        (
            trend.who,
            trend.what,
            f"{trend.first:.4g}",
            f"{trend.last:.4g}",
            "-" if trend.slope is None else f"{trend.slope:+.2f}",
            str(trend.processes),
        )
        for trend in leak_slopes.trends(samples)
    ]
