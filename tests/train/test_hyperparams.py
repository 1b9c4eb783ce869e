"""Changed settings of a program apply when training resumes, and are reported; unchanged ones continue as before."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.train.forged_manifests import rewrite
from torch.optim import SGD, Adam, AdamW
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    LambdaLR,
    LinearLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)

from holdfast.errors import HoldfastError
from holdfast.protocol.rank_messages import FindingReported, rank_message_decoder
from holdfast.train import RankConfig, Session

STEPS = 6

Settings = dict[str, Any]


class Program:
    """A small one, whose settings can be given otherwise when it is started again."""

    def __init__(self, folder: Path, **given: Any) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Linear(3, 3).to(given.pop("dtype", torch.float32))
        make, scheduler = given.pop("optimizer", AdamW), given.pop("scheduler", None)
        length, socket = given.pop("sequence_length", None), given.pop("socket", None)
        groups = given.pop("groups", lambda model: model.parameters())
        self.optimizer = make(groups(self.model), **given)
        self.scheduler = scheduler(self.optimizer) if scheduler else None
        self.session = Session(
            model=self.model,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            sequence_length=length,
            config=RankConfig(checkpoint_path=folder, rank_socket=socket),
        )

    def train(self, steps: int = STEPS) -> list[float]:
        """The learning rate after each step."""
        rates = []
        for _ in self.session.steps(steps):
            self.optimizer.zero_grad()
            self.model(torch.ones(1, 3, dtype=self.model.weight.dtype)).sum().backward()
            self.optimizer.step()
            if isinstance(self.scheduler, ReduceLROnPlateau):
                self.scheduler.step(1.0)
            elif self.scheduler is not None:
                self.scheduler.step()
            self.session.commit()
            rates.append(self.optimizer.param_groups[0]["lr"])
        return rates


Said = dict[str, tuple[str, ...]]


@pytest.fixture
def resumed(tmp_path: Path, agent) -> Callable[[Settings, Settings], tuple[Program, Said]]:
    """Resume another program's training; return it with its findings."""
    folders = (tmp_path / f"saved{number}" for number in count())

    def resume(before: Settings, after: Settings) -> tuple[Program, Said]:
        folder = next(folders)
        Program(folder, **copy.deepcopy(before)).train()
        program = Program(folder, socket=agent.path, **after)
        line = agent.accept()
        told = map(
            rank_message_decoder.decode, line.link.recv(1 << 16).splitlines()
        )  # what the constructor sent is there
        line.close()
        return program, {each.finding.code: each.finding.evidence for each in told if isinstance(each, FindingReported)}

    return resume


def step(optimizer: Any) -> StepLR:
    return StepLR(optimizer, 2)


def warmed(optimizer: Any, end: int = 10) -> SequentialLR:
    return SequentialLR(optimizer, [LinearLR(optimizer, 0.1, total_iters=4), CosineAnnealingLR(optimizer, end)], [4])


def test_program_that_says_the_same_continues_quietly(resumed):
    for given in ({"lr": 0.1, "scheduler": warmed}, {"lr": torch.tensor(0.1), "scheduler": step}, {"lr": 0.1}):
        _, said = resumed(given, given)
        assert said == {}


def test_rate_that_a_loop_sets_by_itself_is_gone_on_with(tmp_path: Path, capsys):
    program = Program(tmp_path, lr=0.1)
    program.optimizer.param_groups[0]["lr"] = 0.05
    program.train()
    assert Program(tmp_path, lr=0.1).optimizer.param_groups[0]["lr"] == 0.05
    assert "hyperparameters" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("before", "after", "evidence"),
    [
        ({"lr": 0.1}, {"lr": 0.01}, ("lr: 0.1 -> 0.01",)),
        (
            {"lr": 0.1, "betas": (0.9, 0.99), "weight_decay": 0.1},
            {"lr": 0.1, "betas": (0.9, 0.95), "weight_decay": 0.0},
            ("betas: [0.9, 0.99] -> [0.9, 0.95]", "weight_decay: 0.1 -> 0.0"),
        ),
        ({"lr": 0.1, "sequence_length": 128}, {"lr": 0.1, "sequence_length": 64}, ("sequence length: 128 -> 64",)),
        ({"lr": 0.1}, {"lr": 0.1, "dtype": torch.bfloat16}, ("precision: float32 -> bfloat16",)),
    ],
)
def test_changed_setting_is_said_and_is_in_force(resumed, before, after, evidence):
    program, said = resumed(before, after)
    assert said == {"hyperparameters-changed": evidence}
    for name in after.keys() & {"lr", "betas", "weight_decay"}:
        assert program.optimizer.param_groups[0][name] == after[name]
    program.train(STEPS + 1)
    assert program.optimizer.state[program.model.weight]["step"] == STEPS + 1


