"""The private names of TorchTitan that holdfast uses or replaces, each behind a name of our own.

tests/train/titan/test_titan_private.py checks each name, and says what an upgrade of TorchTitan breaks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import fields
from importlib import import_module
from types import ModuleType
from typing import Any, TypeVar, cast

from torch.nn import Module
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torchdata.stateful_dataloader import StatefulDataLoader
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.checkpointer.utils import canonical_fqn
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.experiments.torchft.checkpoint import TorchFTCheckpointManager
from torchtitan.experiments.torchft.optimizer import TorchFTOptimizersContainer
from torchtitan.experiments.torchft.trainer import FaultTolerantTrainer
from torchtitan.models.common import attention
from torchtitan.tools import utils
from torchtitan.trainer import Trainer

Config = TypeVar("Config", bound=Trainer.Config)

REGISTRIES = ("torchtitan.models", "torchtitan.experiments")
"""Packages with one registry of configurations for each model, in the order in which TorchTitan searches them."""

# Configurations


def find_config(module: str, name: str) -> Callable[[], Trainer.Config] | None:
    """A configuration of TorchTitan's own models, such as `llama3_8b` of `llama3`; None if there is none."""
    for package in REGISTRIES:
        try:
            registry = import_module(f"{package}.{module}.config_registry")
        except ModuleNotFoundError as error:
            if not f"{package}.{module}.config_registry".startswith(str(error.name)):
                raise
        else:
            return getattr(registry, name, None)
    return None


def converted(config: Trainer.Config, to: type[Config]) -> Config | None:
    """The same settings for a trainer whose configuration has all of them; None if a model has its own trainer.

    TorchTitan's fault-tolerant trainer has an optimizer and a checkpointer that need its manager: those of the plain
    trainer take their place.
    """
    if type(config) not in {Trainer.Config, FaultTolerantTrainer.Config}:
        return None
    settings = {each.name: getattr(config, each.name) for each in fields(config)}
    for name, plain in (("optimizer", OptimizersContainer.Config), ("checkpoint", CheckpointManager.Config)):
        if type(settings[name]) in {TorchFTOptimizersContainer.Config, TorchFTCheckpointManager.Config}:
            settings[name] = plain(**{each.name: getattr(settings[name], each.name) for each in fields(plain)})
    return to(**settings)


# Components of a built trainer


def only_model(trainer: Trainer) -> Module | None:
    """The model; None if pipeline parallelism has cut it into parts."""
    return trainer.model_parts[0] if len(trainer.model_parts) == 1 else None


plain_name: Callable[[str], str] = canonical_fqn
"""A parameter's name without the wrappers around its modules."""


def only_optimizer(trainer: Trainer) -> Optimizer | None:
    """The optimizer inside TorchTitan's container, which itself has no state; None if there are several."""
    inside: list[Optimizer] = [*cast("Any", trainer.optimizers)]
    return inside[0] if len(inside) == 1 else None


def only_scheduler(trainer: Trainer) -> LRScheduler:
    """The schedule of that optimizer."""
    (scheduler,) = [*cast("Any", trainer.lr_schedulers)]
    return scheduler


def optimizer_names(trainer: Trainer) -> list[str]:
    """The optimizers' classes."""
    return [type(each).__name__ for each in cast("Any", trainer.optimizers)]


def data_parallel_size(trainer: Trainer) -> int:
    """Ranks that read different samples: the shards of a batch."""
    dims: Any = trainer.parallel_dims
    return dims.get_mesh("batch").size() if dims.dp_enabled else 1


def loss_shards(trainer: Trainer) -> int:
    """Ranks over which TorchTitan sums the parts of a loss."""
    mesh: Any = trainer.parallel_dims.get_optional_mesh("loss")
    return mesh.size() if mesh is not None else 1


def whole_dataset(trainer: Trainer) -> Any:
    """The dataset of the configured loader, with all samples instead of this rank's."""
    config: Any = trainer.config
    loader = config.dataloader.build(
        dp_world_size=1,
        dp_rank=0,
        tokenizer=trainer.tokenizer,
        seq_len=config.training.seq_len,
        local_batch_size=config.training.local_batch_size,
    )
    return loader.dataset


def loader_state(loader: Any) -> dict[str, Any]:
    """A loader's position, in plain types: TorchTitan would pickle it, and unpickle whatever a checkpoint has there."""
    if isinstance(loader, ParallelAwareDataloader):
        return StatefulDataLoader[Any].state_dict(cast("StatefulDataLoader[Any]", loader))
    return loader.state_dict()


def load_loader_state(loader: Any, state: Mapping[str, Any]) -> None:
    """Continue a loader at such a position."""
    if isinstance(loader, ParallelAwareDataloader):
        StatefulDataLoader[Any].load_state_dict(cast("StatefulDataLoader[Any]", loader), dict(state))
    else:
        loader.load_state_dict(dict(state))


def flops_per_token(processor: MetricsProcessor) -> float:
    """What TorchTitan computes its MFU from."""
    return float(processor.num_flops_per_token)


# Devices and kernels that the host lacks


def has_accelerator() -> bool:
    """Whether TorchTitan finds a device to train on; without one it assumes CUDA."""
    return utils._get_available_device_type() is not None


def replace_device(name: str, module: ModuleType) -> None:
    """Have all of TorchTitan's modules use this device: each has copied the names when it was imported."""
    for each in [loaded for path, loaded in sys.modules.items() if path.partition(".")[0] == "torchtitan"]:
        if hasattr(each, "device_type"):
            cast("Any", each).device_type = name
        if hasattr(each, "device_module"):
            cast("Any", each).device_module = module


def replace_flex_attention(function: Callable[..., Any]) -> None:
    """Have TorchTitan call this in place of its compiled FlexAttention."""
    cast("Any", attention.FlexAttention)._compiled_flex_attn = staticmethod(function)


def replace_block_mask(function: Callable[..., Any]) -> None:
    """Have TorchTitan call this in place of its compiled `create_block_mask`."""
    cast("Any", attention)._compiled_create_block_mask = function
