"""Owns one pass over a stream, of whatever kind it is: how it is begun anew for an epoch, and begun in the middle.

A stream is anything that can be iterated over. `set_epoch`, `state_dict` and `load_state_dict` are used where it has
them, as datasets' and torchdata's streams do, on the stream itself or on its iterators.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any


class Cursor:
    """Where a pass over a stream stands."""

    def __init__(self, stream: Any, *, epoch: int, state: Any = None) -> None:
        """Begin epoch `epoch` (from 0), or go on in it where `state` was taken."""
        self._stream = stream
        if hasattr(stream, "set_epoch"):
            stream.set_epoch(epoch)
        if state is not None and hasattr(stream, "load_state_dict"):
            stream.load_state_dict(state)
        self._items: Iterator[Any] = iter(stream)
        if state is not None and not hasattr(stream, "load_state_dict"):
            self._items.load_state_dict(state)  # pyright: ignore[reportAttributeAccessIssue] - it gave the state

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return next(self._items)

    def state(self) -> Any:
        """Where it stands, for another Cursor to go on from; None of a stream that cannot tell."""
        return self.state_of(self._stream) or self.state_of(self._items)

    @staticmethod
    def state_of(stream: Any) -> Any:
        """Where it says it stands; None of one that cannot tell."""
        return copy.deepcopy(stream.state_dict()) if hasattr(stream, "state_dict") else None