@pytest.mark.parametrize(
    ("before", "after", "evidence"),
    [
        ({"lr": 0.1, "scheduler": step}, {"lr": 0.2, "scheduler": step}, ("lr: 0.1 -> 0.2",)),
        (
            {"lr": 0.1, "scheduler": step},
            {"lr": 0.1, "scheduler": lambda optimizer: StepLR(optimizer, 3, gamma=0.5)},
            ("StepLR step_size: 2 -> 3", "StepLR gamma: 0.1 -> 0.5"),
        ),
        ({"lr": 0.1, "scheduler": step}, {"lr": 0.1, "scheduler": warmed}, ("scheduler: StepLR -> SequentialLR",)),
        ({"lr": 0.1, "scheduler": warmed}, {"lr": 0.05, "scheduler": warmed}, ("lr: 0.1 -> 0.05",)),
        (
            {"lr": 0.1, "scheduler": lambda optimizer: OneCycleLR(optimizer, 0.1, 20)},
            {"lr": 0.1, "scheduler": lambda optimizer: OneCycleLR(optimizer, 0.1, 40)},
            ("OneCycleLR total_steps: 20 -> 40",),
        ),
    ],
)
def test_changed_schedule_stands_where_it_would_had_it_always_been_so(resumed, tmp_path, before, after, evidence):
    always = Program(tmp_path / "always", **after).train(STEPS + 4)
    program, said = resumed(before, after)
    assert said == {"hyperparameters-changed": evidence}
    assert program.train(STEPS + 4) == pytest.approx(always[STEPS:])


def test_schedule_that_was_added_or_goes_by_no_steps_begins_anew_and_one_that_was_taken_away_leaves_the_rate(resumed):
    program, said = resumed({"lr": 0.1}, {"lr": 0.1, "scheduler": step})
    assert said == {"hyperparameters-changed": ("scheduler: none -> StepLR",)}
    assert program.train(STEPS + 2) == pytest.approx([0.1, 0.01])
    program, said = resumed({"lr": 0.1, "scheduler": step}, {"lr": 0.1})
    assert said == {"hyperparameters-changed": ("scheduler: StepLR -> none",)}
    assert program.train(STEPS + 2) == [0.1, 0.1]


def test_changed_schedule_by_losses_begins_anew_and_that_is_said(resumed):
    def plateau(optimizer: Any, patience: int = 10) -> ReduceLROnPlateau:
        return ReduceLROnPlateau(optimizer, patience=patience)

    program, said = resumed(
        {"lr": 0.1, "scheduler": plateau}, {"lr": 0.1, "scheduler": lambda optimizer: plateau(optimizer, 20)}
    )
    assert said["hyperparameters-changed"] == (
        "ReduceLROnPlateau patience: 10 -> 20",
        f"place in the schedule: {STEPS} -> 0",
    )
    assert program.scheduler.patience == 20


def test_groups_that_differ_in_a_setting_are_told_apart(resumed):
    def groups(model: Any, decay: float) -> list[dict[str, Any]]:
        return [{"params": [model.weight], "weight_decay": decay}, {"params": [model.bias], "weight_decay": 0.0}]

    _, said = resumed(
        {"lr": 0.1, "groups": lambda model: groups(model, 0.1)}, {"lr": 0.2, "groups": lambda model: groups(model, 0.3)}
    )
    assert said["hyperparameters-changed"] == ("lr: 0.1 -> 0.2", "weight_decay of group 0: 0.1 -> 0.3")


