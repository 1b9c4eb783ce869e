"""Outcomes of injected faults from a run's log: what followed each, how long it took, whether a step was lost.

Pure functions over events; soak.py injects the faults.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from holdfast.events import (
    AnyEvent,
    ControllerStarted,
    FaultAction,
    FaultRequested,
    FaultTarget,
    StepCommitted,
)
from holdfast.report.run_summary import RunSummary

RecordedSteps = Mapping[int, Mapping[int, set[int]]]
"""Steps that each rank reported as finished, by rank and attempt."""


@dataclass(frozen=True, kw_only=True)
class FaultOutcomes:
    """All outcomes so far."""

    requested: Mapping[str, int]
    """Faults by their name, such as `kill rank`."""
    recovered_s: Mapping[str, Sequence[float]]
    """Seconds from each failure to the end of the next step, by what failed; a controller's to the next one's start."""
    unrecovered: int
    """Failures that no step followed."""
    problems: tuple[str, ...]
    """Steps that were lost, doubled or out of order."""

    @property
    def faults(self) -> int:
        return sum(self.requested.values())


def fault_outcomes(events: Sequence[AnyEvent], summary: RunSummary, notes: RecordedSteps) -> FaultOutcomes:
    """Fold a log, and compare it with the ranks' own records, where they exist."""
    requests = [event for event in events if isinstance(event, FaultRequested)]
    times: dict[str, list[float]] = defaultdict(list)
    for recovery in summary.recoveries:
        if recovery.until_step_s is not None:
            times[recovery.finding.code].append(recovery.until_step_s)
    times["controller"] += _controllers_s(events)
    return FaultOutcomes(
        requested=Counter(f"{request.action} {request.target}" for request in requests),
        recovered_s={code: seconds for code, seconds in times.items() if seconds},
        unrecovered=sum(recovery.until_step_s is None for recovery in summary.recoveries),
        problems=(*_log_problems(events), *_note_problems(events, notes)),
    )


def recorded_steps(folder: Path, ranks: int) -> RecordedSteps:
    """The records of the ranks of tests/programs/torch_free_trainer.py."""
    noted: dict[int, dict[int, set[int]]] = {}
    for rank in range(ranks):
        attempts = noted.setdefault(rank, defaultdict(set))
        for line in (folder / f"steps-{rank}.txt").read_text().splitlines():
            attempt, step, *_ = line.split()
            attempts[int(attempt)].add(int(step))
    return noted


def _controllers_s(events: Iterable[AnyEvent]) -> Iterator[float]:
    """Seconds from each fault of the controller to the start of the next one; none where it only paused."""
    fault: FaultRequested | None = None
    for event in events:
        if isinstance(event, FaultRequested) and event.target is FaultTarget.CONTROLLER:
            fault = event if event.action is FaultAction.KILL else None
        if isinstance(event, ControllerStarted) and fault is not None:
            yield event.at - fault.at
            fault = None


def _log_problems(events: Iterable[AnyEvent]) -> Iterator[str]:
    """In each attempt steps are consecutive, and no attempt writes after its successor has."""
    attempt, last = -1, 0
    for event in events:
        if not isinstance(event, StepCommitted):
            continue
        if event.attempt < attempt:
            yield f"step {event.first} of attempt {event.attempt} was committed after attempt {attempt} had steps"
        elif event.attempt == attempt and event.first != last + 1:
            yield f"in attempt {attempt} step {event.first} follows step {last}"
        attempt, last = event.attempt, event.step


def _note_problems(events: Iterable[AnyEvent], notes: RecordedSteps) -> Iterator[str]:
    """Every step was kept from exactly one attempt that did it, and the ranks' records match the log.

    A rank leaves a step of that program only when all have reached its end, so one rank's record stands for all.
    """
    if not notes:
        return
    attempts = sorted(set.union(*(set(rank) for rank in notes.values())))
    done = {attempt: set.union(*(rank.get(attempt, set()) for rank in notes.values())) for attempt in attempts}
    kept: set[int] = set()
    for attempt in attempts:
        first = min(done[attempt])
        kept = {step for step in kept if step < first}
        if lost := set(range(1, first)) - kept:
            yield f"attempt {attempt} continues with step {first}, without {_some(lost)}"
        kept |= done[attempt] | set(range(1, first))  # report a loss once
    logged: dict[int, set[int]] = defaultdict(set)
    for event in events:
        if isinstance(event, StepCommitted):
            logged[event.attempt] |= set(range(event.first, event.step + 1))
    for attempt, steps in logged.items():
        if undone := steps - done.get(attempt, set()):
            yield f"attempt {attempt} committed {_some(undone)}, which no rank finished"
        # The last steps of an attempt may be unreported; the first step of a later attempt proves them.
        whole = set.intersection(*(rank.get(attempt, set()) for rank in notes.values()))
        if unsaid := {step for step in whole if step < max(steps)} - steps:
            yield f"all ranks of attempt {attempt} finished {_some(unsaid)}, without a commit"


def _some(steps: set[int]) -> str:
    return f"step {min(steps)}" if len(steps) == 1 else f"{len(steps)} steps from {min(steps)}"
