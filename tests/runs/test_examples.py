"""Every example, killed without warning and told to save and to leave, ends where one that is left alone does.

To the last bit: in a bare process, and over two ranks, first under holdfast, then under torchrun, which goes on where
holdfast was.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.runs.conftest import DEADLINE_S, Runs
from tests.runs.forked_starts import ForkedStarts

from holdfast import api
from holdfast.errors import ExitCode
from holdfast.events import (
    AgentConnected,
    AttemptStarted,
    CheckpointCommitted,
    Outcome,
    RankExited,
    RecoveryDecided,
    StepCommitted,
)

ROOT = Path(__file__).parents[2]
SCRIPTED_FAULTS, FORK_SERVER, SEPARATE_FOLDERS = (
    str(ROOT / "tests" / "programs" / name) for name in ("scripted_faults.py", "fork_server.py", "separate_folders.py")
)
STEPS = 20
EVERY = 4
DIES = 9
"""A save runs during the steps that follow, and is over when the next one begins."""
TRAINED = {"STEPS": str(STEPS), "SAMPLES": "100", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
"""Samples for less than seven steps of two ranks."""


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
    variant: str = ""
    """What tells it from another example of the same scripts."""

    def script(self, name: str) -> str:
        return str(ROOT / "examples" / self.name / f"{name}.py")

    def same(self, one: Path, other: Path) -> bool:
        """Whether two runs ended with bit-exact weights."""
        return (one / self.weights).read_bytes() == (other / self.weights).read_bytes()


LLAMA = "transformers.models.llama.modeling_llama"
SMALL = ("--layers=1", "--width=64", "--accumulate=2", "--bf16", "--activation-checkpointing")
LOOP = Example(name="loop", modules="torch._dynamo,holdfast.train.session.session")
QUICKSTART = Example(
    name="quickstart", modules=f"{LLAMA},torch.distributed.fsdp,holdfast.train.session.session", arguments=SMALL
)
SHARDED = replace(QUICKSTART, variant="-fsdp", arguments=(*SMALL, "--sharding=fsdp"))
COMPILED = replace(
    SHARDED,
    variant="-compiled",
    modules=f"{QUICKSTART.modules},torch._dynamo.backends.common,torch._inductor.compile_fx",
    arguments=(*SHARDED.arguments, "--compile=aot_eager"),
)
TRANSFORMERS = Example(
    name="transformers",
    modules="datasets,transformers.trainer",
    reference="without_holdfast",
    weights="model/model.safetensors",
)
LIGHTNING = Example(name="lightning", modules=f"lightning,torchdata.stateful_dataloader,{LLAMA}")


def named(example: Example) -> str:
    return example.name + example.variant


@dataclass(frozen=True, kw_only=True)
class Ended:
    how: str
    """The exit code, or what became of torchrun."""
    said: str

    @property
    def began(self) -> int:
        """The step that was the first to be reported."""
        told = re.search(r"step (\d+): ", self.said)  # anywhere: what another process says may lack its end of line
        assert told is not None, self.said
        return int(told[1])

    @property
    def left(self) -> list[str]:
        """The codes with which ranks left early."""
        return re.findall(r"^left with (.*)$", self.said, re.MULTILINE)


class ForkServer:
    """Runs the scripts of one example, one after the other, in forks of a process that has its imports done."""

    def __init__(self, example: Example, folder: Path) -> None:
        self.example = example
        self._process = subprocess.Popen(
            [sys.executable, FORK_SERVER, example.modules],
            cwd=folder,
            env=os.environ | TRAINED,  # torch asks for its threads when it is imported
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def run(self, folder: Path, *, script: str = "train", through: tuple[str, ...] = (), **more: Any) -> Ended:
        """One run of a script; its checkpoints and its weights go to `folder`."""
        folder.mkdir(exist_ok=True)
        env = TRAINED | {"MODEL": str(folder / "model"), "HOLDFAST_CHECKPOINT_PATH": str(folder / "checkpoints")}
        env |= {"HOLDFAST_CHECKPOINT_EVERY_STEPS": str(EVERY)}
        argv = [*through, self.example.script(script), *self.example.arguments]
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"script": argv, "env": env, **more}) + "\n")
        self._process.stdin.flush()
        said = ""
        for line in self._process.stdout:
            if line.startswith("ended "):
                print(said)  # pytest shows it where the test fails
                return Ended(how=line.split()[1], said=said)
            said += line
        raise AssertionError(said)

    def close(self) -> None:
        try:
            self._process.communicate(timeout=DEADLINE_S)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            raise


@pytest.fixture(scope="module")
def forker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    made = ForkServer(request.param, tmp_path_factory.mktemp("forker"))
    yield made
    made.close()


def of(*examples: Example) -> pytest.MarkDecorator:
    """A test that runs once for each of these."""
    return pytest.mark.parametrize("forker", examples, ids=named, indirect=True)


def changed_lines(before: Path, after: Path) -> int:
    """Lines that are there in one place of `after` and not in that of `before`, or the other way about."""
    lines = [[line for line in file.read_text().splitlines() if line] for file in (before, after)]
    matcher = difflib.SequenceMatcher(None, *lines, autojunk=False)
    return sum(max(i2 - i1, j2 - j1) for tag, i1, i2, j1, j2 in matcher.get_opcodes() if tag != "equal")


@pytest.mark.parametrize("example", [LOOP, TRANSFORMERS, LIGHTNING], ids=named)
def test_adopting_holdfast_changes_eight_lines_at_most(example: Example):
    assert 0 < changed_lines(Path(example.script("without_holdfast")), Path(example.script("train"))) <= 8


@pytest.mark.slow
@of(LOOP, QUICKSTART, TRANSFORMERS, LIGHTNING)
def test_example_alone_that_is_killed_then_told_to_leave_ends_where_one_left_alone_does(
    forker: ForkServer, tmp_path: Path
) -> None:
    assert forker.run(tmp_path / "alone", script=forker.example.reference).how == "0"
    again = partial(forker.run, tmp_path / "again")
    assert again(faults=[{"after": DIES, "fault": "dies"}]).how == "-9"
    told = again(faults=[{"after": 14, "fault": "told"}])
    assert told.how == str(int(ExitCode.CHECKPOINTED_AND_EXITED))
    assert EVERY < told.began <= DIES
    last = again()
    assert (last.how, last.began) == ("0", 15)
    assert forker.example.same(tmp_path / "again", tmp_path / "alone")


@pytest.mark.slow
@of(LOOP, QUICKSTART, SHARDED, TRANSFORMERS, LIGHTNING)
def test_example_over_two_ranks_that_is_killed_and_told_by_holdfast_and_torchrun_ends_where_one_left_alone_does(
    forker: ForkServer, runs: Runs, forked_starts: ForkedStarts, tmp_path: Path
) -> None:
    """No request costs a step: it saves, and resumes."""
    again = tmp_path / "again"
    assert forker.run(tmp_path / "alone", script=forker.example.reference, ranks=2).how == "0"
    forked_starts.preload(*forker.example.modules.split(","))
    hold(forker.example, runs, again)

    killed = forker.run(again, ranks=2, faults=[{"after": 18, "rank": 1, "fault": "dies"}])
    assert (killed.how, killed.began) == ("failed", 18)
    told = forker.run(
        again, ranks=2, faults=[{"after": 18, "rank": 0, "fault": "launcher-told"}, {"after": 18, "fault": "waits"}]
    )
    assert (told.how, told.left) == ("SIGTERM", [str(int(ExitCode.CHECKPOINTED_AND_EXITED))] * 2)
    last = forker.run(again, ranks=2)
    assert (last.how, last.began) == ("0", 20)
    assert forker.example.same(again, tmp_path / "alone")


@pytest.mark.slow
@of(COMPILED)
def test_compiled_example_that_is_killed_ends_where_one_left_alone_does(forker: ForkServer, tmp_path: Path) -> None:
    """Each of its processes compiles for longer than it trains: torchrun's alone will do."""
    alone, again = tmp_path / "alone", tmp_path / "again"
    assert forker.run(alone, ranks=2).how == "0"
    assert forker.run(again, ranks=2, faults=[{"after": DIES, "rank": 1, "fault": "dies"}]).how == "failed"
    last = forker.run(again, ranks=2)
    assert last.how == "0"
    assert EVERY < last.began <= DIES
    assert forker.example.same(again, alone)


