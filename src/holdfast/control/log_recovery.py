"""Decides whether a run can resume from a damaged log; pure.

The machine is deterministic, and the log holds its decisions as well as its inputs. If a replay without the damaged
lines reproduces every decision in the log, no input of a decision was lost. Other losses are repaired as the run
continues: steps by later steps, a rank's exit by its node's report that nothing is left. Any other replay would resume
from a state that never existed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from msgspec import Struct

from holdfast import events
from holdfast.control.commands import RecordEvent
from holdfast.control.machine import Machine
from holdfast.control.state import State
from holdfast.errors import ExitCode
from holdfast.events.log import CorruptSpan
from holdfast.findings import Finding, Owner, Severity

_SHOWN = 3
"""Number of damaged places that a finding lists."""

_DECISIVE_FIELDS = ("replica", "attempt", "world_size", "master_port", "node", "generation", "outcome")
"""Fields that must match in two equal decisions; texts may differ between versions."""


class LogRecovery(Struct, frozen=True, kw_only=True):
    """The events of a damaged log, and the finding about the damage."""

    events: tuple[events.AnyEvent, ...]
    finding: Finding
    """A warning if the run can resume, otherwise the error that ends it."""

    @property
    def is_fatal(self) -> bool:
        return self.finding.severity is Severity.ERROR

    def events_to_write(self, at: float) -> tuple[events.AnyEvent, ...]:
        """Events that a controller logs first: the finding if it is new; if fatal, the whole ending."""
        if self.is_fatal:
            outcome, code, why = events.Outcome.FAILED, ExitCode.STORAGE_FAILED, self.finding.what
            return (
                events.ShutdownDecided(at=at, outcome=outcome, reason=why, exit_code=code, finding=self.finding),
                events.RunFinished(at=at, outcome=outcome, exit_code=code, reason=why),
            )
        known = any(isinstance(event, events.FindingRaised) and event.finding == self.finding for event in self.events)
        return () if known else (events.FindingRaised(at=at, finding=self.finding),)


def recover_log(
    machine: Machine, entries: Iterable[events.AnyEvent | CorruptSpan], created: events.RunCreated, log: str
) -> LogRecovery:
    """Replay a damaged log; `created` replaces its first line if that is damaged, `log` is its path."""
    kept: list[events.AnyEvent] = []
    damage: list[CorruptSpan] = []
    state, expected = State(), deque[events.AnyEvent]()
    disagreement, has_gap = "", False
    for line in entries:
        entry = line
        if isinstance(entry, CorruptSpan):
            damage.append(entry)
            has_gap = True
            if kept:
                continue
            entry = created
        kept.append(entry)
        if disagreement:
            continue
        if ahead := _ahead_of_state(state, entry):
            disagreement = f"the remaining lines do not lead to {ahead}, which the log refers to"
            continue
        if machine.is_output(type(entry)):
            while has_gap and expected and _decisive_values(entry) != _decisive_values(expected[0]):
                expected.popleft()
            if not expected or _decisive_values(entry) != _decisive_values(expected.popleft()):
                disagreement = f"the remaining lines do not lead to {_event_text(entry)}, which the log holds"
            continue
        if machine.is_input(type(entry)):
            # A controller may have died between an event and its decision.
            if expected and not has_gap and not isinstance(entry, events.ControllerStarted):
                disagreement = f"the remaining lines lead to {_event_text(expected[0])}, which the log does not hold"
                continue
            expected.clear()
            has_gap = False
        try:
            state, commands = machine.step(state, entry)
        except (AssertionError, LookupError) as error:
            disagreement = f"the remaining lines lead to {_event_text(entry)}, which is impossible there: {error!r}"
            continue
        records = (command.event for command in commands if isinstance(command, RecordEvent))
        expected.extend(event for event in records if machine.is_output(type(event)))
    return LogRecovery(events=tuple(kept), finding=_finding(damage, disagreement, log))


def empty_log(created: events.RunCreated, log: str) -> LogRecovery:
    """The recovery of an empty log whose run had begun; `created` replaces its first line."""
    disagreement = "it is empty, though the run had started nodes"
    return LogRecovery(events=(created,), finding=_finding([], disagreement, log))


def _finding(damage: list[CorruptSpan], disagreement: str, log: str) -> Finding:
    places = tuple(
        f"line {one.first_line}, {one.size_bytes:,} bytes at offset {one.offset:,}" for one in damage[:_SHOWN]
    )
    if disagreement:
        return Finding(
            code="event-log-corrupt",
            what="the event log is damaged where it matters, so the run cannot resume from it",
            where=log,
            evidence=(*places, disagreement),
            remedy="Run the job again, with `checkpoint.path` set to this run's checkpoints: they are not touched.",
            owner=Owner.CLUSTER,
        )
    return Finding(
        code="event-log-partially-corrupt",
        severity=Severity.WARNING,
        what=f"{len(damage)} damaged lines of the event log are passed over; every decision stands without them",
        where=log,
        evidence=places,
        remedy="Look at that disk. Steps and findings that stood there are missing from status and summary.",
        owner=Owner.CLUSTER,
    )


def _ahead_of_state(state: State, event: events.AnyEvent) -> str:
    """What an event refers to that has not begun yet in this state; decisions, which begin things, are exempt."""
    if isinstance(
        event, events.AttemptStarted | events.NodeRequested | events.StandbyPromoted | events.WorldSizeChanged
    ):
        return ""
    index: int = getattr(event, "node", -1)
    node = state.nodes[index] if 0 <= index < len(state.nodes) else None
    generation, attempt = getattr(event, "generation", 0), getattr(event, "attempt", -1)
    if node is not None and generation > node.generation:
        return f"node{node.node}.{generation}"
    replica = getattr(event, "replica", node.replica if node is not None else 0)
    known = state.replicas[replica].attempt if replica is not None and replica < len(state.replicas) else -1
    return f"attempt {attempt}" if attempt > known else ""


def _decisive_values(event: events.AnyEvent) -> tuple[object, ...]:
    return (type(event), *(getattr(event, name, None) for name in _DECISIVE_FIELDS))


def _event_text(event: events.AnyEvent) -> str:
    values = {name: getattr(event, name) for name in _DECISIVE_FIELDS if hasattr(event, name)}
    return f"{event.__struct_config__.tag} ({', '.join(f'{name} {value}' for name, value in values.items())})"
