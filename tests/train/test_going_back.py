"""A start that goes back sets aside the newest checkpoints, as far as there are older ones, once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from holdfast.errors import HoldfastError
from holdfast.train.checkpoint.manager import CheckpointManager
from holdfast.train.checkpoint.retention_policy import RetentionPolicy
from holdfast.train.checkpoint.storage import SharedStorage
from holdfast.train.checkpoint.train_state import TrainState
from holdfast.train.checkpoint.writer_fence import WriterId
from holdfast.train.session.control_group import ControlGroup


def manager_of(folder: Path, *, back: int = 0, memory: Path | None = None, resumed: int = 0) -> CheckpointManager:
    model = torch.nn.Linear(2, 2)
    state = TrainState(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    ranks = ControlGroup(world_size=1)
    storage = SharedStorage(folder / "saved", retention=RetentionPolicy(keep=3), ranks=ranks, writer=WriterId())
    return CheckpointManager(
        storage,
        train_state=state,
        ranks=ranks,
        transfer_memory=memory,
        checkpoints_back=back,
        resumed_step=resumed,
        writer=WriterId(),
    )


def save(manager: CheckpointManager, *steps: int) -> None:
    for step in steps:
        manager.start_save(step)
        saved = manager.wait_saved()
        assert saved is not None
        assert saved.problem is None


def test_newest_checkpoints_are_set_aside_on_request_as_far_as_there_are_older_ones(tmp_path: Path) -> None:
    manager = manager_of(tmp_path)
    save(manager, 10, 20, 30)
    manager.close()
    assert manager_of(tmp_path, back=1).restore().step == 20
    assert sorted(each.name for each in (tmp_path / "saved").glob("step-*")) == [
        "step-00000010",
        "step-00000020",
        "step-00000030.diverged",
    ]
    assert manager_of(tmp_path).restore().step == 20
    assert manager_of(tmp_path, back=9).restore().step == 10
    assert manager_of(tmp_path, back=1).restore().step == 10
    assert manager_of(tmp_path / "empty", back=1).restore().step == 0


def test_state_in_memory_is_left_out_by_a_start_that_goes_back(tmp_path: Path) -> None:
    memory = tmp_path / "memory"
    memory.touch()
    manager = manager_of(tmp_path, memory=memory)
    save(manager, 10, 20)
    assert manager.transfer_state(25) is None
    manager.close()
    assert manager_of(tmp_path, memory=memory).restore().step == 25
    assert manager_of(tmp_path, memory=memory, back=1).restore().step == 10


def test_run_that_resumes_another_one_does_not_start_without_its_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(HoldfastError) as error:
        manager_of(tmp_path, resumed=8).restore()
    assert error.value.findings[0].code == "resumed-checkpoint-missing"
    save(manager_of(tmp_path), 5)
    assert manager_of(tmp_path, resumed=8).restore().step == 5
