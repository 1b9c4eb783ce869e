"""Registry of TorchTitan's configurations with holdfast's trainer: `--module holdfast.train.integrations.titan`.

`--config llama3.llama3_8b` is TorchTitan's `--module llama3 --config llama3_8b`. A registry of your own calls
`with_holdfast` on its configurations.
"""

from __future__ import annotations

from collections.abc import Callable

from torchtitan.trainer import Trainer

from holdfast.errors import ExitCode, HoldfastError, failure
from holdfast.train.integrations import titan_cpu, titan_private
from holdfast.train.integrations.titan_trainer import HoldfastTrainer
from holdfast.train.session.rank_config import RankConfig

if titan_cpu.ON_CPU:
    titan_cpu.install()


def with_holdfast(config: Trainer.Config) -> HoldfastTrainer.Config:
    """The same configuration of TorchTitan's Trainer, or of its fault-tolerant one, for a trainer with a Session."""
    made = titan_private.converted(config, HoldfastTrainer.Config)
    if made is None:
        raise _trainer_unsupported(type(config).__qualname__)
    if titan_cpu.ON_CPU or RankConfig.from_env().replica_count > 1:
        # A graph would replay the backward pass without the exchange of gradients between replicas.
        made.training.disable_cuda_graphs = True
    return made


def __getattr__(name: str) -> Callable[[], HoldfastTrainer.Config]:
    """A configuration of TorchTitan's own, by `MODULE.CONFIG`."""
    module, _, config = name.rpartition(".")
    found = titan_private.find_config(module, config) if module else None
    if found is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return lambda: with_holdfast(found())


def _trainer_unsupported(name: str) -> HoldfastError:
    return failure(
        "torchtitan-trainer-unsupported",
        "this configuration is for a model that has another trainer",
        exit_code=ExitCode.USAGE,
        where=name,
        remedy="Use TorchTitan's own `--module`: holdfast still launches, monitors and restarts the job.",
    )
