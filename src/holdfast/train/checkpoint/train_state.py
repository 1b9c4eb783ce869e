"""Owns what of a training loop is saved: the tensors that all ranks share out, and each rank's own part.

Refuses to own where it goes (dcp_io.py, manager.py).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NotRequired, Protocol, TypedDict

import torch

# It takes 0.1 s to import once an optimiser has brought in torch._dynamo (2.6 s), as every one does when it is made.
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn import Module
from torch.optim import Optimizer

from holdfast.train.checkpoint import rng
from holdfast.train.checkpoint.deferred_pickle import defer_pickle


class Stateful(Protocol):
    """What a scheduler, a sampler, or anything of the user's offers in order to be saved with the model."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> object: ...


class _PerRankState(TypedDict):
    """One rank's own part: what is not the model's or the optimiser's."""

    random: rng.RandomState
    scheduler: dict[str, Any] | None
    extra: dict[str, Any] | None
    data: NotRequired[dict[str, Any] | None]
    """Absent from checkpoints of before there was data."""


class PostStepState(TypedDict):
    """What a loop changes after its optimiser's step."""

    scheduler: dict[str, Any] | None
    extra: dict[str, Any] | None
    groups: list[dict[str, Any]]
    """The optimiser's, without their parameters: learning rates and the like."""


@dataclass(frozen=True, kw_only=True)
class TrainState:
    """Everything of a training loop's that a checkpoint holds, beside the step and the random numbers."""

    model: Module
    optimizer: Optimizer
    scheduler: Stateful | None = None
    extra: Stateful | None = None
    data: Stateful | None = None
    sequence_length: int | None = None
    """Tokens, where the program says so; it is not saved, but a change is told."""

    def tensors(self) -> dict[str, Any]:
        """The model's and the optimiser's state as it lies in their own memory, by names that no sharding changes."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_tensors(self, tensors: dict[str, Any]) -> None:
        """Go on from such a state."""
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=tensors["model"],
            optim_state_dict=tensors["optimizer"],
        )

    def per_rank_state(self) -> Callable[[], bytes]:
        """What gives this rank's own part, as it is now, whenever it is called."""
        random = rng.capture()
        parts = (("scheduler", self.scheduler), ("extra", self.extra), ("data", self.data))
        shared = {name: part.state_dict() for name, part in parts if part is not None}
        return defer_pickle(lambda: {"scheduler": None, "extra": None, "data": None, "random": random()}, shared)

    def load_per_rank_state(self, file: Path | BinaryIO, *, random: bool = True) -> dict[str, Any] | None:
        """Go on from such a part, in a file; with its random numbers, or with those there are.

        Returns where the schedule stood, which is for hyperparam_overrides.py to take.
        """
        # Unpickled in full, since the user's own state may be anything: the folder is as trusted as the code.
        own: _PerRankState = torch.load(file, weights_only=False)
        if self.extra is not None and own["extra"] is not None:
            self.extra.load_state_dict(own["extra"])
        if self.data is not None and (data := own.get("data")) is not None:
            self.data.load_state_dict(data)
        if random:
            rng.restore(own["random"])
        return own["scheduler"]

    def post_step_state(self) -> PostStepState:
        """A copy of what is changed after the optimiser's step, for `load_post_step_state`."""
        given = PostStepState(
            scheduler=None if self.scheduler is None else self.scheduler.state_dict(),
            extra=None if self.extra is None else self.extra.state_dict(),
            groups=[{name: value for name, value in each.items() if name != "params"} for each in self._groups()],
        )
        return copy.deepcopy(given)

    def load_post_step_state(self, state: PostStepState) -> None:
        """Have it as it was then."""
        if self.scheduler is not None and state["scheduler"] is not None:
            self.scheduler.load_state_dict(state["scheduler"])
        if self.extra is not None and state["extra"] is not None:
            self.extra.load_state_dict(state["extra"])
        for group, before in zip(self._groups(), state["groups"], strict=True):
            group.update(before)

    def _groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups
