"""Restricts what the pickled parts of a checkpoint may contain, so that loading one runs no code from the file.

Allowed are plain values, tensors, numpy arrays, and types that the program registers with
`torch.serialization.add_safe_globals`. What cannot be loaded again is refused when it would be saved.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum, EnumType
from functools import cache
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from holdfast.errors import ExitCode, HoldfastError, failure

Global = tuple[str, str]
"""Module and name of what a pickle imports."""


def load(file: IO[bytes] | Path) -> Any:
    """Load what `torch.save` has written; raises pickle.UnpicklingError for a type that is not allowed."""
    registered: list[Any] = cast("Any", torch.serialization).get_safe_globals()
    # torch removes at the end what it was given here, so a type that the program has registered must not be among it.
    with safe_globals([each for each in numpy_globals() if each not in registered]):
        return torch.load(file, map_location=cast("Any", _to_current_device), weights_only=True)


def unsafe_types(written: bytes) -> list[str]:
    """Names of the types, in what `torch.save` has written, that `load` would refuse."""
    ours = {f"{each.__module__}.{each.__qualname__}" for each in numpy_globals()}
    return sorted({*get_unsafe_globals_in_checkpoint(io.BytesIO(written))} - ours)


def refuse_unsafe(where: str, value: object) -> None:
    """Raise HoldfastError if a value could not be loaded from a checkpoint; its tensors are not copied."""
    if found := unsafe_types(to_bytes(_without_data(value))):
        raise unsafe_state(where, found)


def unsafe_state(where: str, types: Iterable[str]) -> HoldfastError:
    """Error for a state that a checkpoint cannot hold."""
    return failure(
        "checkpoint-state-unsafe",
        "a state_dict holds a type that a checkpoint does not load, because loading it could run code",
        exit_code=ExitCode.USAGE,
        where=where,
        evidence=tuple(types),
        remedy="return plain values, tensors or numpy arrays from state_dict; for a type of your own call "
        "torch.serialization.add_safe_globals([TYPE]) before making the Session",
    )


def to_bytes(value: object) -> bytes:
    """A value as `torch.save` writes it."""
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


class RestrictedUnpickler(pickle.Unpickler):
    """Unpickles only plain values, the given types, and members of those that are enumerations."""

    def __init__(self, file: IO[bytes], allowed: Mapping[Global, object]) -> None:
        super().__init__(file)
        self._allowed: dict[Global, object] = {**allowed, ("builtins", "getattr"): _member}

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if (found := self._allowed.get((module_name, global_name))) is None:
            raise pickle.UnpicklingError(f"{module_name}.{global_name} is not allowed here")
        return found


def _member(kind: object, name: str) -> Enum:
    """A member of an enumeration: some versions of Python, such as 3.11.2, pickle members as calls of `getattr`."""
    if not isinstance(kind, EnumType):
        raise pickle.UnpicklingError(f"an attribute of {kind!r} is not allowed here")
    return cast("type[Enum]", kind)[name]


def globals_of(types: Iterable[Any]) -> dict[Global, object]:
    """These types and functions, and torch's dtypes, for `RestrictedUnpickler`."""
    dtypes = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    named: dict[Global, object] = {("torch", str(each).removeprefix("torch.")): each for each in dtypes}
    return named | {(each.__module__, each.__qualname__): each for each in types}


@cache
def numpy_globals() -> tuple[Any, ...]:
    """What numpy's arrays and numbers are pickled with; objects inside an array of objects must be allowed as well."""
    import numpy

    array, number = numpy.zeros(1), numpy.float64(0)
    dtypes = {type(numpy.dtype(code)) for code in numpy.typecodes["All"]}
    # Both functions are private in numpy, under names that its version 2 has changed.
    return (array.__reduce__()[0], cast("Any", number).__reduce__()[0], numpy.ndarray, numpy.dtype, *dtypes)


def _to_current_device(storage: Any, location: str) -> Any:
    """A GPU's tensors go to this rank's current GPU: the same rank may have another number of it now."""
    on_gpu = location.startswith("cuda") and torch.cuda.is_available()
    return storage.cuda(torch.cuda.current_device()) if on_gpu else storage


def _without_data(value: object) -> object:
    """A value whose plain tensors are empty ones of the same type."""
    if type(value) is dict or type(value) is OrderedDict:
        return {name: _without_data(each) for name, each in cast("dict[object, object]", value).items()}
    if type(value) is list or type(value) is tuple:
        return [_without_data(each) for each in cast("Sequence[object]", value)]
    if isinstance(value, torch.Tensor) and type(value) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
        return torch.empty(0, dtype=value.dtype)
    return value
