"""The verb `diagnose`, as a person calls it."""

from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from holdfast.errors import ExitCode

if TYPE_CHECKING:
    from tests.cli.conftest import Cli
    from tests.golden import Golden

LINES = """\
n1:77:91 [3] include/alloc.h:178 NCCL WARN Cuda failure 'out of memory'
n0:7:91 [0] misc/socket.cc:49 NCCL WARN socketProgress: Connection closed by remote peer n1<51159>
"""


def test_folder_of_logs_is_diagnosed_on_one_screen(cli: Cli, golden: Golden) -> None:
    Path("logs").mkdir()
    Path("logs/rank-3.log").write_text(LINES)
    text = cli.transcript(["diagnose", "logs"])
    assert len(text.splitlines()) < 24
    golden(text)


def test_json_holds_the_same(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "all.log").write_text(LINES)
    data = cli("diagnose", str(tmp_path / "all.log"), "-o", "json").data
    assert (data["failure_class"], data["confidence"], data["first_failure"]["host"]) == ("oom-gpu", "certain", "n1")


@pytest.mark.slow
def test_standard_input_is_read(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(LINES.encode())))
    assert "oom-gpu" in cli("diagnose", "-").out


def test_redacted_answer_names_nobody(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "all.log").write_text(LINES.replace("n1", "gpu-a7"))
    assert "gpu-a7" not in cli("diagnose", "--redact", str(tmp_path / "all.log")).out


def test_unknown_cause_lists_the_evidence_that_would_decide(cli: Cli, golden: Golden) -> None:
    Path("all.log").write_text(LINES.splitlines()[1])
    golden(cli.transcript(["diagnose", "all.log"]))


def test_input_that_cannot_be_read_is_an_error(cli: Cli, golden: Golden) -> None:
    Path("empty.log").write_bytes(b"")
    Path("binary.log").write_bytes(b"\0\1\2\3")
    asked = ["empty.log", "binary.log", "logs/none.log", "none"]
    golden(cli.transcript(*(["diagnose", each] for each in asked)))


def test_file_of_a_name_that_is_no_text_is_named_in_every_form(cli: Cli, tmp_path: Path) -> None:
    path = os.fsdecode(os.fsencode(tmp_path) + b"/b\xffd.log")
    Path(path).write_text("KeyError: 'tokens'\n")
    assert cli("diagnose", path, "-o", "json").data["evidence"][0]["where"].endswith("/b\\udcffd.log:1")
    assert "b\\udcffd.log:1" in cli("diagnose", path).out
    missing = cli("diagnose", f"{path}x", "-o", "json")
    assert missing.code == ExitCode.NOT_FOUND
    assert json.loads(missing.err)["findings"][0]["code"] == "no-such-file"
    assert cli("diagnose", f"./{'a' * 5000}").code == ExitCode.NOT_FOUND
