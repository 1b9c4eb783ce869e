"""Owns that a training goes on with what its program says now, where that is not what the checkpoint was of.

Torch's optimisers and schedulers load the settings of old, and say nothing. Here a setting that was changed is in force
from the step on that a training is resumed at, and a schedule stands where it would stand had it always been so; what
was not changed goes on from where it was, as schedules and loops moved it. Refuses to own what a change is
(configured.py).
"""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any, BinaryIO

from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from holdfast.train.configured import (
    Change,
    Configured,
    another_optimizer,
    changes,
    of_schedule,
    plain,
    schedule_changed,
)
from holdfast.train.training import Stateful, Training


class Program:
    """What a program says of a training; made before anything is loaded into it."""

    def __init__(self, training: Training) -> None:
        self._training = training
        self._options = [
            {name: copy.deepcopy(value) for name, value in group.items() if name != "params"}
            for group in training.optimizer.param_groups
        ]
        self._parameters: list[set[str]] = []
        """Of each group, by name."""
        scheduler = training.scheduler
        dtypes = {str(each.dtype).removeprefix("torch.") for each in training.model.parameters()}
        self.configured = Configured(
            optimizer=type(training.optimizer).__name__,
            groups=[plain(group) for group in self._options],
            scheduler=None if scheduler is None else type(scheduler).__name__,
            schedule=of_schedule(scheduler.state_dict()) if isinstance(scheduler, LRScheduler) else {},
            precision=", ".join(sorted(dtypes)),
            sequence_length=training.sequence_length,
        )

    def ask_for(self, state: dict[str, Any], was: Configured | None) -> str | None:
        """Leave out of what is to be read what the checkpoint doesn't have; returns why it is another optimiser's."""
        groups = state["optimizer"]["param_groups"]
        self._parameters = [set(group["params"]) for group in groups]
        if was is None:
            return None
        if (why := another_optimizer(was, self.configured)) is not None:
            return why
        for group, old in zip(groups, was.groups, strict=True):
            for name in group.keys() - old.keys() - {"params"}:
                del group[name]
        return None

    def moved(self, state: dict[str, Any]) -> str | None:
        """Why what was read is of other groups of parameters; None where it is not."""
        for number, (group, mine) in enumerate(zip(state["optimizer"]["param_groups"], self._parameters, strict=True)):
            if other := sorted(mine.symmetric_difference(group["params"])):
                more = f" and {len(other) - 1} more" if len(other) > 1 else ""
                return (
                    f"group {number} of parameters: had {len(group['params'])}, has {len(mine)}; {other[0]}{more} moved"
                )
        return None

    def take(
        self, state: dict[str, Any], own: Path | BinaryIO, was: Configured | None, *, random: bool = True
    ) -> list[Change]:
        """Go on from what was read, with what the program says; returns what that changes.

        With the random numbers of `own`, or with those there are.
        """
        now, scheduler = self.configured, self._training.scheduler
        changed = [] if was is None else changes(was, now)
        rescheduled = was is not None and schedule_changed(was, now)
        if was is not None:
            self._set(state["optimizer"]["param_groups"], was, entirely=rescheduled)
        self._training.take(state)
        stood = self._training.take_own(own, random=random)
        if scheduler is None or stood is None:
            return changed
        if was is not None and rescheduled and (isinstance(scheduler, LRScheduler) or was.scheduler != now.scheduler):
            return changed + _go_to(scheduler, stood)
        scheduler.load_state_dict(stood)
        return changed

    def settle(
        self, groups: list[dict[str, Any]], stood: dict[str, Any] | None, was: Configured
    ) -> tuple[list[Change], dict[str, Any] | None]:
        """Put what the program says into what a framework is about to load: the optimiser's groups, and a schedule.

        Returns what that changes, and the schedule to be loaded instead.
        """
        changed, scheduler = changes(was, self.configured), self._training.scheduler
        rescheduled = schedule_changed(was, self.configured)
        self._set(groups, was, entirely=rescheduled)
        if scheduler is None or stood is None or not rescheduled:
            return changed, stood
        changed += _go_to(scheduler, stood)
        for group, mine in zip(groups, self._training.optimizer.param_groups, strict=True):
            group["lr"] = mine["lr"]
        return changed, scheduler.state_dict()

    def _set(self, groups: list[dict[str, Any]], was: Configured, *, entirely: bool) -> None:
        for group, options, old, new in zip(groups, self._options, was.groups, self.configured.groups, strict=True):
            moved = {"lr"} if "initial_lr" in old else set[str]()  # by a schedule that goes on
            changed = {name for name in new.keys() - moved if name not in old or old[name] != new[name]}
            group.update({name: copy.deepcopy(options[name]) for name in (options if entirely else changed)})


def _go_to(scheduler: Stateful, stood: dict[str, Any]) -> list[Change]:
    """Have a fresh schedule stand as far on as another stood; returns what is to be said where it cannot.

    Stepped there, since not every schedule can tell its rates in the middle.
    """
    steps = next((each["last_epoch"] for each in (stood, *stood.get("_schedulers", ())) if "last_epoch" in each), None)
    # ReduceLROnPlateau goes by what it was told, not by steps.
    if steps is None or not isinstance(scheduler, LRScheduler) or isinstance(scheduler, ReduceLROnPlateau):
        return [Change("place in the schedule", steps, 0)]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
        for _ in range(steps):
            scheduler.step()
    return []
