"""Optimizer and schedule settings in the arguments of transformers' Trainer, and their effect after a resume.

The Trainer creates both and loads their old settings immediately, so only its arguments have the program's current
settings. The Trainer's own schedules already follow the new arguments from the current step. Optimizers passed to the
Trainer are not covered: its arguments do not describe them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from transformers.training_args import TrainingArguments

from holdfast.train.checkpoint.hyperparams import Hyperparams, diff, to_json
from holdfast.train.torch_private import set_last_lr

OPTIONS: Mapping[str, Callable[[TrainingArguments], Any]] = {
    "lr": lambda args: args.learning_rate,
    "weight_decay": lambda args: args.weight_decay,
    "betas": lambda args: (args.adam_beta1, args.adam_beta2),
    "eps": lambda args: args.adam_epsilon,
}
"""Settings of the optimizer's groups, by their names there."""
SCHEDULE = ("warmup_steps", "lr_scheduler_kwargs")
LENGTH = ("max_steps", "num_train_epochs")
"""Arguments that define the end of a schedule, if it has one."""
ENDLESS = ("constant", "constant_with_warmup", "inverse_sqrt", "reduce_lr_on_plateau")
"""Schedules of transformers (5.23) that do not end."""


def hyperparams_from(args: TrainingArguments, model: nn.Module) -> Hyperparams:
    """The arguments as hyper-parameters, in the same form as any other program's."""
    scheduler = str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type))
    names = SCHEDULE if scheduler in ENDLESS else LENGTH + SCHEDULE
    dtypes = {str(each.dtype).removeprefix("torch.") for each in model.parameters()}
    return Hyperparams(
        optimizer=str(getattr(args.optim, "value", args.optim)),
        groups=[{name: to_json(of(args)) for name, of in OPTIONS.items()}],
        scheduler=scheduler,
        schedule={name: to_json(getattr(args, name)) for name in names},
        precision=", ".join([*sorted(dtypes), *(kind for kind in ("bf16", "fp16") if getattr(args, kind))]),
        batch=args.per_device_train_batch_size * args.gradient_accumulation_steps,
    )


def apply_changes(optimizer: Optimizer, scheduler: LRScheduler | None, was: Hyperparams, now: Hyperparams) -> None:
    """Apply the current arguments after the Trainer has loaded the old settings."""
    (old,), (new,) = was.groups, now.groups
    changed = {change.name for change in diff(was, now)}
    for number, group in enumerate(optimizer.param_groups):
        for name in changed & new.keys() & group.keys() - {"lr"}:
            # The groups after the first are those without weight decay, unless they have had it.
            if name != "weight_decay" or number == 0 or group[name] == old[name] != 0:
                group[name] = tuple(new[name]) if isinstance(new[name], list) else new[name]
        if "lr" in changed:
            group["lr"] *= new["lr"] / old["lr"] if old["lr"] else 1.0
            group["initial_lr"] = new["lr"]
    if isinstance(scheduler, LRScheduler):
        if "lr" in changed:
            scheduler.base_lrs = [new["lr"]] * len(scheduler.base_lrs)
        if isinstance(scheduler, LambdaLR):
            _recompute_rates(optimizer, scheduler)


def _recompute_rates(optimizer: Optimizer, scheduler: LambdaLR) -> None:
    """Compute the rates of the next step from the schedule at its current position."""
    rates = [
        base * rate(scheduler.last_epoch) for base, rate in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
    ]
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    set_last_lr(scheduler, rates)
