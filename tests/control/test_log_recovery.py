"""A damaged log is resumed only if replay yields every decision in it; otherwise the run ends with the reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.control.commands import RecordEvent
from holdfast.control.log_recovery import LogRecovery, recover_log
from holdfast.control.machine import Machine
from holdfast.control.state import ReplicaPhase, State
from holdfast.errors import ExitCode
from holdfast.events import (
    AgentConnected,
    AgentDisconnected,
    AnyEvent,
    ControllerStarted,
    ExitReason,
    NodeTerminated,
    Outcome,
    RankExited,
    RanksStarted,
    RanksStopped,
    RankState,
    RunCreated,
    RunFinished,
    ShutdownDecided,
    StepCommitted,
)
from holdfast.events.log import EventReader, encode_line
from holdfast.job.spec import Job, Nodes

MACHINE = Machine(Job(command=("train",), nodes=Nodes(min=2, max=2)))
CREATED = RunCreated(at=0.0, run="r", job={})


def joined(node: int, generation: int = 0) -> AgentConnected:
    word = f"{node}.{generation}"
    return AgentConnected(
        at=1.0, node=node, generation=generation, incarnation=word, hostname="h", address="a", port=1, pid=1
    )


def started(node: int, attempt: int) -> RanksStarted:
    return RanksStarted(at=2.0, node=node, replica=0, attempt=attempt, ranks=(RankState(rank=node, pid=1),))


def step(number: int, attempt: int = 0) -> StepCommitted:
    return StepCommitted(at=3.0, replica=0, attempt=attempt, step=number, started=2.0, ended=3.0)


def exited(node: int, attempt: int, code: int = 0, *, asked: bool = False) -> RankExited:
    how = ExitReason.CODE
    return RankExited(at=4.0, node=node, replica=0, attempt=attempt, rank=node, reason=how, code=code, stopped=asked)


def stopped(node: int, attempt: int) -> RanksStopped:
    return RanksStopped(at=5.0, node=node, replica=0, attempt=attempt, port=2 + attempt)


STORY: tuple[AnyEvent, ...] = (
    CREATED,
    ControllerStarted(at=0.5, pid=1, incarnation="c"),
    joined(0),
    joined(1),
    started(0, 0),
    started(1, 0),
    *map(step, range(1, 11)),
    exited(1, 0, code=1),
    exited(0, 0, code=15, asked=True),
    stopped(1, 0),
    stopped(0, 0),
    started(0, 1),
    started(1, 1),
    *(step(number, 1) for number in range(6, 16)),
    AgentDisconnected(at=6.0, node=1, generation=0, incarnation="1.0"),
    NodeTerminated(at=6.0, node=1, generation=0, reason="it burnt down"),
    exited(0, 1, code=15, asked=True),
    stopped(0, 1),
    joined(1, 1),
    started(0, 2),
    started(1, 2),
    *(step(number, 2) for number in range(11, 21)),
)


def lines(story: tuple[AnyEvent, ...]) -> tuple[list[bytes], State]:
    """A log as a controller writes it, and the state it leads to."""
    state, written = State(), list[AnyEvent]()
    for event in story:
        state, commands = MACHINE.step(state, event)
        written += [event, *(command.event for command in commands if isinstance(command, RecordEvent))]
    return [encode_line(event) for event in written], state


LINES, STATE = lines(STORY)


def taken(path: Path, content: list[bytes]) -> LogRecovery:
    path.write_bytes(b"".join(content))
    return recover_log(MACHINE, EventReader(path).entries(), CREATED, str(path))


def damaged(content: list[bytes], *places: int) -> list[bytes]:
    return [b"\0" * 8 + line[8:] if place in places else line for place, line in enumerate(content)]


@pytest.mark.parametrize("width", [1, 2, 3, 8])
def test_run_continues_from_any_damage_only_to_where_it_was(tmp_path: Path, width: int) -> None:
    outcomes = set[bool]()
    for first in range(len(LINES)):
        takeover = taken(tmp_path / "log", damaged(LINES, *range(first, first + width)))
        outcomes.add(takeover.is_fatal)
        if not takeover.is_fatal:
            state = MACHINE.replay(takeover.events)
            (replica,), (truth,) = state.replicas, STATE.replicas
            assert (replica.attempt, replica.phase) == (truth.attempt, truth.phase)
            assert [node.generation for node in state.nodes] == [0, 1]
    assert outcomes == {True, False}


def test_lost_step_changes_nothing_and_is_said_once(tmp_path: Path) -> None:
    place = next(number for number, line in enumerate(LINES) if b"step-committed" in line)
    takeover = taken(tmp_path / "log", damaged(LINES, place))
    assert not takeover.is_fatal
    assert MACHINE.replay(takeover.events) == STATE
    (said,) = takeover.events_to_write(9.0)
    assert takeover.finding.code == "event-log-partially-corrupt"
    assert takeover.finding.evidence[0].startswith(f"line {place + 1}, ")
    again = taken(tmp_path / "log", [*damaged(LINES, place), encode_line(said)])
    assert again.events_to_write(10.0) == ()


def test_first_line_is_known_without_the_log(tmp_path: Path) -> None:
    takeover = taken(tmp_path / "log", damaged(LINES, 0))
    assert not takeover.is_fatal
    assert MACHINE.replay(takeover.events) == STATE


@pytest.mark.parametrize("kind", [b"attempt-started", b"recovery-decided", b"node-requested"])
def test_lost_decision_is_made_again_from_its_cause(tmp_path: Path, kind: bytes) -> None:
    places = [number for number, line in enumerate(LINES) if kind in line]
    takeover = taken(tmp_path / "log", damaged(LINES, *places))
    assert not takeover.is_fatal
    assert MACHINE.replay(takeover.events) == STATE


def test_lost_cause_of_a_decision_ends_the_run_and_says_which(tmp_path: Path) -> None:
    place = next(number for number, line in enumerate(LINES) if b"it burnt down" in line)
    takeover = taken(tmp_path / "log", damaged(LINES, place))
    assert takeover.is_fatal
    assert any("recovery-decided" in line or "node-requested" in line for line in takeover.finding.evidence)
    stop, finished = takeover.events_to_write(9.0)
    assert isinstance(stop, ShutdownDecided)
    assert isinstance(finished, RunFinished)
    assert (finished.outcome, finished.exit_code) == (Outcome.FAILED, ExitCode.STORAGE_FAILED)


def test_end_of_a_rank_that_was_lost_leads_to_a_restart_not_to_a_standstill(tmp_path: Path) -> None:
    place = len(LINES)
    takeover = taken(tmp_path / "log", damaged([*LINES, encode_line(exited(0, 2))], place))
    assert not takeover.is_fatal
    state = MACHINE.replay([*takeover.events, exited(1, 2), stopped(0, 2), stopped(1, 2)])
    assert (state.replicas[0].phase, state.replicas[0].attempt) == (ReplicaPhase.RUNNING, 3)
    assert state.replicas[0].failures[-1].kind.value == "failure-cause-unknown"


def test_line_of_the_log_without_its_decision_is_not_gone_on_from(tmp_path: Path) -> None:
    place = next(number for number, line in enumerate(LINES) if b"recovery-decided" in line)
    assert taken(tmp_path / "log", [*LINES[:place], *LINES[place + 1 :], b"torn\n"]).is_fatal


def test_decision_that_a_dying_controller_did_not_write_is_no_damage(tmp_path: Path) -> None:
    place = next(number for number, line in enumerate(LINES) if b"attempt-started" in line)
    again = ControllerStarted(at=1.5, pid=2, incarnation="d")
    takeover = taken(tmp_path / "log", [*damaged(LINES[:place], 4), encode_line(again)])
    assert not takeover.is_fatal
