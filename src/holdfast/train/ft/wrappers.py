"""Finds DDP modules inside a wrapped model, and refuses wrappers whose gradients replicas cannot average.

`torch.compile` and other wrappers keep the wrapped module as a submodule, so a search by type through all submodules
finds DDP at any depth. Without other replicas only the wrappers around the model count: a DDP inside the model may be
skipped in the last micro-batch, and must reduce its gradients in an earlier one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from holdfast.errors import ExitCode, HoldfastError, failure
from holdfast.train.torch_private import COMPILED_MODULE, static_graph_recorded

_SHARD = "shard it with `fully_shard` (FSDP2)"
UNSUPPORTED = {
    # Flattens the parameters, and reduces gradients into shards that no parameter of the model holds during backward.
    "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel": _SHARD,
    # Keeps gradients in its own buffers, and steps its own optimizer.
    "deepspeed.runtime.engine.DeepSpeedEngine": _SHARD,
    # Reduces gradients in buckets that `parameter.main_grad` points into.
    "megatron.core.distributed.distributed_data_parallel.DistributedDataParallel": "wrap it in torch's DDP",
    # Averages gradients over the replicas itself, which the session does as well.
    "torchft.ddp.DistributedDataParallel": "wrap it in torch's DDP, within one replica",
    "torchft.ddp.PureDistributedDataParallel": "leave that wrapper out",
}
"""Wrapper classes (and subclasses), each with its alternative."""


class GradientSync:
    """Switches gradient reduction among the ranks of this replica on or off, for DDP modules only."""

    def __init__(self, model: nn.Module, *, nested: bool = True) -> None:
        """`nested` includes DDP modules inside the model, not only those wrapped around it."""
        modules = model.modules() if nested else _wrappers(model)
        self._modules = [each for each in modules if isinstance(each, DistributedDataParallel)]

    @property
    def has_static_graph(self) -> bool:
        """Whether a DDP module always has to reduce in its first backward pass, in which it records its graph."""
        return any(each.static_graph for each in self._modules)

    def set(self, *, enabled: bool) -> None:
        """Applies from the next forward pass on."""
        for module in self._modules:
            records = module.static_graph and not static_graph_recorded(module)
            module.require_backward_grad_sync = enabled or records


def _wrappers(model: nn.Module) -> Iterator[nn.Module]:
    """The model and each module nested in it by the attribute names of torch's own wrappers."""
    wrapped: nn.Module | None = model
    while wrapped is not None:
        yield wrapped
        children = dict(wrapped.named_children())
        wrapped = children.get(COMPILED_MODULE, children.get("module")) if len(children) == 1 else None


def shares_all_weights(model: nn.Module, ranks: int) -> bool:
    """Whether DDP keeps all weights of the model equal on that many ranks."""
    weights = {*model.parameters()}
    # The cast: torch leaves the group optional and the names untyped.
    wrappers = [cast("Any", each) for each in model.modules() if isinstance(each, DistributedDataParallel)]
    return any(
        each.process_group.size() == ranks and not each.parameters_to_ignore and {*each.parameters()} == weights
        for each in wrappers
    )


def refuse_unsupported(model: nn.Module) -> None:
    """Raise HoldfastError if replicas of this model would silently diverge."""
    # The cast: torch does not declare the type that it yields.
    for name, module in cast("Iterator[tuple[str, nn.Module]]", model.named_modules()):
        for kind in type(module).__mro__:
            if (instead := UNSUPPORTED.get(f"{kind.__module__}.{kind.__qualname__}")) is not None:
                raise _unsupported(type(module), name, instead)


def _unsupported(kind: type[nn.Module], name: str, instead: str) -> HoldfastError:
    return failure(
        "replicas-wrapper-unsupported",
        f"recovery.replicas cannot average the gradients of a model wrapped in {kind.__module__}.{kind.__qualname__}",
        exit_code=ExitCode.USAGE,
        where=f"Session(model=...), submodule {name}" if name else "Session(model=...)",
        evidence=("training was not started: the replicas would end with different weights",),
        remedy=f"{instead}, or train without recovery.replicas",
    )
