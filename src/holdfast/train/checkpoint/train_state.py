"""State of a training loop to save: tensors sharded over all ranks, and each rank's own part.

Storage: dcp_io.py, manager.py. What each rank's own part may contain: safe_state.py.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NotRequired, Protocol, TypedDict

import torch

# Importing it takes 0.1 s after an optimizer has imported torch._dynamo (2.6 s), as every optimizer does.
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict, set_model_state_dict
from torch.nn import Module
from torch.optim import Optimizer

from holdfast.errors import HoldfastError
from holdfast.train.accelerator import Accelerator, accelerator_of
from holdfast.train.checkpoint import optimizer_state, rng, safe_state
from holdfast.train.checkpoint.deferred_pickle import defer_pickle


class Stateful(Protocol):
    """Interface of a scheduler, a sampler, or any user object that is saved with the model."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> object: ...


class _PerRankState(TypedDict):
    """One rank's own part: everything except model and optimizer."""

    random: rng.RandomState
    scheduler: dict[str, Any] | None
    state: dict[str, dict[str, Any]]
    data: NotRequired[dict[str, Any] | None]
    """Absent from checkpoints older than data state."""


class PostStepState(TypedDict):
    """State that a loop changes after its optimizer's step."""

    scheduler: dict[str, Any] | None
    state: dict[str, dict[str, Any]]
    groups: list[dict[str, Any]]
    """The optimizer's groups without their parameters: learning rates and the like."""


class StateNotLoaded(Exception):
    """An object in `state` does not accept what was saved of it; the text says why."""


@dataclass(frozen=True, kw_only=True)
class TrainState:
    """All state of a training loop that a checkpoint holds, except the step and the random state."""

    model: Module
    optimizer: Optimizer
    scheduler: Stateful | None = None
    state: Mapping[str, Stateful] = field(default_factory=dict[str, Stateful])
    """The user's own objects by name. Modules are saved like the model, the others per rank."""
    data: Stateful | None = None
    find_accelerator: Callable[[torch.device], Accelerator | None] = accelerator_of
    sequence_length: int | None = None
    """Tokens per sequence, if the program sets it; not saved, but a change is reported."""

    @property
    def accelerator(self) -> Accelerator | None:
        """The device of the model's first parameter; None for the host."""
        first = next(self.model.parameters(), None)
        return None if first is None else self.find_accelerator(first.device)

    @property
    def modules(self) -> dict[str, Module]:
        """The modules in `state`, such as an average of the weights."""
        return {name: each for name, each in self.state.items() if isinstance(each, Module)}

    def tensors(self) -> dict[str, Any]:
        """Live state of model, optimizer and modules, by names that do not depend on sharding."""
        with optimizer_state.none_created(self.optimizer):
            model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer} | self._modules_state()

    def tensors_to_load_into(self, saved: Collection[str]) -> dict[str, Any]:
        """The same, with optimizer state for exactly these parameters: those that were saved with some."""
        optimizer = optimizer_state.state_to_load_into(self.model, self.optimizer, saved)
        return {"model": get_model_state_dict(self.model), "optimizer": optimizer} | self._modules_state()

    def _modules_state(self) -> dict[str, Any]:
        modules = {name: get_model_state_dict(each) for name, each in self.modules.items()}
        return {"state": modules} if modules else {}

    def load_tensors(self, tensors: dict[str, Any]) -> None:
        """Load such a state."""
        optimizer_state.load(self.model, self.optimizer, tensors["optimizer"])
        set_model_state_dict(self.model, tensors["model"])
        for name, state in tensors.get("state", {}).items():
            set_model_state_dict(self.modules[name], state)

    def per_rank_state(self) -> Callable[[], bytes]:
        """Return a function that yields this rank's own part with its current values, at any later time."""
        random = rng.capture()
        return defer_pickle(lambda: {"scheduler": None, "state": {}, "data": None, "random": random()}, self._shared())

    def refuse_unsafe(self) -> None:
        """Raise HoldfastError if a part could not be loaded from a checkpoint.

        Loaders are not asked before a save: some begin an iteration, with workers, to answer.
        """
        for name, each in self._per_rank_objects().items():
            if not isinstance(each, Iterable):
                safe_state.refuse_unsafe(f"Session(state={{{name!r}: ...}})", each.state_dict())
        if self.scheduler is not None:
            safe_state.refuse_unsafe("Session(scheduler=...)", self.scheduler.state_dict())
        safe_state.refuse_unsafe("the optimizer's parameter groups", self._settings())

    def _shared(self) -> dict[str, Any]:
        """The parts of this rank that other code may change at any time."""
        parts = (("scheduler", self.scheduler), ("data", self.data))
        shared = {name: part.state_dict() for name, part in parts if part is not None}
        if own := {name: each.state_dict() for name, each in self._per_rank_objects().items()}:
            shared["state"] = own
        return shared

    def _per_rank_objects(self) -> dict[str, Stateful]:
        modules = self.modules
        return {name: each for name, each in self.state.items() if name not in modules}

    def load_per_rank_state(self, file: Path | BinaryIO, *, random: bool = True) -> dict[str, Any] | None:
        """Load such a part from a file; `random`: with its random state, else the current one.

        Returns the schedule's state, for hyperparam_overrides.py to load. Raises StateNotLoaded.
        """
        own: _PerRankState = safe_state.load(file)
        for name, each in self._per_rank_objects().items():
            if name in own["state"]:
                _load_object(name, each, own["state"][name])
        if self.data is not None and (data := own.get("data")) is not None:
            self.data.load_state_dict(data)
        if random:
            rng.restore(own["random"])
        return own["scheduler"]

    def post_step_state(self) -> PostStepState:
        """A copy of the state changed after the optimizer's step, for `load_post_step_state`."""
        given = PostStepState(
            scheduler=None if self.scheduler is None else self.scheduler.state_dict(),
            state={name: each.state_dict() for name, each in self.state.items()},
            groups=self._settings(),
        )
        return copy.deepcopy(given)

    def load_post_step_state(self, state: PostStepState) -> None:
        """Restore that copy."""
        if self.scheduler is not None and state["scheduler"] is not None:
            self.scheduler.load_state_dict(state["scheduler"])
        for name, each in self.state.items():
            each.load_state_dict(state["state"][name])
        for group, before in zip(self._groups(), state["groups"], strict=True):
            group.update(before)

    def _groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    def _settings(self) -> list[dict[str, Any]]:
        return [{name: value for name, value in each.items() if name != "params"} for each in self._groups()]


def _load_object(name: str, target: Stateful, state: dict[str, Any]) -> None:
    try:
        target.load_state_dict(state)
    except HoldfastError:
        raise  # it says more than that the checkpoint does not fit
    except Exception as error:  # any object of the user's: it may raise anything
        raise StateNotLoaded(f"state[{name!r}]: {type(error).__name__}: {error}") from error
