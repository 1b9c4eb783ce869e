"""Programs broken on purpose under plain torchrun: its log as it is, and the same with a file for each rank."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from holdfast.diagnose.answer import Answer
from holdfast.diagnose.classes import Class
from holdfast.diagnose.pile import Pile
from holdfast.diagnose.pipeline import diagnose

FOLDER = Path(__file__).parents[1] / "incidents" / "torchrun"
_OF_RANK = re.compile(r"\[default(\d)\]:(.*)")

BROKEN: dict[str, tuple[Class, str, int | None]] = {
    "not-a-number": (Class.NAN_DATA, "not-a-number", 1),
    "killed": (Class.UNKNOWN, "killed", 1),
    "segmentation-fault": (Class.UNKNOWN, "segfault", 1),
    "missing-file": (Class.PROGRAM_ERROR, "file-not-found", 1),
    "damaged-parquet": (Class.NAN_DATA, "bad-data", 1),
    "data-worker-killed": (Class.UNKNOWN, "data-worker-killed", 1),
    "own-module": (Class.PROGRAM_ERROR, "module-not-found", None),
    "no-gpu": (Class.NOT_STARTED, "no-nvidia-driver", None),
    "shapes-differ": (Class.COLLECTIVE_MISMATCH, "collective-differs", None),
    "returned-early": (Class.UNKNOWN, "connection-closed", None),
    "ended-without-a-word": (Class.UNKNOWN, "connection-closed", 1),
    "disk-full-saving": (Class.STORAGE, "storage-full", 1),
    "disk-full": (Class.STORAGE, "storage-full", 1),
    "stands-still": (Class.UNKNOWN, "gloo-timeout", None),
    "port-in-use": (Class.RENDEZVOUS, "port-in-use", None),
    "wrong-port": (Class.RENDEZVOUS, "rendezvous-timeout", None),
    "wrong-address": (Class.RENDEZVOUS, "name-resolution", None),
}
"""Class, deciding rule, and who was first where the lines say it; `unknown` where the log holds no cause."""
APART = {"stands-still": (Class.COLLECTIVE_MISMATCH, "never-entered", 1)}
"""What a file for each rank adds: that a rank wrote nothing of waiting."""


@pytest.mark.parametrize("name", BROKEN)
def test_broken_program_is_named_with_its_lines_and_what_to_do(name: str) -> None:
    _right(diagnose(Pile((FOLDER / f"{name}.log",))), name)


@pytest.mark.parametrize("name", BROKEN)
def test_a_file_for_each_rank_says_the_same(name: str, tmp_path: Path) -> None:
    files: dict[str, list[str]] = {"launcher.log": []}
    for line in (FOLDER / f"{name}.log").read_text().splitlines():
        found = _OF_RANK.match(line)
        files.setdefault(f"rank-{found[1]}.log" if found else "launcher.log", []).append(found[2] if found else line)
    for file, lines in files.items():
        (tmp_path / file).write_text("\n".join(lines))
    answer = diagnose(Pile((tmp_path,)))
    klass, code, rank = APART.get(name, BROKEN[name])
    assert answer.klass is klass
    assert klass is Class.UNKNOWN or answer.code == code
    assert rank is None or (answer.culprit is not None and answer.culprit.rank == rank)


def _right(answer: Answer, name: str) -> None:
    klass, code, rank = BROKEN[name]
    assert (answer.klass, answer.code) == (klass, code)
    assert (answer.culprit.rank if answer.culprit else None) == rank
    assert answer.evidence
    assert answer.remedy or answer.missing
    assert answer.klass is not Class.UNKNOWN or answer.missing


def test_every_log_is_asked_for() -> None:
    assert {path.stem for path in FOLDER.glob("*.log")} == set(BROKEN)


def test_launchers_own_script_is_not_the_users_code() -> None:
    assert "torchrun:" not in diagnose(Pile((FOLDER / "port-in-use.log",))).what


def test_what_a_launcher_says_of_an_end_is_raised_nowhere() -> None:
    """The traceback above it is of the rank that lost its peer."""
    assert "prog.py" not in diagnose(Pile((FOLDER / "killed.log",))).what
