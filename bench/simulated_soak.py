"""ETTR of a run with faults at known times, and what the failure simulator says for the same faults.

.venv/bin/python -m bench.simulated_soak [--minutes N] [--seed N] [--json FILE]

A first run measures how long each kind of fault takes to be detected, and what a restart takes. Then the simulator
(holdfast.plan.reliability) draws faults for a second run, which meets them: the same kinds, nodes and times. While the
run is down a fault waits for the next step, as in the simulator. Both ETTR count from the first step on. Two nodes of
one rank each, tests/programs/torch_free_trainer.py.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from bench import result_file
from bench.paired_stats import headline, say, table
from bench.soak.faults import Watch
from holdfast import api
from holdfast.control.policy import FailureKind
from holdfast.errors import ExitCode, HoldfastError
from holdfast.events import AnyEvent, FaultAction, FaultInjected, FaultTarget, RecoveryDecided, StepCommitted
from holdfast.failure_rates import DAY_S
from holdfast.job.spec import Recovery
from holdfast.plan.reliability import Delay, Detection, FaultKind, Fleet, Incident, Loss, Trial, incidents, simulate
from holdfast.report.goodput import TimeCategory
from holdfast.run_dir import RunDir

ROOT = Path(__file__).resolve().parents[1]
PROGRAM = ROOT / "tests" / "programs" / "torch_free_trainer.py"
NODES, STEP_S, STEPS_PER_CHECKPOINT = 2, 0.05, 5
EACH_MEASURED = 5
"""Faults of each kind in the first run."""
BETWEEN_S = 2.0
"""Training between them."""
FAULTS_PER_MINUTE = 12.0
MINUTES, SEED = 5.0, 1
GOAL = 0.03
HEADINGS = ("fault", "number", "detected", "restarted")


@dataclass(frozen=True)
class Kind:
    """A kind of fault, and what the controller's policy receives."""

    action: FaultAction
    target: FaultTarget
    failure: FailureKind
    code: int = 0
    error: str = ""

    @property
    def name(self) -> str:
        return f"{self.action} {self.target}"


KINDS = (
    Kind(FaultAction.KILL, FaultTarget.RANK, FailureKind.KILLED, 9),
    Kind(FaultAction.RAISE, FaultTarget.RANK, FailureKind.CRASHED, 1, "RuntimeError: drill"),
    Kind(FaultAction.HANG, FaultTarget.RANK, FailureKind.HUNG),
    Kind(FaultAction.KILL, FaultTarget.NODE, FailureKind.NODE_LOST),
)
BY_NAME = {kind.name: kind for kind in KINDS}


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one fault took, in seconds."""

    kind: str
    detected_s: float
    restarted_s: float
    """From the decision to the beginning of the next step."""


class FaultWatch(Watch):
    """Measures what follows each fault."""

    def __init__(self, run: RunDir) -> None:
        self.outcomes: list[Outcome] = []
        self.first_step_at: float | None = None
        self.pending = ""
        """The kind of fault that was requested, until a step of the next attempt has begun."""
        self._injected_at = self._decided_at = 0.0
        self._attempt = 0
        super().__init__(run)

    def take(self, event: AnyEvent) -> None:
        match event:
            case FaultInjected():
                self._injected_at, self._decided_at = event.at, 0.0
            case RecoveryDecided() if not self._decided_at:
                self._decided_at = event.at
            case StepCommitted():
                self.first_step_at = self.first_step_at or time.monotonic()
                if event.attempt > self._attempt and self.pending:
                    detected_s, restarted_s = self._decided_at - self._injected_at, event.started - self._decided_at
                    self.outcomes.append(Outcome(kind=self.pending, detected_s=detected_s, restarted_s=restarted_s))
                    self.pending = ""
                self._attempt = event.attempt
            case _:
                pass

    def plant(self, kind: Kind, node: int) -> None:
        """Inject a fault once the run trains."""
        self.wait(lambda: not self.pending and self.first_step_at is not None)
        self.pending = kind.name
        api.inject_fault(self.run, target=kind.target, index=node, action=kind.action)

    def wait_for(self, moment: float) -> None:
        """Read until a time of the monotonic clock."""
        self.wait(lambda: time.monotonic() >= moment)


def main() -> int:
    """Run both, simulate, and print the difference."""
    parser = argparse.ArgumentParser(
        prog="bench.simulated_soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=MINUTES)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args()
    headline(f"a run of {options.minutes:g} minutes with faults, and the same one simulated")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the run, as at Ctrl-C
    try:
        return _compare(options)
    except KeyboardInterrupt:
        say("\ninterrupted")
        return ExitCode.CANCELLED


def _compare(options: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory(prefix="simulated-", ignore_cleanup_errors=True) as folder:
        os.environ["HOLDFAST_HOME"] = str(Path(folder) / "home")
        measured = first_run(Path(folder) / "first")
        say(table(HEADINGS, rows_of(measured)))
        total_s = 60 * options.minutes
        causes = fault_kinds(measured)
        coming = incidents(causes, nodes=NODES, total_s=total_s, seed=options.seed)
        real, outcomes, recovery, step_s = soak(Path(folder) / "second", coming, total_s)
    simulated = simulate(fleet(measured, recovery, step_s), causes, frozenset(), total_s=total_s, seed=options.seed)
    say("")
    say(table(HEADINGS, rows_of(outcomes)))
    rows = [(name, f"{real.get(name, 0.0):.2%}", f"{share:.2%}") for name, share in shares(simulated).items()]
    say("")
    say(table(("", "measured", "simulated"), rows))
    difference = abs(real["training"] - simulated.ettr)
    say(f"\n{len(outcomes)} faults; ETTR differs by {100 * difference:.2f} points (goal {100 * GOAL:g})")
    result_file.save(
        options.json, "Simulated and real faults", [_result(difference, len(outcomes), rows, options.minutes)]
    )
    return int(difference > GOAL)


def first_run(folder: Path) -> list[Outcome]:
    """What each kind of fault takes."""
    with _started(folder) as run:
        watch = FaultWatch(run)
        for number in range(EACH_MEASURED * len(KINDS)):
            watch.plant(KINDS[number % len(KINDS)], number // len(KINDS) % NODES)
            watch.wait(lambda: not watch.pending)
            watch.wait_for(time.monotonic() + BETWEEN_S)
    return watch.outcomes


def fault_kinds(measured: Sequence[Outcome]) -> tuple[FaultKind, ...]:
    """The kinds as the simulator takes them, all equally frequent."""
    return tuple(
        FaultKind(
            name=kind.name,
            per_day=FAULTS_PER_MINUTE * DAY_S / 60 / len(KINDS),
            detection=Detection(
                delay=Delay(low_s=(took := _mean(measured, kind.name).detected_s), high_s=took),
                kind=kind.failure,
                code=kind.code,
                error=kind.error,
            ),
        )
        for kind in KINDS
    )


def fleet(measured: Sequence[Outcome], recovery: Recovery, step_s: float) -> Fleet:
    """The run as the simulator takes it: another machine replaces a lost node immediately."""
    in_place = [each.restarted_s for each in measured if BY_NAME[each.kind].target is FaultTarget.RANK]
    return Fleet(
        nodes=NODES,
        gpus_per_node=1,
        step_s=step_s,
        checkpoint_every_s=STEPS_PER_CHECKPOINT * step_s,
        checkpoint_cost_s=0.0,
        restart_s=fmean(in_place),
        requeue_s=_mean(measured, f"{FaultAction.KILL} {FaultTarget.NODE}").restarted_s,
        checks_s=0.0,
        person_s=0.0,
        standbys=0,
        repair_s=0.0,
        recovery=recovery,
    )


def soak(
    folder: Path, coming: Sequence[Incident], total_s: float
) -> tuple[dict[str, float], list[Outcome], Recovery, float]:
    """Shares of the time of a run that meets these faults, what each took, and the run's recovery and step time."""
    with _started(folder) as run:
        watch = FaultWatch(run)
        watch.wait(lambda: watch.first_step_at is not None)
        began = watch.first_step_at or 0.0
        for incident in coming:
            watch.wait_for(began + incident.at)
            watch.plant(BY_NAME[incident.cause.name], incident.node)
        watch.wait_for(began + total_s)
    account = api.summary(run).account
    total = account.total_s - sum(
        account.parts.get(part, 0.0) for part in (TimeCategory.STARTING, TimeCategory.STOPPING)
    )
    found = {part.value: spent / total for part, spent in account.parts.items()}
    step_s = account.parts[TimeCategory.TRAINING] / account.steps
    return found, watch.outcomes, api.accepted(run).job.recovery, step_s


