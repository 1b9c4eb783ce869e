"""State of a training loop to save: tensors sharded over all ranks, and each rank's own part.

Storage: dcp_io.py, manager.py.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NotRequired, Protocol, TypedDict

import torch

# Importing it takes 0.1 s after an optimiser has imported torch._dynamo (2.6 s), as every optimiser does.
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn import Module
from torch.optim import Optimizer

from holdfast.train.checkpoint import rng
from holdfast.train.checkpoint.deferred_pickle import defer_pickle


class Stateful(Protocol):
    """Interface of a scheduler, a sampler, or any user object that is saved with the model."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> object: ...


class _PerRankState(TypedDict):
    """One rank's own part: everything except model and optimiser."""

    random: rng.RandomState
    scheduler: dict[str, Any] | None
    extra: dict[str, Any] | None
    data: NotRequired[dict[str, Any] | None]
    """Absent from checkpoints older than data state."""


class PostStepState(TypedDict):
    """State that a loop changes after its optimiser's step."""

    scheduler: dict[str, Any] | None
    extra: dict[str, Any] | None
    groups: list[dict[str, Any]]
    """The optimiser's groups without their parameters: learning rates and the like."""


@dataclass(frozen=True, kw_only=True)
class TrainState:
    """All state of a training loop that a checkpoint holds, except the step and the random state."""

    model: Module
    optimizer: Optimizer
    scheduler: Stateful | None = None
    extra: Stateful | None = None
    data: Stateful | None = None
    sequence_length: int | None = None
    """Tokens per sequence, if the program sets it; not saved, but a change is reported."""

    def tensors(self) -> dict[str, Any]:
        """Live state of model and optimiser, by names that do not depend on sharding."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_tensors(self, tensors: dict[str, Any]) -> None:
        """Load such a state."""
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=tensors["model"],
            optim_state_dict=tensors["optimizer"],
        )

    def per_rank_state(self) -> Callable[[], bytes]:
        """Return a function that yields this rank's own part with its current values, at any later time."""
        random = rng.capture()
        parts = (("scheduler", self.scheduler), ("extra", self.extra), ("data", self.data))
        shared = {name: part.state_dict() for name, part in parts if part is not None}
        return defer_pickle(lambda: {"scheduler": None, "extra": None, "data": None, "random": random()}, shared)

    def load_per_rank_state(self, file: Path | BinaryIO, *, random: bool = True) -> dict[str, Any] | None:
        """Load such a part from a file; `random`: with its random state, else the current one.

        Returns the schedule's state, for hyperparam_overrides.py to load.
        """
        # Unpickled in full, since the user's state may be anything: the folder is as trusted as the code.
        own: _PerRankState = torch.load(file, weights_only=False)
        if self.extra is not None and own["extra"] is not None:
            self.extra.load_state_dict(own["extra"])
        if self.data is not None and (data := own.get("data")) is not None:
            self.data.load_state_dict(data)
        if random:
            rng.restore(own["random"])
        return own["scheduler"]

    def post_step_state(self) -> PostStepState:
        """A copy of the state changed after the optimiser's step, for `load_post_step_state`."""
        given = PostStepState(
            scheduler=None if self.scheduler is None else self.scheduler.state_dict(),
            extra=None if self.extra is None else self.extra.state_dict(),
            groups=[{name: value for name, value in each.items() if name != "params"} for each in self._groups()],
        )
        return copy.deepcopy(given)

    def load_post_step_state(self, state: PostStepState) -> None:
        """Restore that copy."""
        if self.scheduler is not None and state["scheduler"] is not None:
            self.scheduler.load_state_dict(state["scheduler"])
        if self.extra is not None and state["extra"] is not None:
            self.extra.load_state_dict(state["extra"])
        for group, before in zip(self._groups(), state["groups"], strict=True):
            group.update(before)

    def _groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups
