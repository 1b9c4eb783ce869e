"""`holdfast --help` and `--version` are quick because they load next to nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.folder import RunFolder

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
def test_shell_is_offered_verbs_runs_and_places(home: Path, words: list[str], index: int, offered: list[str]) -> None:
    run = RunFolder.create("mine")
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
    assert done.stdout.split() == [run.run if one == "RUN" else one for one in offered], done.stderr
