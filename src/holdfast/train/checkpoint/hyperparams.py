"""Hyper-parameter snapshot of a program, and its difference from a checkpoint's.

Taken before anything is loaded, so that changes made by schedules and loops do not count, and stored in the manifest.
Applying a difference: hyperparam_overrides.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import msgspec

from holdfast.errors import ExitCode, HoldfastError, failure
from holdfast.findings import Finding, Severity
from holdfast.train.session.rank_config import USE_ANOTHER_FOLDER
from holdfast.train.torch_private import COMPOSED_SCHEDULERS, MILESTONES

Settings = dict[str, Any]
"""Values by name, as JSON types."""

COUNTERS = frozenset({"base_lrs", "last_epoch"})
"""Scheduler fields that are no setting, or the optimizer's; names that begin with an underscore are excluded too."""
NESTED = frozenset({COMPOSED_SCHEDULERS, MILESTONES})
"""Fields of schedulers composed of others."""


class Hyperparams(msgspec.Struct, frozen=True, kw_only=True):
    """A program's settings before its first step."""

    optimizer: str
    """Class name of the optimizer."""
    groups: list[Settings]
    """Options of each parameter group."""
    scheduler: str | None = None
    schedule: Settings = {}
    precision: str = ""
    """Data type of the program's parameters."""
    sequence_length: int | None = None
    state: list[str] = []
    """Names of the user's own objects."""
    batch: int | None = None
    """Samples per rank and step, if a framework defines them."""


class HyperparamChange(NamedTuple):
    """A setting whose value changed."""

    name: str
    was: object
    now: object

    def __str__(self) -> str:
        return f"{self.name}: {_shown(self.was)} -> {_shown(self.now)}"


def to_json(value: Any) -> Any:
    """A setting as a JSON value that survives a round trip."""
    if hasattr(value, "item") and getattr(value, "numel", lambda: 1)() == 1:
        value = value.item()  # a learning rate may be a tensor, and any number a numpy scalar
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return value if math.isfinite(value) else str(value)
        case Mapping():
            return {str(name): to_json(each) for name, each in cast("Mapping[Any, Any]", value).items()}
        case list() | tuple():
            return [to_json(each) for each in cast("Sequence[Any]", value)]
        case _:
            return f"a {type(value).__name__}"


def schedule_settings(state: Mapping[str, Any]) -> Settings:
    """The settings in the state dict of a torch scheduler."""
    found: Settings = {}
    for name, value in state.items():
        if name in NESTED:
            parts = cast("Sequence[Any]", value)
            found[name[1:]] = [
                schedule_settings(part) if isinstance(part, Mapping) else to_json(part)  # pyright: ignore[reportUnknownArgumentType]
                for part in parts
            ]
        elif name not in COUNTERS and not name.startswith("_"):
            found[name] = to_json(value)
    return found


def optimizer_mismatch(was: Hyperparams, now: Hyperparams) -> str | None:
    """Why one optimizer cannot load the other's state; None if it can."""
    if was.optimizer != now.optimizer:
        return f"optimizer: was {was.optimizer}, is {now.optimizer}"
    if len(was.groups) != len(now.groups):
        return f"groups of parameters: were {len(was.groups)}, are {len(now.groups)}"
    return None


def optimizer_changed(step: int, where: str, why: str) -> HoldfastError:
    """Error for an optimizer that does not match the checkpoint's state."""
    return failure(
        "optimizer-changed",
        f"the checkpoint of step {step} is of another optimizer, or of other groups of parameters",
        exit_code=ExitCode.CANNOT_RUN_HERE,
        where=where,
        evidence=(why,),
        remedy=f"make the optimizer as it was, or {USE_ANOTHER_FOLDER}, and begin there "
        "with the weights alone: torch.distributed.checkpoint loads them from this one, which is untouched",
    )


def diff(was: Hyperparams, now: Hyperparams) -> list[HyperparamChange]:
    """Settings that differ, of two snapshots with the same number of groups."""
    before, after = [_rates(group) for group in was.groups], [_rates(group) for group in now.groups]
    # A name in only one of them belongs to a scheduler, or to another version of torch.
    shared = [name for name in after[0] if all(name in group for group in (*after, *before))]
    found = [change for name in shared for change in _diff_groups(name, before, after)]
    for name in ("scheduler", "precision", "sequence_length", "batch"):
        found += _diff_value(name.replace("_", " "), getattr(was, name), getattr(now, name))
    for name in sorted({*was.state}.symmetric_difference(now.state)):
        saved = name in was.state
        found += _diff_value(f"state[{name!r}]", *(("saved", "not given") if saved else ("not saved", "given")))
    if was.scheduler == now.scheduler:
        found += [
            HyperparamChange(f"{now.scheduler} {name}", *values)
            for name, *values in _diff_shared(was.schedule, now.schedule)
        ]
    return found


def hyperparameters_changed(step: int, where: str, found: Sequence[HyperparamChange]) -> Finding:
    """Finding that lists the changed settings."""
    return Finding(
        code="hyperparameters-changed",
        severity=Severity.WARNING,
        what=f"the program sets {len(found)} hyperparameter{'s' * (len(found) > 1)} otherwise than the checkpoint of "
        f"step {step} has them: what the program says is in force from step {step + 1} on",
        where=where,
        evidence=tuple(map(str, found)),
        remedy="nothing, if intended; to continue as before, set them back in the program and start it again",
    )


def schedule_changed(was: Hyperparams, now: Hyperparams) -> bool:
    """Whether the learning rate schedule differs from the checkpoint's."""
    rates = [_rates(group)["lr"] for group in was.groups], [_rates(group)["lr"] for group in now.groups]
    return was.scheduler != now.scheduler or rates[0] != rates[1] or bool(_diff_shared(was.schedule, now.schedule))


def _rates(group: Settings) -> Settings:
    """A group's settings; where a scheduler moves the learning rate, its initial value is the setting."""
    rate = group.get("initial_lr", group.get("lr"))
    return {"lr": rate} | {name: value for name, value in group.items() if name not in {"lr", "initial_lr"}}


def _diff_groups(name: str, before: Sequence[Settings], after: Sequence[Settings]) -> list[HyperparamChange]:
    """Differences between groups; one change if it is the same in all groups."""
    pairs = [(was.get(name), now.get(name)) for was, now in zip(before, after, strict=True)]
    if all(pair == pairs[0] for pair in pairs):
        return _diff_value(name, *pairs[0])
    return [each for number, pair in enumerate(pairs) for each in _diff_value(f"{name} of group {number}", *pair)]


def _diff_shared(was: Settings, now: Settings) -> list[HyperparamChange]:
    return [change for name in now if name in was for change in _diff_value(name, was[name], now[name])]


def _diff_value(name: str, was: object, now: object) -> list[HyperparamChange]:
    return [] if was == now else [HyperparamChange(name, was, now)]


def _shown(value: object) -> str:
    return "none" if value is None else str(value)
