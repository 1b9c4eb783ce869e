"""One pass over any kind of stream: starts an epoch, or resumes in the middle of one.

A stream is any iterable. `set_epoch`, `state_dict` and `load_state_dict` are used where the stream or its iterators
have them, as in datasets and torchdata. Errors of the stream's source are distinguished from errors of the program that
processes it.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Iterator
from typing import Any

from holdfast.errors import ExitCode, HoldfastError, failure
from holdfast.findings import Owner

NETWORK_PACKAGES = frozenset({"aiohttp", "httpx", "httpcore", "huggingface_hub", "botocore"})
"""Packages whose errors concern the network, though not all are OSErrors."""


class StreamIterator:
    """Position of a pass over a stream."""

    def __init__(self, stream: Any, *, epoch: int, state: Any = None) -> None:
        """Begin epoch `epoch` (from 0), or resume in it from `state`."""
        self._stream = stream
        state = copy.deepcopy(state)  # what loads it may keep and change it, and it may be loaded again
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
        """Position from which another StreamIterator can resume; None if the stream has no state."""
        return self.state_of(self._stream) or self.state_of(self._items)

    @staticmethod
    def state_of(stream: Any) -> Any:
        """The stream's own state; None if it has none."""
        return copy.deepcopy(stream.state_dict()) if hasattr(stream, "state_dict") else None


def _is_read_error(error: Exception) -> bool:
    """Whether the error comes from the stream's source; otherwise it is the program's and needs its traceback."""
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
    """An error and its causes, latest first."""
    while error is not None:
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
