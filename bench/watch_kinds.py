"""Kinds of faults told apart: one drill in each of many real runs, and what the event log tells of it.

.venv/bin/python -m bench.watch_kinds [--kinds "NaN loss,lost node"] [--seeds 0,1,2] [--state FILE] [--peers PYTHON]

Each run is DDP over Gloo in a Session, on four local nodes of one rank. The seed decides the rank or node of the fault,
and its step. The verdict is read from the event log without its record of the drill (bench/watch_verdicts.py): right if
the log fits this kind alone, names the rank or node, and no healthy node was replaced, up to the next attempt's first
step. Processes are forks of one that has imported torch (tests/programs/python_forks.py). With `--state` each verdict
is appended to a file, runs that it has are skipped, and two commands can share the work. With `--peers` NVRx and
DLRover meet the same faults, those of devices excepted (bench/watch_peers.py); else their columns tell their source.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import sys
import tempfile
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.runs.forked_starts import ForkedStarts

from bench import result_file
from bench.drill_diagnosis import end_run, wait_until
from bench.paired_stats import headline, say, table
from bench.watch_peers import measure_all
from bench.watch_verdicts import KINDS, Kind, Seen, healthy_replaced, is_right, read_log, told, without_drills
from holdfast import api
from holdfast.errors import HoldfastError
from holdfast.events import AnyEvent, FaultAction, FaultTarget, FindingRaised, RecoveryDecided, StepCommitted
from holdfast.run_dir import RunDir

PROGRAM = Path(__file__).parent / "programs" / "watched_loop.py"
NODES, STEPS, STEP_S = 4, 100_000, 0.05
FIRST_DRILL, LAST_DRILL = 15, 40
"""Steps of the drills: from the first whose timeout is that of steady steps."""
CALM_STEPS = 10
"""Steps to watch after a finding that restarts nothing."""
SEEDS = tuple(range(10))
GOAL = 118 / 120


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What the log of one run told."""

    kind: str
    seed: int
    planted: int
    told: list[tuple[str, int | None]]
    healthy_replaced: list[int]
    right: bool
    after_s: float
    """From the fault to the finding that decides; 0 if none came."""
    failed: str = ""


def main() -> int:
    """Run each kind with each seed, and print a table."""
    parser = argparse.ArgumentParser(prog="bench.watch_kinds", description=__doc__)
    parser.add_argument("--kinds", help="names, separated by commas")
    parser.add_argument("--seeds", help="numbers, separated by commas")
    parser.add_argument("--state", type=Path, help="append verdicts to this file, and skip those that it has")
    parser.add_argument("--peers", type=Path, metavar="PYTHON", help="of an environment with NVRx and DLRover")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args()
    kinds = [kind for kind in KINDS if not options.kinds or kind.name in options.kinds.split(",")]
    seeds = tuple(map(int, options.seeds.split(","))) if options.seeds else SEEDS
    headline(f"kinds of faults told apart: {len(kinds)} kinds, {len(seeds)} seeds")
    known = _read(options.state)
    verdicts: list[Verdict] = []
    with _forks() as forks:
        for seed in seeds:
            for kind in kinds:
                with forks.used() if kind.forked else contextlib.nullcontext():
                    verdict = known.get((kind.name, seed)) or _asked(kind, seed)
                if (kind.name, seed) not in known and options.state:
                    with options.state.open("a") as state:
                        state.write(json.dumps(vars(verdict)) + "\n")
                verdicts.append(verdict)
                say(_line(verdict))
    measured = measure_all(options.peers.absolute(), [kind.name for kind in kinds]) if options.peers else {}
    rows = [_row(kind, verdicts, measured) for kind in kinds]
    say("")
    say(table(("kind", "right", "finding after, longest", "NVRx", "DLRover"), rows))
    right = sum(verdict.right for verdict in verdicts)
    replaced = sum(len(verdict.healthy_replaced) for verdict in verdicts)
    say(f"\n{right} of {len(verdicts)} right; healthy nodes replaced: {replaced}")
    result_file.save(options.json, "Kinds of faults told apart", [_result(verdicts, rows, measured=bool(measured))])
    return 0 if right >= GOAL * len(verdicts) and not replaced else 1


def plant(kind: Kind, seed: int, base: Path) -> Verdict:
    """Start a run, inject the fault, and read what its log tells."""
    chance = random.Random(f"{kind.name}/{seed}")
    number, at_step = chance.randrange(NODES), chance.randrange(FIRST_DRILL, LAST_DRILL)
    action, target = FaultAction(kind.action), FaultTarget(kind.target)
    with _run(kind, base) as run:
        wait_until(run, lambda event: isinstance(event, StepCommitted))  # a busy machine has no controller earlier
        api.inject_fault(run, target=target, index=number, action=action, at_step=at_step, amount=kind.amount)
        failed = ""
        try:
            wait_until(run, _settled(kind))
        except TimeoutError as error:
            failed = str(error)
        events = api.events(run)
        blind = without_drills(events)
        diagnosis = api.diagnose_run(run, blind)
    seen = read_log(blind, diagnosis.failure_class)
    return Verdict(
        kind=kind.name,
        seed=seed,
        planted=number,
        told=told(seen),
        healthy_replaced=sorted(healthy_replaced(kind, number, seen)),
        right=is_right(kind, number, seen),
        after_s=_after_s(kind, events, at_step),
        failed=failed or _unknown(seen),
    )


