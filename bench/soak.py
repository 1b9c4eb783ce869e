"""Soak: one real run with random faults, up to a given number; then its outcome.

.venv/bin/python -m bench.soak [--faults N] [--seed N] [--every-s MEAN] [--state FOLDER]
    [--netns] [--brisk] [--spare TARGET] [--torch]

Faults come at exponentially distributed times, drawn from the seed, in any state of the run: also in the first step,
during a recovery, two together. Only the third fault without a committed step in between is delayed, because three
equal failures without progress are a crash loop, which rightly ends a run. With `--state` it can be interrupted: the
same command continues with the same run. It fails when a recovery fails, a step is lost or a process or file is left at
the end; for descriptors, threads, memory and files it prints the trend.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench import leak_slopes
from bench.fault_outcomes import fault_outcomes, recorded_steps
from bench.paired_stats import headline, percentile, say, table
from holdfast import api
from holdfast.cli.event_text import event_line
from holdfast.errors import HoldfastError
from holdfast.events import (
    AnyEvent,
    CheckpointCommitted,
    FaultAction,
    FaultInjected,
    FaultRequested,
    FaultTarget,
    RunFinished,
    StepCommitted,
)
from holdfast.events.log import EventReader
from holdfast.report.formatting import percentage
from holdfast.report.run_status import RunPhase, RunStatus
from holdfast.report.status_reducer import update_status
from holdfast.run_dir import RunDir

ROOT = Path(__file__).resolve().parents[1]
TORCH_FREE_TRAINER = ROOT / "tests" / "programs" / "torch_free_trainer.py"
QUICKSTART = ROOT / "examples" / "quickstart"
NODES = 2
FAULTS = 500
EVERY_S, TORCH_EVERY_S = 3.0, 25.0
BEAT_S = 0.02
STUCK_S = 180.0
"""No step for this long after the last fault is a failed recovery."""
SETTLED_S = 2.0
"""A step that begins this long after a fault was carried out has survived it: steps need all ranks."""
MOST_UNSTEPPED = 2
"""Faults without a committed step between them."""
SHOWN = 25
"""Events that are shown when the run is stuck."""


@dataclass(frozen=True, kw_only=True)
class FaultRow:
    """A kind of fault, its weight, and its duration; without times it is permanent."""

    action: FaultAction
    target: FaultTarget
    weight: int
    for_s: tuple[float, float] | None = None
    amount: tuple[float, float] | None = None
    """The target; the drill itself names it (job/fault_catalog.py)."""
    slow: bool = False
    """Whether its recovery takes tens of seconds by design; `--brisk` leaves it out."""
    netns: bool = False


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


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One drawn fault, and its delay in seconds after the previous one."""

    after_s: float
    row: FaultRow
    index: int
    for_s: float | None
    amount: float | None

    def __str__(self) -> str:
        which = f" {self.index}" if self.row.target.is_numbered else ""
        lasting = f" for {self.for_s:.1f} s" if self.for_s is not None else ""
        amount = f" by {self.amount:.0f}" if self.amount is not None else ""
        return f"{self.row.action} {self.row.target}{which}{lasting}{amount}"


def draw(seed: int, number: int, rows: Sequence[FaultRow], every_s: float, nodes: int = NODES) -> Fault:
    """The fault of that number: the same for the same seed, independent of earlier ones."""
    chance = random.Random(f"{seed}/{number}")
    (row,) = chance.choices(rows, [row.weight for row in rows])
    return Fault(
        after_s=chance.expovariate(1 / every_s),
        row=row,
        index=chance.randrange(nodes) if row.target.is_numbered else 0,
        for_s=chance.uniform(*row.for_s) if row.for_s else None,
        amount=chance.uniform(*row.amount) if row.amount else None,
    )


class RunStuck(Exception):
    """The run makes no progress, or has ended; the message ends with its last log lines."""


