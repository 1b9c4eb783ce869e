"""Loops that frameworks own: killed, each example ends where the same one without holdfast does, to the last bit.

Over two ranks under holdfast, over two under torchrun, and in a bare process, and into a second epoch.
"""

from __future__ import annotations

import difflib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.runs.conftest import Runs

from holdfast.events import AttemptStarted, Outcome

ROOT = Path(__file__).parents[2]
FORKER, MORTAL = (str(ROOT / "tests" / "programs" / name) for name in ("forker.py", "mortal.py"))
STEPS = 16
EVERY = 4
TRAINED = {"STEPS": str(STEPS), "SAMPLES": "100", "OMP_NUM_THREADS": "1"}
"""Samples for less than seven steps of two ranks."""


def fork(folder: Path, modules: str, *runs: dict[str, Any]) -> list[str]:
    """Have these run, one after the other; returns how each ended."""
    command = (sys.executable, FORKER, modules)
    told = subprocess.run(command, input=json.dumps(runs), cwd=folder, stdout=subprocess.PIPE, text=True, check=True)
    return [line.removeprefix("ended ") for line in told.stdout.splitlines() if line.startswith("ended ")]


class Example:
    """An example with its two scripts, and what is to be imported before they can be run quickly."""

    def __init__(self, name: str, modules: str, model: str) -> None:
        self.folder, self.modules = ROOT / "examples" / name, modules
        self.model = model
        """The file with the weights, if MODEL is a folder."""

    def run(self, folder: Path, *, script: str = "train", **more: Any) -> dict[str, Any]:
        """One run of a script for `fork`; its checkpoints and its weights go to `folder`."""
        folder.mkdir(exist_ok=True)
        env = TRAINED | {"MODEL": str(folder / "model"), "HOLDFAST_CHECKPOINT_PATH": str(folder / "checkpoints")}
        env |= {"HOLDFAST_CHECKPOINT_EVERY_STEPS": str(EVERY)}
        return {"script": [str(self.folder / f"{script}.py")], "env": env, **more}

    def weights(self, folder: Path) -> bytes:
        return (folder / "model" / self.model).read_bytes()


TRANSFORMERS = Example("transformers", "datasets,transformers.trainer", "model.safetensors")


def changed_lines(before: Path, after: Path) -> int:
    """Lines of `after` that are not those of `before`, and lines of `before` that have none in their place."""
    matcher = difflib.SequenceMatcher(None, before.read_text().splitlines(), after.read_text().splitlines(), False)
    return sum(max(i2 - i1, j2 - j1) for tag, i1, i2, j1, j2 in matcher.get_opcodes() if tag != "equal")


@pytest.mark.parametrize("example", [TRANSFORMERS], ids=lambda example: example.folder.name)
def test_adopting_holdfast_changes_eight_lines_at_most(example: Example):
    assert 0 < changed_lines(example.folder / "without_holdfast.py", example.folder / "train.py") <= 8


@pytest.mark.slow
@pytest.mark.parametrize("example", [TRANSFORMERS], ids=lambda example: example.folder.name)
def test_killed_loop_ends_where_the_one_without_holdfast_does(runs: Runs, tmp_path: Path, example: Example):
    alone, alone_killed, two, two_killed = (tmp_path / name for name in ("alone", "alone-killed", "two", "two-killed"))
    again = example.run(alone_killed, dies=[str(tmp_path / "died-alone"), 0, 6])
    ended = fork(
        tmp_path,
        example.modules,
        example.run(alone, script="without_holdfast"),
        again,
        again,
        example.run(two, script="without_holdfast", ranks=2),
        example.run(two_killed, ranks=2, dies=[str(tmp_path / "died-under-torchrun"), 1, 6]),
    )
    assert ended == ["0", "-9", "0", "0", "failed"]
    assert example.weights(alone_killed) == example.weights(alone)

    command = (sys.executable, MORTAL, str(tmp_path / "died-held"), "1:11", str(example.folder / "train.py"))
    env = TRAINED | {"MODEL": str(two_killed / "model")}
    where = (f"checkpoint.every_steps={EVERY}", f"checkpoint.path={two_killed / 'checkpoints'}")
    watched = runs.start(*command, overrides=(*where, *(f"env.{name}={value}" for name, value in env.items())))
    assert watched.end().outcome is Outcome.SUCCEEDED
    assert [event.attempt for event in watched.all(AttemptStarted)] == [0, 1]
    assert watched.steps() == [*range(5, 12), *range(9, STEPS + 1)]
    assert example.weights(two_killed) == example.weights(two)
