"""`holdfast --help` and `--version` are quick because they load next to nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.errors import ExitCode
from holdfast.run_dir import RunDir

HEAVY = ("torch", "torchft", "transformers", "kr8s", "numpy", "pydantic", "httpx", "rich", "yaml", "holdfast.api")


@pytest.mark.parametrize("word", ["--help", "--version"])
def test_what_needs_no_verb_loads_nothing_that_only_verbs_need(word: str) -> None:
    script = (
        f"import sys\nfrom holdfast.cli import main\nmain([{word!r}])\nprint(sorted(set({HEAVY}) & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=200, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_output_that_cannot_take_every_letter_is_no_reason_to_fail() -> None:
    script = "import sys; from holdfast.cli import main; sys.exit(main(['drill', 'kill', 'ränk', '1']))"
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        timeout=200,
        check=False,
        env={"PYTHONIOENCODING": "ascii", "HOME": "/"},
    )
    assert done.returncode == 2
    assert b"r\\xe4nk" in done.stderr


@pytest.mark.parametrize(
    ("words", "index", "offered"),
    [
        (["holdfast", "stat"], 1, ["status"]),
        (["holdfast", "logs", "mi"], 2, ["RUN"]),
        (["holdfast", "run", "--on", ""], 3, ["local"]),
    ],
)
def test_shell_completes_verbs_runs_and_targets(home: Path, words: list[str], index: int, offered: list[str]) -> None:
    run = RunDir.create("mine")
    run.job.touch()
    asked = {"_HOLDFAST_COMPLETE": "complete_bash", "COMP_WORDS": " ".join(words), "COMP_CWORD": str(index)}
    script = "import sys; from holdfast.cli import main; sys.exit(main([]))"
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env={**os.environ, **asked},
    )
    assert done.stdout.split() == [run.run_id if one == "RUN" else one for one in offered]
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("words", "redirected", "says"),
    [
        ("--help", ">/dev/full", "No space left on device"),
        ("ps", ">/dev/full", "No space left on device"),
        ("ps -o json", ">&-", "Bad file descriptor"),
        ("ps", "", ""),
        ("--help", "", ""),
    ],
)
def test_output_that_cannot_be_written_has_its_own_exit_code(
    words: str, redirected: str, says: str, tmp_path: Path
) -> None:
    done = run_bash(f"{sys.executable} -m holdfast {words} {redirected}; echo $? >&3", tmp_path)
    code = (tmp_path / "code").read_text()
    assert int(code) == ExitCode.OUTPUT_LOST
    assert says in done
    assert "fault of holdfast" not in done
    assert bool(says) == bool(done)
    if "json" in words:
        assert json.loads(done)["findings"][0]["code"] == "output-lost"


@pytest.mark.parametrize("redirected", ["2>/dev/full", "2>&-", "<&- 2>&-"])
def test_standard_error_that_cannot_be_written_changes_no_exit_code(redirected: str, tmp_path: Path) -> None:
    run_bash(f"{sys.executable} -m holdfast no-such-verb {redirected}; echo $? >&3", tmp_path)
    assert int((tmp_path / "code").read_text()) == ExitCode.USAGE


def run_bash(command: str, folder: Path) -> str:
    """Run a command line whose output nobody reads; what it wrote to standard error.

    What it writes to descriptor 3 is in the file `code`.
    """
    script = f"exec 3>{folder / 'code'}; {command}"
    env = os.environ | {"HOLDFAST_HOME": str(folder)}
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            ["bash", "-c", script], stdout=writer, stderr=subprocess.PIPE, text=True, timeout=200, check=True, env=env
        )
    finally:
        os.close(writer)
    return done.stderr
