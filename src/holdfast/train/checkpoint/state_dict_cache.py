"""Caches the layout of torch's state dict and checks that it is still valid, which avoids a new `get_state_dict`.

Torch takes some 10 µs per tensor to compute its name. Names depend only on what modules and optimizer hold under which
attributes, on aliases, on sharding, and on the modules' classes: together, the signature. While the signature is
unchanged, each slot of the tree belongs to the tensor now found where the original was. State with hooks, custom state
methods or unusual tensor types is not cached. Copying into the tree: staging.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.distributed.tensor import DTensor
from torch.jit import ScriptModule
from torch.nn import Module
from torch.optim import Optimizer

from holdfast.train import torch_private
from holdfast.train.checkpoint.deferred_pickle import IMMUTABLE_TYPES
from holdfast.train.checkpoint.pytree import PLAIN_TYPES, is_plain, iter_tensors
from holdfast.train.checkpoint.train_state import TrainState

_KINDS = frozenset(PLAIN_TYPES)
_END, _NUMBER = object(), object()
"""Markers in a signature: end of a part; the value just named is not a tensor."""


class _Uncacheable(Exception):
    """The state dict must come from torch."""


@dataclass(kw_only=True)
class _StateWalk:
    """Current contents of modules and optimizer."""

    signature: list[object]
    held: list[torch.Tensor]
    """In the order of the walk; a tensor held in two places occurs twice."""
    first_owned: int
    """Index of the first tensor of the optimizer and of the user's own modules."""
    numbers: list[object]
    """The optimizer's non-tensor state of its parameters, in order."""
    groups: list[dict[str, object]]
    """Copies of its groups, without parameters."""


@dataclass(kw_only=True)
class CachedStateDict:
    """A state tree, and where to find the source of each of its values."""

    train_state: TrainState
    tree: dict[str, Any]
    signature: list[object]
    source_indices: list[int]
    """For each of the tree's tensors: the index of its source in the walk."""
    owned: list[bool]
    """For each of them: whether its source changes only in or after the optimizer's step."""
    slots: list[tuple[dict[str, object], str]]
    """Slots of the numbers in the tree."""

    def current_sources(self) -> list[torch.Tensor] | None:
        """Current sources of the tree's tensors, after updating its other values; None: call torch again."""
        try:
            walk = _walk_state(self.train_state)
        except _Uncacheable:
            return None
        if walk.signature != self.signature:
            return None
        for group, now in zip(self.tree["optimizer"]["param_groups"], walk.groups, strict=True):
            called = group["params"]
            group.clear()
            group.update(now, params=called)
        for (values, name), number in zip(self.slots, walk.numbers, strict=True):
            values[name] = number
        return [walk.held[place] for place in self.source_indices]


def cache_state_dict(train_state: TrainState, given: dict[str, Any], tree: dict[str, Any]) -> CachedStateDict | None:
    """Cache this tree, built from what torch has just returned; None if it cannot be cached."""
    try:
        walk = _walk_state(train_state)
        places = _source_indices(given, walk)
    except _Uncacheable:
        return None
    states: dict[str, dict[str, object]] = given["optimizer"]["state"]
    copies: dict[str, dict[str, object]] = tree["optimizer"]["state"]
    if [*map(id, states.values())] != [*map(id, train_state.optimizer.state.values())]:
        return None
    owned = {id(each) for each in walk.held[walk.first_owned :]}
    return CachedStateDict(
        train_state=train_state,
        tree=tree,
        signature=walk.signature,
        source_indices=places,
        owned=[id(walk.held[place]) in owned for place in places],
        slots=[
            (copies[called], name)
            for called, state in states.items()
            for name, value in state.items()
            if not isinstance(value, torch.Tensor)
        ],
    )


def _source_indices(given: dict[str, Any], walk: _StateWalk) -> list[int]:
    """Index in the walk of each tensor's source: the tensor with the same memory and layout."""
    found: dict[object, int] = {}
    for place, each in enumerate(walk.held):
        known = walk.held[found.setdefault(_storage_key(each), place)]
        if known is not each and torch_private.local_part(each).nbytes:
            raise _Uncacheable
    try:
        return [found[_storage_key(each)] for each in iter_tensors(given)]
    except KeyError:
        raise _Uncacheable from None


