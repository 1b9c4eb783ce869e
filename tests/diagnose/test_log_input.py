"""What becomes of files, folders and packed files, however large or broken."""

from __future__ import annotations

import gzip
import io
import json
import os
import subprocess
from pathlib import Path

import pytest
import zstandard

from holdfast.diagnose import log_input as piles
from holdfast.diagnose.log_input import LARGE_BYTES, LogInput
from holdfast.diagnose.pipeline import diagnose
from holdfast.diagnose.structured import structured_files

TEXT = b"".join(b"line %d\n" % number for number in range(100_000))


def read(*paths: Path) -> tuple[bytes, LogInput]:
    pile = LogInput(paths)
    return b"".join(block.data for block in pile.chunks()), pile


def test_blocks_are_whole_lines_with_their_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(piles, "CHUNK_BYTES", 1000)
    (tmp_path / "log").write_bytes(TEXT)
    expected = 1
    for block in LogInput((tmp_path / "log",)).chunks():
        assert int(block.first_line) == expected
        assert block.data.startswith(b"line %d\n" % (expected - 1))
        assert block.data.endswith(b"\n")
        expected += block.data.count(b"\n")
    assert expected == 100_001


@pytest.mark.parametrize("through", ["a file", "standard input"])
def test_lines_are_numbered_behind_one_that_is_cut(
    through: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(piles, "CHUNK_BYTES", 1000)
    monkeypatch.setattr(piles, "LINE_BYTES", 3000)
    data = TEXT[:5000] + b"x" * 10_000 + b"\n" + TEXT
    path = tmp_path / "log"
    path.write_bytes(data)
    pile = LogInput((Path("-"),), stdin=io.BytesIO(data)) if through == "standard input" else LogInput((path,))
    blocks = list(pile.chunks())
    assert any("very long" in note for note in pile.notes)
    lines = data.split(b"\n")
    for block in (*blocks[::-1], *blocks):  # asked for in any order
        first = block.data.split(b"\n", 1)[0]
        assert lines[int(block.first_line) - 1].startswith(first[:3000])


@pytest.mark.parametrize("pack", [gzip.compress, zstandard.ZstdCompressor().compress])
def test_packed_file_reads_as_its_text(tmp_path: Path, pack) -> None:
    (tmp_path / "log.packed").write_bytes(pack(TEXT) + pack(b"more\n"))
    assert read(tmp_path)[0] == TEXT + b"more\n"


@pytest.mark.parametrize("pack", [gzip.compress, zstandard.ZstdCompressor().compress])
def test_torn_packed_file_is_read_up_to_there_and_said(tmp_path: Path, pack) -> None:
    packed = pack(bytes(range(32, 127)) * 10 + TEXT)
    (tmp_path / "log.packed").write_bytes(packed[: len(packed) // 2])
    data, pile = read(tmp_path)
    assert TEXT.startswith(data[950:]) if len(data) > 950 else True
    assert data or pile.notes


@pytest.mark.parametrize("bomb", [b"x\n", b"xx"], ids=["lines", "one line"])
def test_packed_bomb_is_left_at_its_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bomb: bytes) -> None:
    monkeypatch.setattr(piles, "UNPACKED_BYTES", 1 << 20)
    monkeypatch.setattr(piles, "CHUNK_BYTES", 1 << 16)
    (tmp_path / "bomb.gz").write_bytes(gzip.compress(bomb * (8 << 20)))
    data, pile = read(tmp_path)
    assert len(data) <= (1 << 20) + (1 << 16)
    assert pile.bytes <= (1 << 20) + (1 << 16)
    assert any("only the first" in note for note in pile.notes)


def test_many_packed_bombs_are_left_at_one_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(piles, "UNPACKED_TOTAL_BYTES", 1 << 20)
    monkeypatch.setattr(piles, "CHUNK_BYTES", 1 << 16)
    for number in range(20):
        (tmp_path / f"bomb-{number}.gz").write_bytes(gzip.compress(b"x\n" * (1 << 17)))
    _, pile = read(tmp_path)
    assert pile.bytes <= (1 << 20) + (1 << 16)


def test_stream_without_end_is_left_at_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(piles, "STREAM_BYTES", 1 << 20)
    with subprocess.Popen(["yes", "step 1 loss 2.1"], stdout=subprocess.PIPE) as endless:
        assert endless.stdout is not None
        pile = LogInput((Path("-"),), stdin=endless.stdout)
        assert sum(len(block.data) for block in pile.chunks()) >= 1 << 20
        endless.kill()
    assert any("only the first" in note for note in pile.notes)


def test_folder_of_what_is_no_file_is_passed_over_and_said(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    (tmp_path / "round").symlink_to(tmp_path)
    (tmp_path / "itself").symlink_to("itself")
    (tmp_path / "log").write_bytes(b"the end\n")
    data, pile = read(tmp_path)
    assert data == b"the end\n"
    assert sum("a device or a file of /proc" in note for note in pile.notes) == 2


def test_pipe_that_is_asked_for_is_read_and_one_that_nobody_writes_to_is_empty(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert read(tmp_path / "pipe")[0] == b""
    reader, writer = os.pipe()
    os.write(writer, b"the end\n")
    os.close(writer)
    assert read(Path(f"/dev/fd/{reader}"))[0] == b"the end\n"
    os.close(reader)


def test_document_of_too_many_values_is_read_as_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(structured_files, "MAX_VALUES", 1000)
    (tmp_path / "pods.json").write_bytes(b'{"kind": "List", "items": [' + b"{}," * 2000 + b"{}]}\n")
    data, _ = read(tmp_path)
    assert data.startswith(b'{"kind"')


def test_very_long_line_is_cut_and_the_next_is_read(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"a" * (10 << 20) + b"\nthe end\n")
    data, pile = read(tmp_path)
    assert data.endswith(b"\nthe end\n")
    assert len(data) < 5 << 20
    assert data.count(b"\n") == 2
    assert any("very long lines" in note for note in pile.notes)


def test_binary_file_is_passed_over_and_said(tmp_path: Path) -> None:
    (tmp_path / "core").write_bytes(b"\x7fELF\0\0" * 100)
    (tmp_path / "log").write_bytes(b"text\n")
    data, pile = read(tmp_path)
    assert data == b"text\n"
    assert pile.notes == ["not read: 1 files that are no text"]


def test_utf_16_is_read(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes("\ufeffone\ntwo\n".encode("utf-16-le"))
    assert read(tmp_path)[0].decode().lstrip("\ufeff") == "one\ntwo\n"


def test_place_of_a_log_says_rank_and_replica(tmp_path: Path) -> None:
    for name in ("replica-1-attempt-0/rank-3.log", "attempt-0/rank-4.log"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("x\n")
    files = sorted(tmp_path.rglob("*.log"))
    for pile in (LogInput((tmp_path,)), LogInput(tuple(files))):
        sources = [block.source for block in pile.chunks()]
        assert [(source.rank, source.replica) for source in sources] == [(4, None), (3, 1)]


def test_standard_input_is_a_source() -> None:
    blocks = list(LogInput((Path("-"),), stdin=io.BytesIO(b"a\nb")).chunks())
    assert [(block.source.name, block.data) for block in blocks] == [("-", b"a\n"), ("-", b"b")]


@pytest.mark.parametrize(
    ("name", "rank", "node"),
    [
        ("rank-3.log", 3, None),
        ("attempt-0/rank_12.out", 12, None),
        ("node1.0/agent.log", None, "node1"),
        ("logs/worker-4.log", None, "worker-4"),
        ("train.log", None, None),
    ],
)
def test_path_says_rank_and_node(tmp_path: Path, name: str, rank: int | None, node: str | None) -> None:
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text("x\n")
    (block,) = LogInput((tmp_path,)).chunks()
    assert (block.source.rank, block.source.node) == (rank, node)


FLIGHT = Path(__file__).parents[1] / "incidents" / "flight"


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
@pytest.mark.parametrize("ending", ["", ".json"])
def test_flight_recorder_dumps_are_compared(tmp_path: Path, pack, ending: str) -> None:
    for rank in range(3):
        dump = (FLIGHT / f"trace_rank_{rank}{ending}").read_bytes()
        (tmp_path / f"trace_rank_{rank}").write_bytes(pack(dump))
    answer = diagnose(LogInput((tmp_path,)))
    assert (answer.code, answer.first_failure and answer.first_failure.rank) == ("flight-behind", 1)


def test_error_file_of_torchrun_is_told_as_lines(tmp_path: Path) -> None:
    message = {"message": "CUDA out of memory. Tried to allocate 2 GiB", "extraInfo": {"py_callstack": "Traceback x"}}
    (tmp_path / "error.json").write_text(json.dumps({"message": message}))
    assert b"CUDA out of memory" in read(tmp_path)[0]


@pytest.mark.parametrize("begin", [b'{"kind": "Pod", "items"', b'{"pg_config": ', b"\x80\x04pg_config"])
def test_what_only_begins_like_a_document_is_read_as_text(tmp_path: Path, begin: bytes) -> None:
    (tmp_path / "log").write_bytes(begin + b" no more\nnext\n")
    assert b"no more\nnext\n" in read(tmp_path)[0]


def test_document_that_is_too_large_is_read_as_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.diagnose.structured.structured_files.DOCUMENT_BYTES", 1000)
    text = b'{"kind": "Pod",\n' + TEXT
    (tmp_path / "log").write_bytes(text)
    assert read(tmp_path)[0] == text


@pytest.mark.parametrize(
    ("name", "size", "is_large"),
    [
        ("a.log", LARGE_BYTES, False),
        ("a.log", LARGE_BYTES + 1, True),
        ("a.log.zst", LARGE_BYTES // 8, True),
        ("missing.log", None, True),
    ],
)
def test_input_is_large_by_the_size_of_its_files(name: str, size: int | None, is_large: bool, tmp_path: Path) -> None:
    path = tmp_path / "logs" / name
    path.parent.mkdir()
    if size is not None:
        path.touch()
        os.truncate(path, size)
    assert LogInput((path,)).is_large() is is_large
    assert size is None or LogInput((path.parent,)).is_large() is is_large
