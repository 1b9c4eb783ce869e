"""Episodes of symptoms, and the loop that reads sources when they are due."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field

import pytest

from holdfast.watch.monitor import (
    MAX_REPORTS,
    AnyMonitor,
    Episodes,
    Monitor,
    Polled,
    SourceMissing,
    Symptom,
    comparing,
    updated,
)
from holdfast.watch.monitor_loop import MAX_FAILURES, MIN_REST_S, Latest, MonitorLoop, Opened

DEADLINE_S = 60.0


def symptom(device: str = "d", *, begins: bool = True, readings: int = 1, clear_s: float = 10.0) -> Symptom:
    return Symptom(code="c", device=device, what="w", remedy="r", begins=begins, readings=readings, clear_s=clear_s)


def reported(stream: Iterable[Symptom | None]) -> list[int]:
    """The seconds at which a symptom is reported, one reading a second."""
    episodes, found = Episodes(), list[int]()
    for at_s, each in enumerate(stream):
        episodes, new = updated(episodes, [] if each is None else [each], float(at_s))
        found += [at_s] * len(new)
    return found


def test_symptom_is_reported_once_for_each_episode() -> None:
    there = symptom()
    assert reported([None, there, there, None, there, *[None] * 9, there]) == [1]
    assert reported([there, *[None] * 10, there]) == [0, 11]
    assert reported([symptom(clear_s=0.0), None, symptom(clear_s=0.0)]) == [0, 2]


def test_symptom_that_needs_several_readings_needs_them_in_a_row() -> None:
    there = symptom(readings=3)
    assert reported([there, there, None, there, there, None]) == []
    assert reported([there, there, there, there]) == [2]


def test_weaker_symptom_prolongs_an_episode_and_begins_none() -> None:
    there, weak = symptom(clear_s=0.0), symptom(begins=False, clear_s=0.0)
    assert reported([weak, weak, there, weak, weak, there, None, weak, there]) == [2, 8]


def test_devices_have_episodes_of_their_own_and_a_limit() -> None:
    episodes, found = updated(Episodes(), [symptom("a"), symptom("b")], 0.0)
    assert [each.device for each in found] == ["a", "b"]
    assert updated(episodes, [symptom("a"), symptom("b")], 1.0)[1] == ()
    assert len(reported([symptom(clear_s=0.0), None] * (3 * MAX_REPORTS))) == MAX_REPORTS


@dataclass
class Fake:
    """A source, whose readings a test sets, and the time."""

    now: float = 100.0
    value: object = None
    error: Exception | None = None
    read_at: list[float] = field(default_factory=list[float])
    found: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])

    def row(self, name: str = "s", period_s: float = 5.0) -> AnyMonitor:
        def read(at_s: float) -> object:
            self.read_at.append(at_s)
            if self.error is not None:
                raise self.error
            return self.value

        def judge(_before: object, now: object) -> list[Symptom]:
            return [symptom(str(now))] if now else []

        return Monitor(source=name, period_s=period_s, open=lambda: Polled(function=read), judge=comparing(judge))

    def loop(self, *rows: AnyMonitor) -> MonitorLoop:
        loop = MonitorLoop(rows, lambda source, each: self.found.append((source, each.device)), clock=lambda: self.now)
        loop.open()
        return loop


def missing() -> Polled[object]:
    raise SourceMissing("there is none")


ABSENT: AnyMonitor = Monitor(
    source="absent", period_s=1.0, open=missing, judge=comparing(lambda _before, now: [symptom(str(now))])
)


def test_source_is_read_when_it_is_due() -> None:
    fake = Fake()
    loop = fake.loop(fake.row())
    assert loop.step() == 5.0
    fake.now += 2.0
    assert loop.step() == 3.0
    fake.now, fake.value = fake.now + 3.0, "hot"
    loop.step()
    assert (fake.read_at, fake.found) == ([100.0, 105.0], [("s", "hot")])
    fake.now += 2.0
    assert loop.latest() == {"s": Latest(age_s=2.0, reading="hot")}


def test_missing_source_is_named_and_never_read() -> None:
    fake = Fake()
    loop = MonitorLoop([ABSENT, fake.row()], lambda _source, _symptom: None)
    assert loop.open() == Opened(present=("s",), missing={"absent": "there is none"})
    idle = MonitorLoop([ABSENT], lambda _source, _symptom: None)
    idle.open()
    assert idle.step() > 1000.0


def test_source_that_fails_again_and_again_is_given_up_and_the_others_are_read_on() -> None:
    fake, other = Fake(error=OSError("gone")), Fake()
    other.row()
    loop = fake.loop(fake.row("bad"), other.row("good"))
    for _ in range(MAX_FAILURES + 3):
        loop.step()
        fake.now += 5.0
    assert (len(fake.read_at), len(other.read_at)) == (MAX_FAILURES, MAX_FAILURES + 3)


@pytest.mark.parametrize("source", ["s", "absent"])
def test_overlay_changes_what_is_read_for_a_time(source: str) -> None:
    fake = Fake()
    loop = fake.loop(fake.row(), ABSENT)
    loop.step()
    loop.overlay(source, lambda reading, at_s: f"{reading} at {at_s:g}", 7.0)
    loop.step()
    fake.now += 8.0
    loop.step()
    assert fake.found == [(source, "None at 100")]
    assert loop.step() == 5.0


def test_thread_reads_at_once_what_a_descriptor_announces() -> None:
    reading, writing = os.pipe2(os.O_NONBLOCK)

    class Pipe:
        def read(self, at_s: float) -> bytes:
            try:
                return os.read(reading, 100)
            except BlockingIOError:
                return b""

        def descriptor(self) -> int:
            return reading

        def close(self) -> None:
            os.close(reading)

    row: AnyMonitor = Monitor(
        source="pipe",
        period_s=1e6,
        open=Pipe,
        judge=comparing(lambda _before, now: [symptom(now.decode())] if now else []),
    )
    found: queue.Queue[str] = queue.Queue()
    opened = threading.Event()
    loop = MonitorLoop([row], lambda _, each: found.put(each.device))
    loop.start(lambda _: opened.set())
    assert opened.wait(DEADLINE_S)
    for text in ("one", "two", "three"):
        os.write(writing, text.encode())
        assert found.get(timeout=DEADLINE_S) == text
    loop.stop()
    os.close(writing)
    assert MIN_REST_S < 1.0
