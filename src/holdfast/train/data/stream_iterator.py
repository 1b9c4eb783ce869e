"""Owns one pass over a stream, of whatever kind it is: how it is begun anew for an epoch, and begun in the middle.

A stream is anything that can be iterated over. `set_epoch`, `state_dict` and `load_state_dict` are used where it has
them, as datasets' and torchdata's streams do, on the stream itself or on its iterators. That what a stream is read from
is cut off is told apart from what goes wrong with what was read.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Iterator
from typing import Any

from holdfast.errors import ExitCode, HoldfastError, failure
from holdfast.findings import Owner

NETWORK_PACKAGES = frozenset({"aiohttp", "httpx", "httpcore", "huggingface_hub", "botocore"})
"""Packages whose errors are about the network, though not all are OSErrors."""


class StreamIterator:
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
        try:
            return next(self._items)
        except Exception as error:
            if _is_read_error(error):
                raise _unreadable(type(self._stream).__name__, error) from error
            raise

    def state(self) -> Any:
        """Where it stands, for another Cursor to go on from; None of a stream that cannot tell."""
        return self.state_of(self._stream) or self.state_of(self._items)

    @staticmethod
    def state_of(stream: Any) -> Any:
        """Where it says it stands; None of one that cannot tell."""
        return copy.deepcopy(stream.state_dict()) if hasattr(stream, "state_dict") else None


def _is_read_error(error: Exception) -> bool:
    """Whether it is of what a stream is read from; else it is a program's, which needs its traceback."""
    return (
        isinstance(error, OSError | EOFError | zlib.error) or type(error).__module__.split(".")[0] in NETWORK_PACKAGES
    )


def _unreadable(where: str, error: BaseException) -> HoldfastError:
    return failure(
        "data-unreadable",
        "a stream cannot be read on",
        exit_code=ExitCode.STORAGE_FAILED,
        where=where,
        evidence=tuple(f"{type(each).__name__}: {each}" for each in _causes(error)),
        remedy="look whether what it is read from can be reached from this node, and is whole; the next start goes "
        "on from the newest checkpoint, with no sample left out or taken twice",
        owner=Owner.CLUSTER,
    )


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error and what led to it, the last first."""
    while error is not None:
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
