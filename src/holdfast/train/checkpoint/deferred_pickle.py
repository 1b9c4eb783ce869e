"""Owns that what is noted between two steps can be put into bytes later, as it was then, whatever the loop does next.

Refuses to own what is noted (train_state.py), and who writes the bytes, and when (manager.py).
"""

from __future__ import annotations

import copy
import io
import pickle
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, cast

import torch

MAX_COPIED_VALUES = 1000
"""That are copied one by one; more of them are in bytes sooner than copied."""
IMMUTABLE_TYPES = frozenset({type(None), bool, int, float, complex, str, bytes})


def defer_pickle(fresh: Callable[[], Mapping[str, Any]], shared: Mapping[str, Any]) -> Callable[[], bytes]:
    """What gives the bytes of both as they are now.

    What `fresh` gives is the same whenever it is called; of `shared` somebody else may change what it holds.

    What a copy is sure to be equal to is copied. Whatever has ways of its own to be pickled is pickled at once.
    """
    if not shared:
        return lambda: _to_bytes({**fresh()})
    try:
        plain = _PlainPickler.pickled(shared)
        return lambda: _to_bytes({**fresh(), **pickle.loads(plain)})
    except _NotPlainError:
        pass
    if _copies_exactly(shared):
        copied = copy.deepcopy(dict(shared))
        return lambda: _to_bytes({**fresh(), **copied})
    written = _to_bytes({**fresh(), **shared})
    return lambda: written


class _NotPlainError(Exception):
    """It is not made of Python's own values alone."""


class _PlainPickler(pickle.Pickler):
    """Copies what is made of Python's own values alone: in C, and most states are."""

    @classmethod
    def pickled(cls, tree: object) -> bytes:
        file = io.BytesIO()
        cls(file, pickle.HIGHEST_PROTOCOL).dump(tree)
        return file.getvalue()

    def reducer_override(self, _value: object) -> NoReturn:
        raise _NotPlainError


def _to_bytes(noted: dict[str, Any]) -> bytes:
    file = io.BytesIO()
    torch.save(noted, file)
    return file.getvalue()


def _copies_exactly(tree: object) -> bool:
    """Whether it is made of nothing but Python's own values and plain tensors on the host, and of not too many."""
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
    """Whether it is a tensor that is nothing but its bytes; one on a GPU would take as much again there."""
    return (
        type(value) is torch.Tensor
        and value.device.type == "cpu"
        and value.layout is torch.strided
        and not value.requires_grad
        and not vars(value)
    )