@dataclass
class Watch:
    """The part of a run's log that has been read."""

    run: RunDir
    faults: int = 0
    undone: set[float] = field(default_factory=set[float])
    """Faults that were requested and not yet carried out, by request time."""
    recent: deque[AnyEvent] = field(default_factory=lambda: deque[AnyEvent](maxlen=SHOWN))
    """The last events except steps and checkpoints."""
    unstepped: int = 0
    """Faults since the last committed step."""
    fault_at: float = 0.0
    """When the last fault was carried out, and when the last step began, on the run's clock."""
    step_at: float = 0.0
    status: RunStatus = field(default_factory=RunStatus)
    moved_at: float = field(default_factory=time.monotonic)
    """When the last step or fault was read."""
    step_seen: float = 0.0
    """When the last step and the last fault were received: a controller that was stopped receives them late.
    """
    fault_seen: float = 0.0

    def __post_init__(self) -> None:
        self._reader = EventReader(self.run.events)
        self.read()

    def read(self) -> None:
        """Read new events; raise when the run makes no progress."""
        for event in self._reader.read():
            self.status = update_status(self.status, event)
            match event:
                case StepCommitted():
                    self.unstepped, self.moved_at, self.step_at = 0, time.monotonic(), event.started
                    self.step_seen = self.moved_at
                    continue
                case FaultRequested():
                    self.faults, self.unstepped, self.moved_at = self.faults + 1, self.unstepped + 1, time.monotonic()
                    if event.target is not _CONTROLLER:  # of two simultaneous ones, one is carried out
                        self.undone.add(event.at)
                case FaultInjected():
                    self.undone.discard(event.requested_at)
                    self.fault_at, self.fault_seen = event.at, time.monotonic()
                case CheckpointCommitted():
                    continue
                case _:
                    pass
            self.recent.append(event)
            if isinstance(event, RunFinished):
                raise RunStuck(f"the run has ended\n{self.story()}")
        if time.monotonic() - self.moved_at > STUCK_S:
            raise RunStuck(f"no step for {STUCK_S:g} s\n{self.story()}")

    @property
    def well(self) -> bool:
        """Whether everything is as before the first fault."""
        return not self.unstepped and not self.undone and self.status.phase is RunPhase.RUNNING

    def story(self) -> str:
        return "\n".join(map(event_line, self.recent))

    def wait(self, until: float) -> None:
        """Read until a moment (monotonic seconds), and longer while too many faults have no step after them."""
        while time.monotonic() < until or self.unstepped >= MOST_UNSTEPPED:
            self.read()
            time.sleep(BEAT_S)

    def settle(self) -> None:
        """Read until every fault has been carried out, and steps begin that are later than all of them."""
        while not self.well or not self._outlived:
            self.read()
            time.sleep(BEAT_S)

    @property
    def _outlived(self) -> bool:
        """Whether the last step began, and was received, long after the last fault."""
        times = ((self.step_at, self.fault_at), (self.step_seen, self.fault_seen))
        return all(step >= fault + SETTLED_S for step, fault in times)


def main() -> int:
    """Soak, print the outcome, and return nonzero unless all went well."""
    parser = argparse.ArgumentParser(prog="bench.soak", description=__doc__)
    parser.add_argument("--faults", type=int, default=FAULTS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every-s", type=float, help="mean seconds between faults")
    parser.add_argument("--state", type=Path, help="directory for all state, to resume from")
    parser.add_argument("--netns", action="store_true", help="one network per node, and partitions among the faults")
    parser.add_argument("--brisk", action="store_true", help="no faults whose recovery takes tens of seconds by design")
    parser.add_argument(
        "--spare", choices=list(FaultTarget), help="no faults of this target: one incarnation to observe leaks"
    )
    parser.add_argument(
        "--torch", action="store_true", help="run the quickstart's Llama instead of a program without torch"
    )
    options = parser.parse_args()
    headline(f"soak: {options.faults} random faults, seed {options.seed}, one run of {NODES} nodes x 1 rank")
    with contextlib.ExitStack() as stack:
        state = options.state or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="soak-")))
        state.mkdir(parents=True, exist_ok=True)
        os.environ["HOLDFAST_HOME"] = str(state.absolute() / "home")
        run = _run(state, netns=options.netns, torch=options.torch)
        rows = [
            row
            for row in ROWS
            if (options.netns or not row.netns) and not (options.brisk and row.slow) and row.target != options.spare
        ]
        every_s = options.every_s or (TORCH_EVERY_S if options.torch else EVERY_S)
        trouble = _soak(run, state / "samples.jsonl", options.faults, options.seed, rows, every_s)
        left = _end(run)
        return _tell(run, leak_slopes.load_samples(state / "samples.jsonl"), [*trouble, *left], noted=not options.torch)