def _settled(kind: Kind) -> Callable[[AnyEvent], bool]:
    """Whether the run has gone on after the finding: in its next attempt, or for some steps of the same."""
    restarted, reported, calm = False, False, 0

    def settled(event: AnyEvent) -> bool:
        nonlocal restarted, reported, calm
        restarted = restarted or isinstance(event, RecoveryDecided)
        reported = reported or (isinstance(event, FindingRaised) and event.finding.code in kind.codes)
        if not isinstance(event, StepCommitted):
            return False
        calm += event.steps * (reported and not restarted)
        return calm >= CALM_STEPS or (restarted and event.attempt > 0)

    return settled


def _after_s(kind: Kind, events: list[AnyEvent], at_step: int) -> float:
    """From the end of the last step without the fault to the finding that decides."""
    began = max(
        (e.at for e in events if isinstance(e, StepCommitted) and e.attempt == 0 and e.step <= at_step), default=0.0
    )
    found = [e for e in events if isinstance(e, RecoveryDecided | FindingRaised) and e.finding.code in kind.codes]
    return max(0.0, found[0].at - began) if found and began else 0.0


def _unknown(seen: Seen) -> str:
    return "" if told(seen) else f"fits no kind: {seen.named}"


def _asked(kind: Kind, seed: int) -> Verdict:
    with tempfile.TemporaryDirectory(prefix="kinds-") as base:
        try:
            return plant(kind, seed, Path(base))
        except (HoldfastError, TimeoutError) as error:
            # One run that a busy machine refuses must not take the others' verdicts with it.
            return Verdict(
                kind=kind.name, seed=seed, planted=-1, told=[], healthy_replaced=[], right=False, after_s=0.0,
                failed=f"{type(error).__name__}: {error}",
            )  # fmt: skip


@contextlib.contextmanager
def _run(kind: Kind, base: Path) -> Generator[RunDir]:
    """A run of the watched loop, cleaned up at the end."""
    overrides = ("recovery.prewarm=false", "recovery.step_timeout_s=auto", "watch.spikes=act", *kind.overrides)
    os.environ["HOLDFAST_HOME"] = str(base / "home")
    command = (sys.executable, str(PROGRAM), str(STEPS), str(STEP_S))
    job = api.load_job(None, command=command, nodes=NODES, name="kinds", overrides=overrides)
    run = api.start(job, "local", base=base)
    try:
        yield run
    finally:
        end_run(run)


@contextlib.contextmanager
def _forks() -> Generator[ForkedStarts]:
    forks = ForkedStarts()
    try:
        yield forks
    finally:
        forks.close()


def _read(state: Path | None) -> dict[tuple[str, int], Verdict]:
    lines = state.read_text().splitlines() if state is not None and state.exists() else []
    known = [Verdict(**json.loads(line)) for line in lines]
    return {(each.kind, each.seed): each for each in known}


def _line(one: Verdict) -> str:
    said = ", ".join(f"{name} {number}" for name, number in one.told) or one.failed
    replaced = f", replaced {one.healthy_replaced}" if one.healthy_replaced else ""
    return (
        f"{'right' if one.right else 'WRONG'}  seed {one.seed}  {one.kind} {one.planted}: {said}{replaced}"
        f"  ({one.after_s:.1f} s)"
    )


def _row(kind: Kind, verdicts: list[Verdict], measured: Mapping[str, Mapping[str, str]]) -> tuple[str, ...]:
    own = [each for each in verdicts if each.kind == kind.name]
    right = sum(each.right for each in own)
    longest = max((each.after_s for each in own), default=0.0)
    peers = (
        measured.get(peer, {}).get(kind.name, f"by its source: {source}")
        for peer, source in (("nvrx", kind.nvrx), ("dlrover", kind.dlrover))
    )
    return kind.name, f"{right} of {len(own)}", f"{longest:.1f} s", *peers


def _result(verdicts: list[Verdict], rows: list[tuple[str, ...]], *, measured: bool) -> result_file.Result:
    right = sum(verdict.right for verdict in verdicts)
    replaced = sum(len(verdict.healthy_replaced) for verdict in verdicts)
    met = right >= GOAL * len(verdicts) and not replaced
    details = {row[0]: f"{row[1]}, finding after {row[2]} at most; NVRx: {row[3]}; DLRover: {row[4]}" for row in rows}
    return result_file.Result(
        claim=f"{len(rows)} kinds of faults in running ranks told apart, rank or node named",
        command=result_file.command(),
        date=result_file.today(),
        figure=result_file.Figure(value=right, unit=f"of {len(verdicts)} right"),
        goal="118 of 120, no healthy node replaced",
        met="yes" if met else "no",
        conditions=f"real runs of {NODES} ranks on CPU over Gloo; faults by drill",
        details={**details, "healthy nodes replaced": str(replaced)},
        note="NVRx 0.4.1 and DLRover 0.6.1: "
        + ("run with the same faults, except those of devices" if measured else "by their source, not measured"),
        headline=True,
    )


if __name__ == "__main__":
    sys.exit(main())
