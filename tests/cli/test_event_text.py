"""Every kind of event has its sentence, and somebody who watches gets the ones worth a line."""

from __future__ import annotations

import typing

import msgspec
from tests.golden import Golden

from holdfast.cli.event_text import EventLineFilter, describe, event_line
from holdfast.events import (
    AnyEvent,
    CheckpointCommitted,
    ControllerStarted,
    ExitReason,
    RankExited,
    RankHung,
    RanksStopped,
    RecoveryDecided,
    SocketEnds,
    StepCommitted,
)
from holdfast.findings import Finding

KINDS: tuple[type[msgspec.Struct], ...] = typing.get_args(AnyEvent)
SAMPLES: dict[type, object] = {
    int: 3,
    float: 1700000000.25,
    str: "word",
    bool: False,
    Finding: {"code": "x", "what": "y"},
    SocketEnds: {"rank": 1, "interface": "eth0", "local": "10.0.0.1:5", "remote": "10.0.0.2:6"},
}


def sample(kind: type[msgspec.Struct]) -> AnyEvent:
    """An event of this kind with something in each field that must be given."""
    hints = typing.get_type_hints(kind)
    given = {field.name: value_of(hints[field.name]) for field in msgspec.structs.fields(kind) if field.required}
    return msgspec.convert(given | {"type": kind.__struct_config__.tag}, kind)


def value_of(hint: object) -> object:
    if isinstance(hint, type) and hint in SAMPLES:
        return SAMPLES[hint]
    if isinstance(hint, type) and issubclass(hint, str):
        return next(iter(hint))  # pyright: ignore
    return {} if typing.get_origin(hint) is dict else ()


def step(number: int, at: float) -> StepCommitted:
    return StepCommitted(
        at=at, replica=0, attempt=0, step=number, started=at - 0.1, ended=at, metrics={"loss": 2.5, "tokens": 100.0}
    )


def test_every_kind_of_event_has_a_sentence_of_one_line(golden: Golden) -> None:
    for kind in KINDS:
        assert "\n" not in describe(sample(kind))
        assert event_line(sample(kind)).endswith(describe(sample(kind))), kind
    golden("\n".join(f"{kind.__name__}: {describe(sample(kind))}" for kind in KINDS))


def test_sentence_cannot_carry_control_characters() -> None:
    event = RankExited(
        at=1, node=0, replica=0, attempt=0, rank=0, reason=ExitReason.CODE, code=1, error="\x1b[31mbad\x1b[0m\nnews\x07"
    )
    assert describe(event) == "rank 0 on node0 exited with code 1: bad\\nnews\\x07"


def test_sentence_names_the_replica_after_the_first_and_metrics(golden: Golden) -> None:
    lines = [
        RankExited(at=1, node=1, replica=1, attempt=0, rank=0, reason=ExitReason.SIGNAL, code=9),
        RankHung(at=1, node=1, replica=1, attempt=0, rank=0, waited_s=5.0, last_step=3, last_step_at=1.0),
        RanksStopped(at=1, node=1, replica=1, attempt=2, port=1),
        step(7, 10.0),
    ]
    golden("\n".join(map(describe, lines)))


def test_steps_and_checkpoints_are_printed_about_once_a_second() -> None:
    line_filter = EventLineFilter()
    lines = [text for number in range(40) for text in line_filter.lines_for(step(number, 100 + number / 10))]
    assert [text.split()[2] for text in lines] == ["0", "10", "20", "30"]
    saved = [
        CheckpointCommitted(at=200 + number / 2, node=0, replica=0, attempt=0, step=number, path="p")
        for number in range(4)
    ]
    assert [len(line_filter.lines_for(event)) for event in saved] == [1, 0, 1, 0]


def test_checkpoint_known_before_its_step_is_printed_after_it() -> None:
    line_filter = EventLineFilter()
    early = CheckpointCommitted(at=10.9, node=0, replica=0, attempt=0, step=8, path="/c/8")
    assert line_filter.lines_for(step(7, 10.0)) == [event_line(step(7, 10.0))]
    assert line_filter.lines_for(early) == []
    assert line_filter.lines_for(step(8, 11.2)) == [event_line(step(8, 11.2)), event_line(early)]


def test_last_step_held_back_is_printed_before_the_failure() -> None:
    line_filter = EventLineFilter()
    for number in range(5):
        line_filter.lines_for(step(number, 100 + number / 10))
    decided = RecoveryDecided(
        at=101, replica=0, attempt=0, action="stop", failed_at=101, finding=Finding(code="x", what="lost")
    )
    lines = line_filter.lines_for(decided)
    assert [("step 4" in lines[0]), ("lost" in lines[1]), len(lines)] == [True, True, 2]


def test_restart_of_a_program_without_steps_shows_what_it_repeats() -> None:
    lost = Finding(code="node-lost", what="node1 was lost")
    decided = RecoveryDecided(
        at=101, replica=0, attempt=0, action="restart in place", failed_at=101, finding=lost, recomputed_s=7800
    )
    assert (
        EventLineFilter()
        .lines_for(decided)[-1]
        .endswith(
            "decision: restart in place; the program has no Session: unless it loads its own checkpoint, "
            "it repeats the last 2 h 10 min"
        )
    )


def test_clock_that_goes_back_does_not_silence_steps() -> None:
    line_filter = EventLineFilter()
    assert line_filter.lines_for(step(1, 1000))
    assert line_filter.lines_for(step(2, 10))


def test_internal_events_and_expected_exits_are_not_printed() -> None:
    quiet = RankExited(at=1, node=0, replica=0, attempt=0, rank=0, reason=ExitReason.CODE, code=0)
    stopped = RankExited(at=1, node=0, replica=0, attempt=0, rank=0, reason=ExitReason.SIGNAL, code=9, stopped=True)
    died = RankExited(at=1, node=0, replica=0, attempt=0, rank=0, reason=ExitReason.SIGNAL, code=9)
    line_filter = EventLineFilter()
    assert [len(line_filter.lines_for(event)) for event in (quiet, stopped, died)] == [0, 0, 1]
    assert line_filter.lines_for(ControllerStarted(at=1, pid=1, incarnation="c")) == []