def _run(state: Path, *, netns: bool, torch: bool) -> RunDir:
    """The run of this state: found, and resumed where no controller runs it, or started."""
    for run in api.runs():
        api.restart_controller(run)
        say(f"resuming {run.run_id}")
        return run
    targets = state / ".holdfast" / "targets"
    targets.mkdir(parents=True)
    (targets / "soak.yaml").write_text(f"isolation: {'netns' if netns else 'process'}\ncode: shipped\n")
    overrides = [f"nodes={NODES}", "recovery.max_restarts=1000000", "name=soak"]
    if torch:
        shutil.copy(QUICKSTART / "train.py", state)
        command = (sys.executable, "train.py")
        overrides += ["env={STEPS: 100000000}", "checkpoint.every_steps=10", "recovery.step_timeout_s=10"]
    else:
        shutil.copy(TORCH_FREE_TRAINER, state)
        command = (sys.executable, "torch_free_trainer.py", "100000000", "0.03")
        overrides += ["recovery.step_timeout_s=2"]
    return api.start(api.load_job(None, command=command, overrides=overrides), "soak", base=state.absolute())


def _soak(run: RunDir, kept: Path, faults: int, seed: int, rows: Sequence[FaultRow], every_s: float) -> list[str]:
    """Inject the remaining faults into the run; return what went wrong."""
    if api.is_finished(run):
        return []
    try:
        watch = Watch(run)
        while watch.faults < faults:
            fault = draw(seed, watch.faults, rows, every_s)
            watch.wait(time.monotonic() + fault.after_s)
            if watch.well:
                leak_slopes.append_samples(kept, leak_slopes.samples(run, watch.faults))
            say(f"  {watch.faults + 1:4d}/{faults}  {fault}")
            _give(watch, fault)
        watch.settle()
        leak_slopes.append_samples(kept, leak_slopes.samples(run, watch.faults))
    except RunStuck as error:
        return [str(error)]
    return []


def _give(watch: Watch, fault: Fault) -> None:
    """Request a fault until it is in the log: no controller may be running at the moment."""
    before = watch.faults
    while watch.faults == before:
        with contextlib.suppress(HoldfastError):
            row, index = fault.row, fault.index
            api.inject_fault(
                watch.run, target=row.target, index=index, action=row.action, for_s=fault.for_s, amount=fault.amount
            )
        watch.read()
        time.sleep(BEAT_S)


def _end(run: RunDir) -> list[str]:
    """End the run, and return any leftovers."""
    with contextlib.suppress(HoldfastError):
        api.cancel(run, force=True)  # it may have ended already
    for _ in api.follow(run):
        pass
    left = [f"process {pid} is left" for pid in leak_slopes.processes_of(run)]
    return [*left, *(f"{folder} is left" for folder in leak_slopes.socket_folders(run))]


def _tell(run: RunDir, samples: Sequence[leak_slopes.Sample], trouble: Sequence[str], *, noted: bool) -> int:
    events = api.events(run)
    summary = api.summary(run)
    came = fault_outcomes(events, summary, recorded_steps(run.checkpoints, NODES) if noted else {})
    problems = [*trouble, *came.problems]
    every = [second for seconds in came.recovered_s.values() for second in seconds]
    rows = [(code, str(len(seconds)), *_spread(seconds)) for code, seconds in sorted(came.recovered_s.items())]
    ettr = percentage(summary.account.ettr) if summary.account.ettr is not None else "-"
    kinds = ", ".join(f"{count} {kind}" for kind, count in Counter(came.requested).most_common())
    say("")
    say(f"{came.faults} faults in {summary.account.total_s / 60:.1f} min ({kinds})")
    say(f"recoveries {len(every)}, failed recoveries {came.unrecovered + bool(trouble)}, ETTR {ettr}")
    account = summary.account
    say(f"steps {account.steps}, recomputed {account.recomputed_steps}, not exactly once {len(came.problems)}")
    say("")
    say(
        table(("what failed", "recovered", "p50", "p99", "longest"), [*rows, ("all", str(len(every)), *_spread(every))])
    )
    say("")
    say(table(("who", "what", "first", "last", "slope per 100 faults", "processes"), _trend_rows(samples)))
    for problem in problems:
        say(f"\nFAILED: {problem}")
    return 1 if problems or came.unrecovered else 0


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


if __name__ == "__main__":
    sys.exit(main())
