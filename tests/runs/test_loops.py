"""Every example, killed without warning, ends where one that is left alone does, to the last bit.

In a bare process, and over two ranks that die under torchrun, then under holdfast, which goes on where torchrun was.
"""

from __future__ import annotations

import difflib
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.runs.conftest import Runs

from holdfast.events import AttemptStarted, Outcome

ROOT = Path(__file__).parents[2]
FORKER, MORTAL, APART = (str(ROOT / "tests" / "programs" / name) for name in ("forker.py", "mortal.py", "apart.py"))
STEPS = 16
EVERY = 4
DIES = (9, 14)
"""A save runs beside the steps that follow, and is over when the next one begins."""
TRAINED = {"STEPS": str(STEPS), "SAMPLES": "100", "OMP_NUM_THREADS": "1"}
"""Samples for less than seven steps of two ranks."""


def fork(folder: Path, modules: str, *runs: dict[str, Any]) -> list[str]:
    """Have these run, one after the other; returns how each ended."""
    command = (sys.executable, FORKER, modules)
    env = os.environ | TRAINED  # torch asks for its threads when it is imported
    told = subprocess.run(
        command, input=json.dumps(runs), cwd=folder, env=env, stdout=subprocess.PIPE, text=True, check=True
    )
    return [line.removeprefix("ended ") for line in told.stdout.splitlines() if line.startswith("ended ")]


@dataclass(frozen=True, kw_only=True)
class Example:
    """An example, and what it is compared with."""

    name: str
    modules: str
    """What is to be imported before its scripts run quickly."""
    reference: str = "train"
    """The script that is left alone: without holdfast, where that takes the same samples in the same order."""
    arguments: tuple[str, ...] = ()
    weights: str = "model"
    """The file of them, in the folder of a run."""

    def script(self, name: str) -> str:
        return str(ROOT / "examples" / self.name / f"{name}.py")

    def run(self, folder: Path, *, script: str = "train", **more: Any) -> dict[str, Any]:
        """One run of a script for `fork`; its checkpoints and its weights go to `folder`."""
        folder.mkdir(exist_ok=True)
        env = TRAINED | {"MODEL": str(folder / "model"), "HOLDFAST_CHECKPOINT_PATH": str(folder / "checkpoints")}
        env |= {"HOLDFAST_CHECKPOINT_EVERY_STEPS": str(EVERY)}
        return {"script": [self.script(script), *self.arguments], "env": env, **more}

    def same(self, one: Path, other: Path) -> bool:
        """Whether two runs ended with the same weights, to the last bit."""
        return (one / self.weights).read_bytes() == (other / self.weights).read_bytes()


LLAMA = "transformers.models.llama.modeling_llama"
LOOP = Example(name="loop", modules="torch._dynamo,holdfast.train.session")
QUICKSTART = Example(
    name="quickstart",
    modules=f"{LLAMA},torch.distributed.fsdp,holdfast.train.session",
    arguments=(
        "--layers=2",
        "--width=64",
        "--sharding=fsdp",
        "--accumulate=2",
        "--bf16",
        "--activation-checkpointing",
        "--compile=aot_eager",
    ),
)
TRANSFORMERS = Example(
    name="transformers",
    modules="datasets,transformers.trainer",
    reference="without_holdfast",
    weights="model/model.safetensors",
)
LIGHTNING = Example(name="lightning", modules=f"lightning,torchdata.stateful_dataloader,{LLAMA}")


def named(example: Example) -> str:
    return example.name


def changed_lines(before: Path, after: Path) -> int:
    """Lines that are there in one place of `after` and not in that of `before`, or the other way about."""
    lines = [[line for line in file.read_text().splitlines() if line] for file in (before, after)]
    matcher = difflib.SequenceMatcher(None, *lines, autojunk=False)
    return sum(max(i2 - i1, j2 - j1) for tag, i1, i2, j1, j2 in matcher.get_opcodes() if tag != "equal")


@pytest.mark.parametrize("example", [LOOP, TRANSFORMERS, LIGHTNING], ids=named)
def test_adopting_holdfast_changes_eight_lines_at_most(example: Example):
    assert 0 < changed_lines(Path(example.script("without_holdfast")), Path(example.script("train"))) <= 8


@pytest.mark.slow
@pytest.mark.parametrize("example", [LOOP, QUICKSTART, TRANSFORMERS, LIGHTNING], ids=named)
def test_killed_example_ends_where_one_that_is_left_alone_does(runs: Runs, tmp_path: Path, example: Example):
    alone, alone_killed, two, two_killed = (tmp_path / name for name in ("alone", "alone-killed", "two", "two-killed"))
    again = example.run(alone_killed, dies=[str(tmp_path / "died-alone"), 0, DIES[0]])
    ended = fork(
        tmp_path,
        example.modules,
        example.run(alone, script=example.reference),
        again,
        again,
        example.run(two, script=example.reference, ranks=2),
        example.run(two_killed, ranks=2, dies=[str(tmp_path / "died-under-torchrun"), 1, DIES[0]]),
    )
    assert ended == ["0", "-9", "0", "0", "failed"]
    assert example.same(alone_killed, alone)

    command = (
        sys.executable,
        MORTAL,
        str(tmp_path / "died-held"),
        f"1:{DIES[1]}",
        example.script("train"),
        *example.arguments,
    )
    env = TRAINED | {"MODEL": str(two_killed / "model")}
    where = (f"checkpoint.every_steps={EVERY}", f"checkpoint.path={two_killed / 'checkpoints'}")
    watched = runs.start(*command, overrides=(*where, *(f"env.{name}={value}" for name, value in env.items())))
    assert watched.end(within_s=600).outcome is Outcome.SUCCEEDED  # what they import takes a minute on a busy machine
    assert [event.attempt for event in watched.all(AttemptStarted)] == [0, 1]
    steps = watched.steps()
    assert steps[0] > EVERY
    assert steps[-1] == STEPS
    assert example.same(two_killed, two)


@pytest.mark.slow
@pytest.mark.parametrize("example", [LOOP, LIGHTNING], ids=named)
def test_example_without_holdfast_runs(tmp_path: Path, example: Example):
    assert fork(tmp_path, example.modules, example.run(tmp_path / "two", script="without_holdfast", ranks=2)) == ["0"]


@pytest.mark.slow
def test_ranks_of_lightning_that_see_different_checkpoints_are_told_so_and_take_no_step(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    given = LIGHTNING.run(tmp_path / "apart")
    given["script"] = [APART, *given["script"]]
    assert fork(tmp_path, LIGHTNING.modules, given, given | {"ranks": 2}) == ["0", "failed"]
    told = capfd.readouterr().err
    assert "the ranks do not see the same checkpoints" in told
    assert [path.name for path in (tmp_path / "apart" / "checkpoints").iterdir()] == ["0"]