def hold(example: Example, runs: Runs, folder: Path) -> None:
    """Under holdfast: killed, preempted after step 9, asked for a checkpoint after 13, cancelled after 16."""
    folder.mkdir()
    faults = [
        {"after": DIES, "rank": 1, "fault": "dies", "once": str(folder / "died")},
        {"after": 9, "rank": 1, "fault": "waits"},
        {"after": 13, "fault": "waits"},
        {"after": 16, "fault": "waits"},
    ]
    command = (sys.executable, SCRIPTED_FAULTS, json.dumps(faults), example.script("train"), *example.arguments)
    env = TRAINED | {"MODEL": str(folder / "model")}
    where = (f"checkpoint.every_steps={EVERY}", f"checkpoint.path={folder / 'checkpoints'}")
    given = (f"env.{name}={value}" for name, value in env.items())
    watched = runs.start(*command, overrides=(*where, *given, "recovery.stop_grace_s=300"))

    watched.wait_for(StepCommitted, lambda event: (event.attempt, event.step) == (1, 9), within_s=600)
    agent = next(event.pid for event in watched.all(AgentConnected) if event.node == 1)
    os.kill(agent, signal.SIGTERM)
    assert watched.wait_for(RecoveryDecided).finding.code == "node-preempted"
    with ThreadPoolExecutor() as beside:
        watched.wait_for(StepCommitted, lambda event: event.step == 13, within_s=600)
        asked = beside.submit(api.checkpoint, watched.folder, timeout_s=DEADLINE_S)
        watched.wait_for(StepCommitted, lambda event: event.step == 16)
        api.cancel(watched.folder)
        assert asked.result().step == 14
    ended = watched.wait_for_end()
    assert (ended.outcome, ended.exit_code) == (Outcome.CANCELLED, ExitCode.CANCELLED)

    assert [event.attempt for event in watched.all(AttemptStarted)] == [0, 1, 2]
    later = [event for event in watched.all(StepCommitted) if event.attempt > 0]
    assert EVERY < later[0].first <= DIES
    steps = [step for event in later for step in range(event.first, event.step + 1)]
    assert steps == list(range(steps[0], 18))
    assert {10, 14, 17} <= {event.step for event in watched.all(CheckpointCommitted)}
    assert {event.code for event in watched.all(RankExited) if event.attempt > 0} == {ExitCode.CHECKPOINTED_AND_EXITED}


@pytest.mark.slow
@of(LOOP, LIGHTNING)
def test_example_without_holdfast_runs(forker: ForkServer, tmp_path: Path):
    assert forker.run(tmp_path / "two", script="without_holdfast", ranks=2).how == "0"


@pytest.mark.slow
@of(LIGHTNING)
def test_ranks_that_see_different_checkpoints_are_told_so_and_take_no_step(forker: ForkServer, tmp_path: Path) -> None:
    apart = partial(forker.run, tmp_path / "apart", through=(SEPARATE_FOLDERS,))
    assert apart().how == "0"
    told = apart(ranks=2)
    assert told.how == "failed"
    assert "the ranks do not see the same checkpoints" in told.said
    assert [path.name for path in (tmp_path / "apart" / "checkpoints").iterdir()] == ["0"]
