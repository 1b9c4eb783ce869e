"""Memory layout of Python's and numpy's generators: Mersenne Twisters (MT19937) of 624 words each.

Their own state functions build 624 Python numbers one by one. This module copies the words as raw memory and builds the
numbers later, on demand. The layout is undocumented, so it is used only after a check that the memory matches the state
that the generator reports. When states are captured: rng.py.
"""

from __future__ import annotations

import _random
import ctypes
import platform
import random
import struct
from collections.abc import Callable
from types import ModuleType
from typing import Any, cast

Capture = Callable[[], Callable[[], Any]]
"""Captures a generator's state; the returned function converts it to the generator's own form at any later time."""
_PYTHONS, _NUMPYS = struct.Struct("=i624I"), struct.Struct("=624Ii")
"""The words, and how many of them are used up."""
_PAIR = struct.Struct("=i4xd")
"""Numpy's flag for a cached second normal number (they are generated in pairs), and that number."""


def python_capture() -> Capture | None:
    """Capture function for the `random` module; None if its memory layout is not as expected."""
    generator: Any = getattr(random, "_inst", None)
    begin, end = object.__basicsize__, _random.Random.__basicsize__
    another = type(generator) is not random.Random  # with another memory layout
    if another or not _is_cpython() or end - begin < _PYTHONS.size:
        return None
    memory, inst = _memory(id(generator) + begin, _PYTHONS), cast("Any", generator)

    def note() -> Callable[[], Any]:
        words, left = memory.raw, inst.gauss_next
        return lambda: _python_state(words, left)

    return note if note()() == random.getstate() else None


def _python_state(memory: bytes, left: float | None) -> tuple[Any, ...]:
    used, *words = _PYTHONS.unpack(memory)
    return random.Random.VERSION, (*words, used), left


def numpy_capture(module: ModuleType) -> Capture | None:
    """Capture function for `numpy.random`, which is `module`."""
    state_source: Any = module.mtrand._rand
    generator: Any = state_source._bit_generator
    if not _is_cpython() or type(generator) is not module.MT19937 or (pair_at := _pair_at(module)) is None:
        return None
    memory = _memory(generator.ctypes.state_address, _NUMPYS)
    pair = _memory(id(state_source) + pair_at, _PAIR)

    def note() -> Callable[[], Any]:
        if state_source._bit_generator is not generator:  # numpy.random.set_bit_generator
            asked = state_source.get_state(legacy=False)
            return lambda: asked
        with generator.lock:
            words, left = memory.raw, pair.raw
        return lambda: _numpy_state(words, left)

    return note if _same_state(note()(), state_source.get_state(legacy=False)) else None


def _numpy_state(memory: bytes, pair: bytes) -> dict[str, Any]:
    import numpy

    *_, used = _NUMPYS.unpack(memory)
    words = numpy.frombuffer(memory, numpy.uint32, 624).copy()
    has, left = _PAIR.unpack(pair)
    state = {"key": words, "pos": used}
    return {"bit_generator": "MT19937", "state": state, "has_gauss": has, "gauss": left}


def _pair_at(module: ModuleType) -> int | None:
    """Offset of the cached pair in a numpy RandomState, found in an instance with a known pair."""
    probe = module.RandomState(0)
    probe.standard_normal()
    known = _PAIR.pack(1, probe.get_state(legacy=False)["gauss"])
    lies = ctypes.string_at(id(probe), module.RandomState.__basicsize__)
    number, at = known[8:], lies.find(known[8:]) - 8
    once = lies.count(number) == 1 and at >= 0
    return at if once and lies[at : at + 4] == known[:4] else None


def _same_state(memory: dict[str, Any], expected: dict[str, Any]) -> bool:
    words, pos = memory["state"]["key"], memory["state"]["pos"]
    same = expected["state"]["key"].tobytes() == words.tobytes() and expected["state"]["pos"] == pos
    return same and all(expected[name] == memory[name] for name in ("bit_generator", "has_gauss", "gauss"))


def _memory(address: int, form: struct.Struct) -> Any:
    return (ctypes.c_char * form.size).from_address(address)


def _is_cpython() -> bool:
    return platform.python_implementation() == "CPython"