def test_change_is_said_until_a_checkpoint_of_it_is_there(tmp_path: Path, capsys):
    Program(tmp_path, lr=0.1).train()
    for steps in (STEPS, STEPS + 1):
        Program(tmp_path, lr=0.2).train(steps)
        assert "lr: 0.1 -> 0.2" in capsys.readouterr().err
    assert Program(tmp_path, lr=0.2).optimizer.param_groups[0]["lr"] == 0.2
    assert "hyperparameters" not in capsys.readouterr().err


def split(model: Any) -> list[dict[str, Any]]:
    return [{"params": [model.weight]}, {"params": [model.bias]}]


def turned(model: Any) -> list[dict[str, Any]]:
    return [{"params": [model.bias]}, {"params": [model.weight]}]


@pytest.mark.parametrize(
    ("before", "after", "evidence"),
    [
        ({"optimizer": AdamW}, {"optimizer": Adam}, "optimizer: was AdamW, is Adam"),
        ({"optimizer": AdamW}, {"optimizer": SGD}, "optimizer: was AdamW, is SGD"),
        ({}, {"groups": split}, "groups of parameters: were 1, are 2"),
        ({"groups": split}, {"groups": turned}, "group 0 of parameters: had 1, has 1; bias and 1 more moved"),
    ],
)
def test_another_optimizer_or_other_groups_are_refused_and_the_checkpoint_stays(
    tmp_path: Path, before: dict[str, Any], after: dict[str, Any], evidence: str
):
    saved = tmp_path / "saved"
    Program(saved, lr=0.1, **before).train()
    files = {path: path.read_bytes() for path in (saved / f"step-{STEPS:08d}").iterdir()}
    with pytest.raises(HoldfastError) as refused:
        Program(saved, lr=0.1, **after)
    (finding,) = refused.value.findings
    assert (finding.code, finding.evidence) == ("optimizer-changed", (evidence,))
    assert {path: path.read_bytes() for path in (saved / f"step-{STEPS:08d}").iterdir()} == files
    assert Program(saved, lr=0.1, **before).session.step == STEPS


def forget(folder: Path) -> None:
    """Make a checkpoint as they were before settings were noted."""
    for file in folder.glob("step-*/manifest.json"):
        assert json.loads(file.read_bytes())["hyperparams"]["optimizer"]
        rewrite(file, {}, without={"hyperparams"})


def test_checkpoint_without_the_record_is_gone_on_from_quietly_with_its_own_settings(tmp_path: Path, capsys):
    saved = tmp_path / "saved"
    Program(saved, lr=0.1, scheduler=step).train()
    forget(saved)
    program = Program(saved, lr=0.2, scheduler=step)
    assert program.session.step == STEPS
    assert program.scheduler.base_lrs == [0.1]
    assert "hyperparameters" not in capsys.readouterr().err


@pytest.mark.parametrize("after", [{"optimizer": SGD}, {"groups": split}])
def test_other_groups_are_refused_also_where_nothing_was_noted(tmp_path: Path, after: Settings):
    Program(tmp_path, lr=0.1, groups=turned).train()
    forget(tmp_path)
    with pytest.raises(HoldfastError) as refused:
        Program(tmp_path, lr=0.1, **{"groups": turned, **after})
    assert refused.value.findings[0].code in {"optimizer-changed", "checkpoint-incompatible"}


def test_functions_of_a_schedule_are_the_programs_and_are_not_compared(resumed):
    program, said = resumed(
        {"lr": 0.1, "scheduler": lambda optimizer: LambdaLR(optimizer, lambda step: 1 / (1 + step))},
        {"lr": 0.1, "scheduler": lambda optimizer: LambdaLR(optimizer, lambda step: 1 / (2 + step))},
    )
    assert said == {}
    assert program.train(STEPS + 1) == pytest.approx([0.1 / (2 + STEPS + 1)])
