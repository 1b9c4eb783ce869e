"""Which files are opened, and from where on they are read: holes, binary beginnings, devices, deep folders."""

from __future__ import annotations

import io
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.diagnose.failure_classes import FailureClass
from holdfast.diagnose.log_input import LogInput
from holdfast.diagnose.pipeline import diagnose

HOLE = 3 << 20
ERROR = (
    b"epoch 1\nTraceback (most recent call last):\n  File \"train.py\", line 7, in step\n    x\nKeyError: 'tokens'\n"
)
STEPS = b"".join(b"step %d loss 2.31\n" % step for step in range(20_000))
NOISE = bytes(range(256)) * 64


@pytest.mark.slow
def test_log_that_begins_with_a_hole_is_read_behind_it_and_its_lines_are_counted(tmp_path: Path) -> None:
    log = tmp_path / "rank-0.log"
    with log.open("wb") as file:  # dropped, kept, dropped in the middle, and an end that was never written
        file.truncate(4 << 40)
        file.seek(HOLE - 700)
        file.write(b"\0" * 700 + STEPS)
        file.seek(1 << 40)
        file.write(STEPS + ERROR)
        file.truncate(file.tell())
    answer = diagnose(LogInput((tmp_path,)))
    assert (answer.failure_class, answer.evidence[0].where) == (FailureClass.PROGRAM_ERROR, f"{log}:40005")
    assert any("begins with a hole" in note and "logs.max_bytes" in note for note in answer.notes)
    piped = diagnose(LogInput((Path("-"),), stdin=io.BytesIO(bytes(HOLE) + STEPS + ERROR)))
    assert (piped.failure_class, piped.evidence[0].where) == (FailureClass.PROGRAM_ERROR, "-:20005")


def test_log_of_nothing_but_a_hole_holds_no_text(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as file:
        file.truncate(1 << 42)
    pile = LogInput((tmp_path,))
    assert b"".join(block.data for block in pile.chunks()) == b""


@pytest.mark.slow
@pytest.mark.parametrize("through", ["a file", "a pipe"])
@pytest.mark.parametrize("data", [NOISE + STEPS + ERROR, NOISE[:3000] + STEPS[:100] + ERROR], ids=["large", "small"])
def test_log_that_begins_with_binary_output_is_read(tmp_path: Path, through: str, data: bytes) -> None:
    (tmp_path / "log").write_bytes(data)
    pile = LogInput((tmp_path,)) if through == "a file" else LogInput((Path("-"),), stdin=io.BytesIO(data))
    answer = diagnose(pile)
    assert (answer.failure_class, answer.what) == (
        FailureClass.PROGRAM_ERROR,
        "the program raised KeyError: 'tokens', at train.py:7 in step",
    )


@pytest.mark.parametrize(
    "data",
    [b"\x7fELF\2\1\1" + bytes(9) + STEPS, b"\x98\x01\0\0\0\0\0\0" + b'{"w":{"dtype":"BF16"}}\n' * 100, NOISE * 64],
    ids=["core", "safetensors", "noise"],
)
def test_file_that_is_no_log_is_passed_over(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "file").write_bytes(data)
    pile = LogInput((tmp_path,))
    assert list(pile.chunks()) == []
    assert pile.notes == ["not read: 1 files that are no text"]


def test_files_of_proc_and_devices_are_named_and_never_waited_for(tmp_path: Path) -> None:
    if Path("/proc/kmsg").exists():
        (tmp_path / "kmsg").symlink_to("/proc/kmsg")
    (tmp_path / "maps").symlink_to("/proc/self/maps")
    (tmp_path / "full").symlink_to("/dev/full")
    (tmp_path / "log").write_bytes(ERROR)
    answer = diagnose(LogInput((tmp_path, Path("/dev/zero"))))
    assert answer.failure_class is FailureClass.PROGRAM_ERROR
    named = {note.split(" ")[0] for note in answer.notes if "a file of /proc" in note}
    assert {f"{tmp_path}/maps", f"{tmp_path}/full", "/dev/zero"} <= named


@pytest.fixture
def deep(tmp_path: Path) -> Iterator[Path]:
    """A folder that is gone after the test: pytest's own way to remove it recurses, and fails on what is too deep."""
    folder = tmp_path / "deep"
    folder.mkdir()
    yield folder
    subprocess.run(["rm", "-rf", folder], check=True)


def test_folder_deeper_than_python_recurses_is_read_and_one_too_deep_for_a_path_is_named(deep: Path) -> None:
    here = os.open(deep, os.O_RDONLY)
    for depth in range(1100):
        name = "d" if depth < 1050 else "d" * 100
        os.mkdir(name, dir_fd=here)
        below = os.open(name, os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
        if depth == 1040:
            with open(os.open("log", os.O_WRONLY | os.O_CREAT, dir_fd=here), "wb") as file:
                file.write(ERROR)
    os.close(here)
    answer = diagnose(LogInput((deep,)))
    assert answer.failure_class is FailureClass.PROGRAM_ERROR
    assert any("File name too long" in note for note in answer.notes)
