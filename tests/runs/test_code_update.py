"""Ranks continue with new code from their current step, bit-exact; code that fails soon is rolled back."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from tests.runs.conftest import NCCL_LIKE, PREWARMED, Runs, WatchedRun

from holdfast import api
from holdfast.errors import HoldfastError
from holdfast.events import (
    AttemptStarted,
    FaultAction,
    FaultTarget,
    Outcome,
    RanksStarted,
    RecoveryDecided,
    StepCommitted,
    UpdateEnded,
    UpdateOutcome,
)

pytestmark = pytest.mark.slow

UPDATE_TRAINER = Path(__file__).parents[1] / "programs" / "update_trainer.py"
WITHIN_S = 200.0


class Step(NamedTuple):
    """What a rank wrote of a step."""

    step: int
    loss: str
    word: str
    attempt: int


class Project:
    """A folder with update_trainer.py, from which runs on two nodes are started."""

    def __init__(self, runs: Runs, folder: Path) -> None:
        self._runs = runs
        self.folder = folder / "project"
        targets = self.folder / ".holdfast" / "targets"
        targets.mkdir(parents=True)
        (targets / "shipped.yaml").write_text("code: shipped\n")
        self.program = self.folder / "program.py"
        shutil.copy(UPDATE_TRAINER, self.program)
        shutil.copy(UPDATE_TRAINER.with_name("nccl_like.py"), self.folder)
        runs.base = self.folder
        self._out = folder / "out"

    def run(
        self,
        steps: int,
        step_s: float = 0.05,
        *words: str,
        target: str = "local",
        name: str = "a",
        group: tuple[str, ...] = (),
    ) -> WatchedRun:
        (self._out / name).mkdir(parents=True)
        command = (sys.executable, "program.py", str(self._out / name), str(steps), str(step_s), *words)
        overrides = (PREWARMED, "checkpoint.every_steps=100000", *group)
        return self._runs.start(*command, target=target, overrides=overrides)

    def change(self, what: str = 'WORD = "first"', to: str = 'WORD = "second"') -> None:
        text = self.program.read_text()
        assert what in text
        self.program.write_text(text.replace(what, to))

    def steps(self, rank: int, name: str = "a") -> list[Step]:
        lines = (line.split() for line in (self._out / name / f"rank-{rank}").read_text().splitlines())
        return [Step(int(step), loss, word, int(attempt)) for step, loss, word, attempt in lines]


@pytest.fixture
def project(runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return Project(runs, tmp_path)


def cut(watched: WatchedRun) -> None:
    """End a run of which enough was seen."""
    api.cancel(watched.folder, force=True)
    watched.wait_for_end()


@pytest.mark.parametrize(
    ("target", "words", "group"),
    [("local", ("fsdp",), (NCCL_LIKE,)), ("shipped", (), ())],
    ids=["local-fsdp-nccl-like", "shipped-ddp-gloo"],
)
def test_updated_ranks_continue_from_the_step_they_are_at_to_the_bit(
    project: Project, target: str, words: tuple[str, ...], group: tuple[str, ...]
) -> None:
    watched = project.run(100_000, 0.05, *words, target=target, group=group)
    watched.wait_for(StepCommitted, lambda event: event.step >= 5)
    project.change()
    updated = api.update(watched.folder, timeout_s=WITHIN_S)
    ended = watched.wait_for(UpdateEnded)
    cut(watched)
    assert (ended.outcome, ended.digest) == (UpdateOutcome.APPLIED, updated.digest)
    assert "state-transfer-done" in watched.codes()
    assert updated.step is not None
    steps = min(len(project.steps(rank)) for rank in (0, 1))
    assert project.run(steps, 0.0, *words, name="plain").wait_for_end().outcome is Outcome.SUCCEEDED
    for rank in (0, 1):
        mine = project.steps(rank)[:steps]
        assert [step.loss for step in mine] == [step.loss for step in project.steps(rank, "plain")]
        changed = next(step for step in mine if step.word == "second")
        assert (changed.step, changed.attempt) == (updated.step.first, 1)


def test_update_of_a_program_without_a_session_is_refused_and_stops_nothing(runs: Runs) -> None:
    watched = runs.start("sleep", "600")
    watched.wait_for(RanksStarted)
    with pytest.raises(HoldfastError, match="no rank of"):
        api.update(watched.folder, timeout_s=WITHIN_S)
    cut(watched)
    assert not watched.all(UpdateEnded)
    assert len(watched.all(AttemptStarted)) == 1


def test_code_that_fails_before_or_after_its_first_steps_is_taken_back_and_no_step_is_lost(project: Project) -> None:
    watched = project.run(100_000, target="shipped")
    watched.wait_for(StepCommitted, lambda event: event.step >= 5)
    good = project.program.read_text()
    project.program.write_text("this is no Python")
    with pytest.raises(HoldfastError) as refused:
        api.update(watched.folder, timeout_s=WITHIN_S)
    assert refused.value.findings[0].code == "update-failed"
    project.program.write_text(good)
    project.change('WORD = "first"', 'WORD, BEGAN = "second", None')
    project.change("    session.commit(", "    BEGAN = BEGAN or step\n    assert step < BEGAN + 3\n    session.commit(")
    assert api.update(watched.folder, timeout_s=WITHIN_S).step is not None
    assert watched.wait_for(UpdateEnded).outcome is UpdateOutcome.ROLLED_BACK
    ended = watched.wait_for(UpdateEnded)
    assert ended.outcome is UpdateOutcome.ROLLED_BACK
    watched.wait_for(StepCommitted, lambda event: event.step > ended.step + 5)
    cut(watched)
    steps = project.steps(0)
    assert {step.step for step in steps} == set(range(1, steps[-1].step + 1))
    assert {step.attempt for step in steps if step.word == "second"} == {3}
    of_step = {step.step: step.loss for step in steps}
    assert all(of_step[step.step] == step.loss for step in steps)


def test_update_in_which_a_rank_dies_continues_with_the_new_code(project: Project) -> None:
    watched = project.run(100_000)
    watched.wait_for(StepCommitted, lambda event: event.step >= 5)
    watched.drill(FaultTarget.RANK, 1, FaultAction.STOP)
    project.change()
    with pytest.raises(HoldfastError):
        api.update(watched.folder, timeout_s=0.0)
    watched.drill(FaultTarget.RANK, 1, FaultAction.KILL)
    watched.wait_for(RecoveryDecided)
    watched.wait_for(StepCommitted)
    cut(watched)
    assert project.steps(0)[-1].word == "second"
