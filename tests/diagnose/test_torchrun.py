"""Programs broken on purpose under plain torchrun: its log as it is, and the same with a file for each rank."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from holdfast.diagnose.diagnosis import Diagnosis
from holdfast.diagnose.failure_classes import FailureClass
from holdfast.diagnose.log_input import LogInput
from holdfast.diagnose.pipeline import diagnose

FOLDER = Path(__file__).parents[1] / "incidents" / "torchrun"
_OF_RANK = re.compile(r"\[default(\d)\]:(.*)")

BROKEN: dict[str, tuple[FailureClass, str, int | None]] = {
    "not-a-number": (FailureClass.NAN_DATA, "not-a-number", 1),
    "killed": (FailureClass.UNKNOWN, "killed", 1),
    "segmentation-fault": (FailureClass.UNKNOWN, "segfault", 1),
    "missing-file": (FailureClass.PROGRAM_ERROR, "file-not-found", 1),
    "damaged-parquet": (FailureClass.NAN_DATA, "bad-data", 1),
    "data-worker-killed": (FailureClass.UNKNOWN, "data-worker-killed", 1),
    "own-module": (FailureClass.PROGRAM_ERROR, "module-not-found", None),
    "no-gpu": (FailureClass.NOT_STARTED, "no-nvidia-driver", None),
    "shapes-differ": (FailureClass.COLLECTIVE_MISMATCH, "collective-mismatch", None),
    "returned-early": (FailureClass.UNKNOWN, "connection-closed", None),
    "ended-without-a-word": (FailureClass.UNKNOWN, "connection-closed", 1),
    "disk-full-saving": (FailureClass.STORAGE, "storage-full", 1),
    "disk-full": (FailureClass.STORAGE, "storage-full", 1),
    "stands-still": (FailureClass.UNKNOWN, "gloo-timeout", None),
    "port-in-use": (FailureClass.RENDEZVOUS, "port-in-use", None),
    "wrong-port": (FailureClass.RENDEZVOUS, "rendezvous-timeout", None),
    "wrong-address": (FailureClass.RENDEZVOUS, "name-resolution", None),
}
"""Class, deciding rule, and who was first where the lines say it; `unknown` where the log holds no cause."""
APART = {"stands-still": (FailureClass.COLLECTIVE_MISMATCH, "collective-not-entered", 1)}
"""What a file for each rank adds: that a rank wrote nothing of waiting."""


@pytest.mark.parametrize("name", BROKEN)
def test_broken_program_is_named_with_its_lines_and_what_to_do(name: str) -> None:
    _right(diagnose(LogInput((FOLDER / f"{name}.log",))), name)


@pytest.mark.parametrize("name", BROKEN)
def test_a_file_for_each_rank_says_the_same(name: str, tmp_path: Path) -> None:
    files: dict[str, list[str]] = {"launcher.log": []}
    for line in (FOLDER / f"{name}.log").read_text().splitlines():
        found = _OF_RANK.match(line)
        files.setdefault(f"rank-{found[1]}.log" if found else "launcher.log", []).append(found[2] if found else line)
    for file, lines in files.items():
        (tmp_path / file).write_text("\n".join(lines))
    answer = diagnose(LogInput((tmp_path,)))
    failure_class, code, rank = APART.get(name, BROKEN[name])
    assert answer.failure_class is failure_class
    assert failure_class is FailureClass.UNKNOWN or answer.code == code
    assert rank is None or (answer.first_failure is not None and answer.first_failure.rank == rank)


def _right(answer: Diagnosis, name: str) -> None:
    failure_class, code, rank = BROKEN[name]
    assert (answer.failure_class, answer.code) == (failure_class, code)
    assert (answer.first_failure.rank if answer.first_failure else None) == rank
    assert answer.evidence
    assert answer.remedy or answer.next_evidence
    assert answer.failure_class is not FailureClass.UNKNOWN or answer.next_evidence


def test_every_log_is_asked_for() -> None:
    assert {path.stem for path in FOLDER.glob("*.log")} == set(BROKEN)


def test_launchers_own_script_is_not_the_users_code() -> None:
    assert "torchrun:" not in diagnose(LogInput((FOLDER / "port-in-use.log",))).what


def test_what_a_launcher_says_of_an_end_is_raised_nowhere() -> None:
    """The traceback above it is of the rank that lost its peer."""
    assert "prog.py" not in diagnose(LogInput((FOLDER / "killed.log",))).what


@pytest.mark.parametrize(("failed", "first"), [(1, None), (0, 0)])
def test_launchers_file_that_is_named_like_a_ranks_names_no_rank(
    tmp_path: Path, failed: int, first: int | None
) -> None:
    log = tmp_path / "rank-0.log"
    log.write_text(f"""\
ValueError: bad shard 7
Root Cause (first observed failure):
[0]:
  time      : 2026-12-02_06:02:08
  host      : n1
  rank      : {failed} (local_rank: {failed})
  exitcode  : 1 (pid: 3253)
  error_file: <N/A>
""")
    answer = diagnose(LogInput((log,)))
    assert answer.evidence[0].text == "ValueError: bad shard 7"
    assert (answer.first_failure.rank if answer.first_failure else None) == first