def shares(trial: Trial) -> dict[str, float]:
    """Shares of a simulated run's time, by the names of a real one's."""
    lost = dict.fromkeys(Loss, 0.0)
    for (_, how), seconds in trial.lost_s.items():
        lost[how] += seconds
    return {"training": trial.ettr, **{how.value: lost[how] / trial.total_s for how in Loss if lost[how]}}


@contextlib.contextmanager
def _started(folder: Path) -> Generator[RunDir]:
    """A run that ends with the block, also after an error: it has more steps than anybody waits for."""
    folder.mkdir(parents=True)
    shutil.copy(PROGRAM, folder)
    overrides = (
        f"nodes={NODES}",
        "name=simulated",
        "recovery.prewarm=false",
        "recovery.max_restarts=1000000",
        "recovery.step_timeout_s=1.5",
        f"checkpoint.path={folder / 'checkpoints'}",
    )
    command = (sys.executable, PROGRAM.name, "100000000", str(STEP_S))
    run = api.start(api.load_job(None, command=command, overrides=overrides), "local", base=folder)
    try:
        yield run
    finally:
        with contextlib.suppress(HoldfastError):  # it has ended by itself
            api.cancel(run, force=True)
        for _ in api.follow(run):
            pass


def _mean(measured: Sequence[Outcome], kind: str) -> Outcome:
    found = [each for each in measured if each.kind == kind]
    return Outcome(
        kind=kind,
        detected_s=fmean(each.detected_s for each in found),
        restarted_s=fmean(each.restarted_s for each in found),
    )


def rows_of(outcomes: Sequence[Outcome]) -> list[tuple[str, ...]]:
    """How many faults of each kind, and what they took."""
    met = Counter(each.kind for each in outcomes)
    means = [_mean(outcomes, kind) for kind in met]
    return [(each.kind, str(met[each.kind]), f"{each.detected_s:.3f} s", f"{each.restarted_s:.3f} s") for each in means]


def _result(difference: float, faults: int, rows: Sequence[tuple[str, ...]], minutes: float) -> result_file.Result:
    return result_file.Result(
        claim="ETTR of a run with faults at known times: difference from its simulation",
        command=result_file.command(),
        date=result_file.today(),
        figure=result_file.Figure(value=100 * difference, unit="points", decimals=2),
        goal=f"≤ {100 * GOAL:g} points",
        met="yes" if difference <= GOAL else "no",
        conditions=f"{minutes:g} minutes, {faults} faults of {len(KINDS)} kinds, two local nodes of one rank",
        details={name: f"{measured} measured, {simulated} simulated" for name, measured, simulated in rows},
    )


if __name__ == "__main__":
    sys.exit(main())
