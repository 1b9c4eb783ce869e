"""The event log: appended, torn at worst in its last line, and read by versions that do not know all of it."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import time
import zlib
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.conftest import SmallDisk, fill

from holdfast.events import AgentDisconnected, AnyEvent, NodeTerminated, RunCreated, RunFinished
from holdfast.events.controller_events import FORMAT, Outcome
from holdfast.events.log import (
    BLOCK_BYTES,
    EventReader,
    UnsupportedFormat,
    encode_line,
    is_intact,
    last_event,
    line_of,
    read_events,
)
from holdfast.events.log_writer import AnotherWriter, EventWriter
from holdfast.host.files import UnexpectedFile

CREATED = RunCreated(at=1.0, run="test-abc", job={"command": ["true"]})
GONE = NodeTerminated(at=2.0, node=1, generation=0, reason="its agent is gone")
LEFT = AgentDisconnected(at=3.0, node=1, generation=0, incarnation="4f2c")
FINISHED = RunFinished(at=4.0, outcome=Outcome.SUCCEEDED, exit_code=0)


def written(path: Path, *events: AnyEvent) -> bytes:
    writer = EventWriter(path)
    writer.append(events)
    writer.close()
    return path.read_bytes()


def test_first_line_names_the_format(tmp_path: Path) -> None:
    first = written(tmp_path / "log", CREATED, GONE).splitlines()[0]
    assert msgspec.json.decode(first)["type"] == "run-created"
    assert msgspec.json.decode(first)["format"] == FORMAT


def test_events_come_back_as_they_went_in(tmp_path: Path) -> None:
    events = [CREATED, GONE, LEFT, FINISHED]
    written(tmp_path / "log", *events)
    assert read_events(tmp_path / "log") == events


@pytest.mark.parametrize(
    ("other", "told"), [((CREATED, GONE, LEFT), [LEFT]), ((CREATED, LEFT), [CREATED, LEFT]), ((CREATED,), [CREATED])]
)
def test_log_that_takes_anothers_place_is_read_on_where_it_begins_alike_else_anew(
    tmp_path: Path, other: tuple[AnyEvent, ...], told: list[AnyEvent]
) -> None:
    written(tmp_path / "log", CREATED, GONE)
    written(tmp_path / "other", *other)
    reader = EventReader(tmp_path / "log")
    assert list(reader.read()) == [CREATED, GONE]
    (tmp_path / "other").rename(tmp_path / "log")
    assert [*reader.read(), *reader.read()] == told


@given(cut=st.integers(min_value=0))
def test_log_cut_anywhere_loses_only_its_torn_line(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    path = tmp_path_factory.mktemp("log") / "log"
    whole = written(path, CREATED, GONE, LEFT)
    cut %= len(whole) + 1
    path.write_bytes(whole[:cut])
    complete = whole[:cut].count(b"\n")
    assert read_events(path) == [CREATED, GONE, LEFT][:complete]
    written(path, FINISHED)
    assert read_events(path) == [*[CREATED, GONE, LEFT][:complete], FINISHED]


def test_reader_waits_for_the_end_of_a_line(tmp_path: Path) -> None:
    path = tmp_path / "log"
    line = written(path, GONE)
    path.write_bytes(line[:-10])
    reader = EventReader(path)
    assert list(reader.read()) == []
    path.write_bytes(line)
    assert list(reader.read()) == [GONE]
    assert list(reader.read()) == []


def line(body: bytes) -> bytes:
    """A line as a later version might write it: sealed as ours are."""
    return b'%s,"crc":"%08x"}\n' % (body, zlib.crc32(body))


def test_unknown_events_and_fields_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "log"
    later = line(b'{"type":"from-the-future","at":1.5,"x":1')
    more = line(
        b'{"type":"node-terminated","at":2.0,"node":1,"generation":0,"reason":"its agent is gone","colour":"red"'
    )
    path.write_bytes(written(path, CREATED) + later + more)
    reader = EventReader(path)
    assert list(reader.read()) == [CREATED, GONE]
    assert reader.corrupt_spans == []
    assert is_intact(path)


@given(bit=st.integers(min_value=0))
def test_flipped_bit_is_passed_over_counted_and_never_believed(
    tmp_path_factory: pytest.TempPathFactory, bit: int
) -> None:
    path = tmp_path_factory.mktemp("log") / "log"
    content = bytearray(written(path, CREATED, GONE, LEFT, FINISHED))
    bit %= 8 * (len(content) - 1)  # the last newline is what a line that is being written lacks
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)
    reader = EventReader(path)
    read = list(reader.read())
    assert all(event in (CREATED, GONE, LEFT, FINISHED) for event in read)
    assert 1 <= reader.corrupt_line_count <= 2
    assert 2 <= len(read) <= 3  # a lost newline takes the lines on both of its sides
    assert not is_intact(path)


def test_zeroed_block_is_one_place_of_damage_with_its_neighbours_whole(tmp_path: Path) -> None:
    path = tmp_path / "log"
    content = bytearray(written(path, CREATED, *[GONE] * 100, FINISHED))
    content[1000:5096] = bytes(4096)
    path.write_bytes(content)
    reader = EventReader(path)
    read = list(reader.read())
    (damage,) = reader.corrupt_spans
    assert (read[0], read[-1]) == (CREATED, FINISHED)
    assert damage.offset <= 1000 < 5096 <= damage.offset + damage.size_bytes


def test_line_without_a_crc_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(written(path, CREATED) + b'{"type":"run-finished","at":4.0,"outcome":"succeeded","exit_code":0}\n')
    reader = EventReader(path)
    assert list(reader.read()) == [CREATED]
    assert [(damage.first_line, damage.last_line) for damage in reader.corrupt_spans] == [(2, 2)]
    assert last_event(path) is None


@pytest.mark.parametrize("format", [1, 99])
def test_log_of_another_format_is_refused_by_name(tmp_path: Path, format: int) -> None:
    path = tmp_path / "log"
    written(path, msgspec.structs.replace(CREATED, format=format))
    with pytest.raises(UnsupportedFormat, match=f"format {format}"):
        read_events(path)


def test_log_of_the_format_before_is_read_where_the_release_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "log"
    written(path, older := msgspec.structs.replace(CREATED, format=FORMAT))
    for newest, oldest, reads in ((FORMAT + 1, FORMAT, True), (FORMAT + 2, FORMAT + 1, False)):
        monkeypatch.setattr("holdfast.events.log.FORMAT", newest)
        monkeypatch.setattr("holdfast.events.log.OLDEST_FORMAT", oldest)
        if reads:
            assert read_events(path) == [older]
        else:
            with pytest.raises(UnsupportedFormat, match=f"reads format {oldest} and {newest}"):
                read_events(path)


@pytest.mark.parametrize("size", [0, 1, BLOCK_BYTES - 1, BLOCK_BYTES, 3 * BLOCK_BYTES])
def test_last_event_is_found_from_the_end(tmp_path: Path, size: int) -> None:
    path = tmp_path / "log"
    assert last_event(path) is None
    long = msgspec.structs.replace(GONE, reason="x" * size)
    written(path, CREATED, long)
    assert last_event(path) == long
    with path.open("ab") as file:
        file.write(b'{"type":"torn')
    assert last_event(path) == long
    written(path, FINISHED)
    assert last_event(path) == FINISHED


@pytest.mark.root
def test_full_disk_takes_no_half_line_and_what_comes_later_is_whole(small_disk: SmallDisk) -> None:
    disk = small_disk(64 << 10)
    path = disk / "log"
    writer = EventWriter(path, reservation_bytes=0)
    writer.append([CREATED])
    ballast = fill(disk)
    with pytest.raises(OSError, match="No space left"):
        writer.append([msgspec.structs.replace(GONE, reason="x" * 8192)])
    ballast.unlink()
    writer.append([LEFT])
    writer.close()
    assert read_events(path) == [CREATED, LEFT]


@pytest.mark.root
def test_space_kept_for_the_log_outlasts_a_full_disk_and_its_writer(small_disk: SmallDisk) -> None:
    disk = small_disk(1 << 20)
    path = disk / "log"
    writer = EventWriter(path, reservation_bytes=128 << 10, shutdown_reservation_bytes=64 << 10)
    writer.append([CREATED])
    assert writer.space_error is None
    fill(disk)
    long = msgspec.structs.replace(GONE, reason="x" * 1000)
    writer.append([long] * 5)  # from here on a successor has what is left
    writer = EventWriter(path, reservation_bytes=128 << 10, shutdown_reservation_bytes=64 << 10)
    written = 5
    with contextlib.suppress(OSError):
        while written < 1000:
            writer.append([long])
            written += 1
    assert 20 < written < 1000
    assert writer.space_error is not None
    writer.append([FINISHED], ending=True)
    writer.close()
    assert read_events(path) == [CREATED, *[long] * written, FINISHED]


@pytest.mark.root
def test_shortage_ends_when_there_is_room_again(small_disk: SmallDisk) -> None:
    disk = small_disk(256 << 10)
    writer = EventWriter(disk / "log", reservation_bytes=64 << 10, shutdown_reservation_bytes=0)
    ballast = fill(disk)
    while writer.space_error is None:
        writer.append([GONE] * 10)
    ballast.unlink()
    writer.append([GONE])
    assert writer.space_error is None
    writer.close()
    assert (disk / "log").stat().st_blocks * 512 < (disk / "log").stat().st_size + 8192


def test_writer_that_finds_anothers_lines_writes_nothing_more(tmp_path: Path) -> None:
    first, second = EventWriter(tmp_path / "log"), EventWriter(tmp_path / "log")
    first.append([CREATED])
    with pytest.raises(AnotherWriter):
        second.append([GONE])
    third = EventWriter(tmp_path / "log")
    third.append([GONE])
    for stale in (first, second):
        with pytest.raises(AnotherWriter):
            stale.append([FINISHED], sync=True, ending=True)
        with pytest.raises(AnotherWriter):
            stale.check()
        stale.close()
    third.append([LEFT])
    assert read_events(tmp_path / "log") == [CREATED, GONE, LEFT]


def _foreign(log: Path, how: str) -> None:
    """Change a log as no controller does."""
    match how:
        case "a byte":
            with log.open("ab") as file:
                file.write(b"x")
        case "a line":
            with log.open("ab") as file:
                file.write(b'{"type":"no event"}\n')
        case "emptied":
            os.truncate(log, 0)
        case "cut in a line":
            os.truncate(log, log.stat().st_size - 7)
        case "removed":
            log.unlink()
        case "saved by an editor":
            log.with_suffix(".tmp").write_bytes(log.read_bytes())
            log.with_suffix(".tmp").rename(log)
        case "saved without a line":
            log.with_suffix(".tmp").write_bytes(b"".join(log.read_bytes().splitlines(keepends=True)[1:]))
            log.with_suffix(".tmp").rename(log)
        case "its own line":
            with log.open("ab") as file:
                file.write(log.read_bytes().splitlines(keepends=True)[-1])
        case "folder removed":
            shutil.rmtree(log.parent)
        case "replaced by text":
            log.unlink()
            log.write_text("not a log\n")
        case _:
            log.unlink()
            os.mkfifo(log)


CHANGES = ["a byte", "a line", "emptied", "cut in a line", "removed", "replaced by text", "replaced by a fifo"]
OWN_LINES = ["saved by an editor", "saved without a line", "its own line", "folder removed"]


@pytest.mark.parametrize("how", [*CHANGES, *OWN_LINES])
def test_log_that_no_controller_changed_is_put_back_by_its_writer(tmp_path: Path, how: str) -> None:
    log = tmp_path / "run" / "log"
    log.parent.mkdir(mode=0o700)
    first = EventWriter(log)
    first.append([CREATED])
    first.close()
    writer = EventWriter(log)
    writer.append([GONE])
    before = log.read_bytes()
    _foreign(log, how)
    writer.check()
    assert log.read_bytes() == before
    assert [repair.size_bytes > 0 for repair in writer.repairs] == [True]
    _foreign(log, how)
    writer.append([FINISHED], sync=True)
    assert read_events(log) == [CREATED, GONE, FINISHED]
    assert len(writer.repairs) == 2
    writer.close()
    assert [*log.parent.iterdir()] == [log]
    assert stat.S_IMODE(log.parent.stat().st_mode) == 0o700


def test_junk_that_does_not_cease_is_cut_off_and_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "log"
    writer = EventWriter(log)
    writer.append([CREATED])
    slept: list[float] = []

    def more_junk(seconds: float) -> None:
        slept.append(seconds)
        with log.open("ab") as file:
            file.write(b"junk\n")

    monkeypatch.setattr(time, "sleep", more_junk)
    more_junk(0.0)
    writer.append([GONE])
    assert read_events(log) == [CREATED, GONE]
    assert len(writer.repairs) == 1
    assert sum(slept) <= 0.05


def test_line_that_another_controller_is_writing_is_not_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "log"
    first = EventWriter(log)
    first.append([CREATED])
    line = encode_line(GONE)

    def write_the_rest(_: float) -> None:
        with log.open("ab") as file:
            file.write(line[10:])

    with log.open("ab") as file:
        file.write(line[:10])
    monkeypatch.setattr(time, "sleep", write_the_rest)
    with pytest.raises(AnotherWriter):
        first.check()
    assert read_events(log) == [CREATED, GONE]


def test_log_with_another_name_belongs_to_another_controller(tmp_path: Path) -> None:
    log = tmp_path / "log"
    first = EventWriter(log)
    first.append([CREATED])
    log.unlink()
    EventWriter(log).append([CREATED, GONE])
    with pytest.raises(AnotherWriter):
        first.append([FINISHED])
    assert read_events(log) == [CREATED, GONE]


def test_reader_of_a_log_that_was_cut_begins_anew_where_nobody_puts_it_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "log"
    written(log, CREATED, GONE, LEFT)
    reader = EventReader(log)
    assert list(reader.read()) == [CREATED, GONE, LEFT]
    whole = log.read_bytes()
    os.truncate(log, 0)
    assert list(reader.read()) == []
    log.write_bytes(whole + encode_line(FINISHED))
    assert list(reader.read()) == [FINISHED]
    log.write_bytes(encode_line(FINISHED))
    assert list(reader.read()) == []
    monkeypatch.setattr("holdfast.events.log.TRUNCATION_GRACE_S", 0.0)
    assert list(reader.read()) == [FINISHED]


def test_line_without_an_end_is_refused_however_long_it_is(tmp_path: Path) -> None:
    log = tmp_path / "log"
    written(log, CREATED)
    with log.open("ab") as file:
        file.truncate(1 << 40)
    for read in (read_events, is_intact, EventWriter):
        with pytest.raises(UnexpectedFile):
            read(log)


def test_line_of_an_event_is_found(tmp_path: Path) -> None:
    written(tmp_path / "log", CREATED, GONE, LEFT)
    assert [line_of(tmp_path / "log", event) for event in read_events(tmp_path / "log")] == [1, 2, 3]
    assert line_of(tmp_path / "log", FINISHED) == 0
