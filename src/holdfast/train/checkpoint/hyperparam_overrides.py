"""Makes the program's hyper-parameters override those of the checkpoint it resumes from.

Torch's optimizers and schedulers silently load the old settings. Here a changed setting applies from the first resumed
step, and a changed schedule is fast-forwarded as if it had always been so. Unchanged settings continue with the values
that schedules and loops gave them. What counts as a change: hyperparams.py.
"""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any, BinaryIO

from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from holdfast.train.checkpoint.hyperparams import (
    HyperparamChange,
    Hyperparams,
    diff,
    optimizer_mismatch,
    schedule_changed,
    schedule_settings,
    to_json,
)
from holdfast.train.checkpoint.train_state import Stateful, TrainState
from holdfast.train.torch_private import COMPOSED_SCHEDULERS


class HyperparamOverrides:
    """A program's hyper-parameters, captured before anything is loaded into it."""

    def __init__(self, train_state: TrainState) -> None:
        self._train_state = train_state
        self._options = [
            {name: copy.deepcopy(value) for name, value in group.items() if name != "params"}
            for group in train_state.optimizer.param_groups
        ]
        self._parameters: list[set[str]] = []
        """Parameter names of each group."""
        scheduler = train_state.scheduler
        dtypes = {str(each.dtype).removeprefix("torch.") for each in train_state.model.parameters()}
        self.hyperparams = Hyperparams(
            optimizer=type(train_state.optimizer).__name__,
            groups=[to_json(group) for group in self._options],
            scheduler=None if scheduler is None else type(scheduler).__name__,
            schedule=schedule_settings(scheduler.state_dict()) if isinstance(scheduler, LRScheduler) else {},
            precision=", ".join(sorted(dtypes)),
            sequence_length=train_state.sequence_length,
            state=sorted(train_state.state),
        )

    def prepare_load(self, state: dict[str, Any], was: Hyperparams | None) -> str | None:
        """Remove from `state` what the checkpoint lacks; returns why the optimizers do not match, if so."""
        groups = state["optimizer"]["param_groups"]
        self._parameters = [set(group["params"]) for group in groups]
        if was is None:
            return None
        if (why := optimizer_mismatch(was, self.hyperparams)) is not None:
            return why
        for group, old in zip(groups, was.groups, strict=True):
            for name in group.keys() - old.keys() - {"params"}:
                del group[name]
        modules = state.get("state", {})
        for name in modules.keys() - was.state:
            del modules[name]
        return None

    def group_mismatch(self, state: dict[str, Any]) -> str | None:
        """Why the state has other parameter groups; None if they match."""
        for number, (group, mine) in enumerate(zip(state["optimizer"]["param_groups"], self._parameters, strict=True)):
            if other := sorted(mine.symmetric_difference(group["params"])):
                more = f" and {len(other) - 1} more" if len(other) > 1 else ""
                return (
                    f"group {number} of parameters: had {len(group['params'])}, has {len(mine)}; {other[0]}{more} moved"
                )
        return None

    def load(
        self, state: dict[str, Any], own: Path | BinaryIO, was: Hyperparams | None, *, random: bool = True
    ) -> list[HyperparamChange]:
        """Load the state, apply the program's settings, and return the changes.

        Restores the random state of `own` if `random`, else keeps the current one.
        """
        now, scheduler = self.hyperparams, self._train_state.scheduler
        changed = [] if was is None else diff(was, now)
        rescheduled = was is not None and schedule_changed(was, now)
        if was is not None:
            self._override_groups(state["optimizer"]["param_groups"], was, entirely=rescheduled)
        self._train_state.load_tensors(state)
        stood = self._train_state.load_per_rank_state(own, random=random)
        if scheduler is None or stood is None:
            return changed
        if was is not None and rescheduled and (isinstance(scheduler, LRScheduler) or was.scheduler != now.scheduler):
            return changed + _fast_forward(scheduler, stood)
        scheduler.load_state_dict(stood)
        return changed

    def override(
        self, groups: list[dict[str, Any]], stood: dict[str, Any] | None, was: Hyperparams
    ) -> tuple[list[HyperparamChange], dict[str, Any] | None]:
        """Apply the program's settings to the optimizer groups and schedule that a framework is about to load.

        Returns the changes, and the schedule to load instead.
        """
        changed, scheduler = diff(was, self.hyperparams), self._train_state.scheduler
        rescheduled = schedule_changed(was, self.hyperparams)
        self._override_groups(groups, was, entirely=rescheduled)
        if scheduler is None or stood is None or not rescheduled:
            return changed, stood
        changed += _fast_forward(scheduler, stood)
        for group, mine in zip(groups, self._train_state.optimizer.param_groups, strict=True):
            group["lr"] = mine["lr"]
        return changed, scheduler.state_dict()

    def _override_groups(self, groups: list[dict[str, Any]], was: Hyperparams, *, entirely: bool) -> None:
        for group, options, old, new in zip(groups, self._options, was.groups, self.hyperparams.groups, strict=True):
            moved = {"lr"} if "initial_lr" in old else set[str]()  # by a schedule that continues
            changed = {name for name in new.keys() - moved if name not in old or old[name] != new[name]}
            group.update({name: copy.deepcopy(options[name]) for name in (options if entirely else changed)})


def _fast_forward(scheduler: Stateful, stood: dict[str, Any]) -> list[HyperparamChange]:
    """Advance a fresh schedule to the step of the loaded one; returns a change to report if it cannot.

    It steps the schedule, since not every schedule can compute its rates in the middle.
    """
    parts = (stood, *stood.get(COMPOSED_SCHEDULERS, ()))
    steps = next((each["last_epoch"] for each in parts if "last_epoch" in each), None)
    # ReduceLROnPlateau depends on the metrics it received, not on steps.
    if steps is None or not isinstance(scheduler, LRScheduler) or isinstance(scheduler, ReduceLROnPlateau):
        return [HyperparamChange("place in the schedule", steps, 0)]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
        for _ in range(steps):
            scheduler.step()
    return []
