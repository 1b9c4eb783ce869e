"""Captures state between two steps so that it can be pickled later, unaffected by what the loop does next.

What is captured: train_state.py. When the bytes are written: manager.py.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, cast

import torch

from holdfast.train.checkpoint.safe_state import to_bytes, unsafe_state, unsafe_types

MAX_COPIED_VALUES = 1000
"""Values copied one by one; more values are pickled faster than copied."""
IMMUTABLE_TYPES = frozenset({type(None), bool, int, float, complex, str, bytes})


def defer_pickle(fresh: Callable[[], Mapping[str, Any]], shared: Mapping[str, Any]) -> Callable[[], bytes]:
    """Return a function that pickles both mappings with their current values.

    `fresh` returns the same on every call; other code may mutate the values of `shared`.

    Values whose copy is certainly equal are copied. Values with custom pickling are pickled immediately, and raise
    HoldfastError if a checkpoint does not load them (safe_state.py); the other values are always allowed.
    """
    if not shared:
        return lambda: to_bytes({**fresh()})
    try:
        plain = _PlainPickler.pickled(shared)
        return lambda: to_bytes({**fresh(), **pickle.loads(plain)})
    except _NotPlainError:
        pass
    if _copies_exactly(shared):
        copied = copy.deepcopy(dict(shared))
        return lambda: to_bytes({**fresh(), **copied})
    written = to_bytes({**fresh(), **shared})
    if found := unsafe_types(written):
        raise unsafe_state("Session(state=..., scheduler=...)", found)
    return lambda: written


class _NotPlainError(Exception):
    """The value does not consist of built-in Python values alone."""


class _PlainPickler(pickle.Pickler):
    """Copies state of built-in Python values in C; most state is of that kind."""

    @classmethod
    def pickled(cls, tree: object) -> bytes:
        file = io.BytesIO()
        # The protocol of torch.save: later ones have opcodes for values that `load` refuses, such as frozensets.
        cls(file, torch.serialization.DEFAULT_PROTOCOL).dump(tree)
        return file.getvalue()

    def reducer_override(self, _value: object) -> NoReturn:
        raise _NotPlainError


def _copies_exactly(tree: object) -> bool:
    """Whether it consists only of built-in values and plain host tensors, and of few enough of them."""
    left, seen = [tree], 0
    while left:
        value = left.pop()
        seen += 1
        if seen > MAX_COPIED_VALUES:
            return False
        kind = type(value)
        if kind is dict or kind is OrderedDict:
            each = cast("dict[object, object]", value)
            left += (*each.keys(), *each.values(), getattr(each, "__dict__", None))
        elif kind is list or kind is tuple:
            left += cast("list[object]", value)
        elif kind not in IMMUTABLE_TYPES and not _is_plain(value):
            return False
    return True


def _is_plain(value: object) -> bool:
    """Whether a tensor is defined by its bytes alone; a GPU tensor's copy would take the same GPU memory again."""
    return (
        type(value) is torch.Tensor
        and value.device.type == "cpu"
        and value.layout is torch.strided
        and not value.requires_grad
        and not vars(value)
    )