def _storage_key(tensor: torch.Tensor) -> object:
    here = torch_private.local_part(tensor)
    return here.data_ptr(), here.shape, here.stride(), here.dtype, here.device


def _walk_state(train_state: TrainState) -> _StateWalk:
    signature: list[object] = []
    held: list[torch.Tensor] = []
    _walk_modules(train_state.model, signature, held)
    first_owned = len(held)
    for name, module in train_state.modules.items():
        signature.append(name)
        _walk_modules(module, signature, held)
    numbers, groups = _walk_optimizer(train_state.optimizer, signature, held)
    kinds = {*map(type, held)}
    if not _KINDS.issuperset(kinds):
        raise _Uncacheable
    if DTensor in kinds:
        if not all(map(is_plain, held)):  # a shard of another type
            raise _Uncacheable
        signature += [torch_private.sharding(each) if type(each) is DTensor else None for each in held]
    # Aliases: each tensor is numbered by its first occurrence.
    first: dict[int, int] = {}
    signature += [first.setdefault(id(each), len(first)) for each in held]
    return _StateWalk(
        signature=signature,
        held=held,
        first_owned=first_owned,
        numbers=numbers,
        groups=groups,
    )


def _walk_modules(model: Module, signature: list[object], held: list[torch.Tensor]) -> None:
    modules, classes = [model], set[type[Module]]()
    for module in modules:  # the loop appends to the list
        if type(module) not in classes:
            if not torch_private.has_default_state_methods(type(module)) or issubclass(type(module), ScriptModule):
                raise _Uncacheable
            classes.add(type(module))
        own = vars(module)
        parameters, buffers, unsaved, children, hooks, pre_hooks = torch_private.module_parts(own)
        if hooks or not torch_private.STATE_OVERRIDES.isdisjoint(own):
            raise _Uncacheable
        for hook in pre_hooks.values():
            if (getattr(hook, "__module__", ""), getattr(hook, "__qualname__", "")) != torch_private.FSDP_RESHARD_HOOK:
                raise _Uncacheable
        signature.append(type(module))
        for name, parameter in parameters.items():
            if parameter is not None:
                signature.append(name)
                held.append(parameter)
        for name, buffer in buffers.items():
            if buffer is not None and name not in unsaved:
                signature.append(name)
                held.append(buffer)
        signature.append(_END)
        for name, child in children.items():
            if child is not None:
                signature.append(name)
                modules.append(child)
        signature.append(_END)


def _walk_optimizer(
    optimizer: Optimizer, signature: list[object], held: list[torch.Tensor]
) -> tuple[list[object], list[dict[str, object]]]:
    own = vars(optimizer)
    state, groups = own.get("state"), own.get("param_groups")  # a wrapper of another optimizer has them as properties
    if (
        state is None
        or groups is None
        or "state_dict" in own
        or type(optimizer).state_dict is not Optimizer.state_dict
        or torch_private.has_state_dict_hooks(optimizer)
    ):
        raise _Uncacheable
    numbers: list[object] = []
    for parameter, values in cast("dict[torch.Tensor, dict[str, object]]", state).items():
        held.append(parameter)
        for name, value in values.items():
            signature.append(name)
            if isinstance(value, torch.Tensor):
                held.append(value)
            else:
                signature.append(_NUMBER)
                numbers.append(_frozen_copy(value))
        signature.append(_END)
    for group in cast("list[dict[str, Any]]", groups):
        held += group["params"]
        signature.append(len(group["params"]))
    return numbers, [
        {name: _frozen_copy(value) for name, value in group.items() if name != "params"}
        for group in cast("list[dict[str, object]]", groups)
    ]


def _frozen_copy(value: object) -> object:
    """An immutable equivalent; raises _Uncacheable for values that would need inspection."""
    kind = type(value)
    if kind in IMMUTABLE_TYPES:
        return value
    values = cast("list[object]", value)
    if (kind is tuple or kind is list) and IMMUTABLE_TYPES.issuperset(map(type, values)):
        return tuple(values) if kind is tuple else [*values]
    raise _Uncacheable
