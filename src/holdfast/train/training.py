"""Owns what of a training loop is saved: the tensors that all ranks share out, and each rank's own part.

Refuses to own where it goes (tensors.py, checkpoint.py).
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

from holdfast.train import rng
from holdfast.train.noted import noted


class Stateful(Protocol):
    """What a scheduler, a sampler, or anything of the user's offers in order to be saved with the model."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> object: ...


class _Own(TypedDict):
    """One rank's own part: what is not the model's or the optimiser's."""

    random: rng.RandomState
    scheduler: dict[str, Any] | None
    extra: dict[str, Any] | None
    data: NotRequired[dict[str, Any] | None]
    """Absent from checkpoints of before there was data."""


class Beside(TypedDict):
    """What a loop changes after its optimiser's step."""

    scheduler: dict[str, Any] | None
    extra: dict[str, Any] | None
    groups: list[dict[str, Any]]
    """The optimiser's, without their parameters: learning rates and the like."""


@dataclass(frozen=True, kw_only=True)
class Training:
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

    def take(self, tensors: dict[str, Any]) -> None:
        """Go on from such a state."""
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=tensors["model"],
            optim_state_dict=tensors["optimizer"],
        )

    def own(self) -> Callable[[], bytes]:
        """What gives this rank's own part, as it is now, whenever it is called."""
        random = rng.note()
        parts = (("scheduler", self.scheduler), ("extra", self.extra), ("data", self.data))
        shared = {name: part.state_dict() for name, part in parts if part is not None}
        return noted(lambda: {"scheduler": None, "extra": None, "data": None, "random": random()}, shared)

    def take_own(self, file: Path | BinaryIO, *, random: bool = True) -> dict[str, Any] | None:
        """Go on from such a part, in a file; with its random numbers, or with those there are.

        Returns where the schedule stood, which is for program.py to take.
        """
        # Unpickled in full, since the user's own state may be anything: the folder is as trusted as the code.
        own: _Own = torch.load(file, weights_only=False)
        if self.extra is not None and own["extra"] is not None:
            self.extra.load_state_dict(own["extra"])
        if self.data is not None and (data := own.get("data")) is not None:
            self.data.load_state_dict(data)
        if random:
            rng.restore(own["random"])
        return own["scheduler"]

    def beside(self) -> Beside:
        """A copy of what is changed after the optimiser's step, for `take_beside`."""
        given = Beside(
            scheduler=None if self.scheduler is None else self.scheduler.state_dict(),
            extra=None if self.extra is None else self.extra.state_dict(),
            groups=[{name: value for name, value in each.items() if name != "params"} for each in self._groups()],
        )
        return copy.deepcopy(given)

    def take_beside(self, beside: Beside) -> None:
        """Have it as it was then."""
        if self.scheduler is not None and beside["scheduler"] is not None:
            self.scheduler.load_state_dict(beside["scheduler"])
        if self.extra is not None and beside["extra"] is not None:
            self.extra.load_state_dict(beside["extra"])
        for group, before in zip(self._groups(), beside["groups"], strict=True):
            group.update(before)

    def _groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups
