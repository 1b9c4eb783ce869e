"""Owns how the generators of Python and numpy lie in memory: Mersenne Twisters of 624 words each.

Asked where it stands, each makes 624 numbers of its words, one by one. Here the words are copied as they lie, and the
numbers made later, by whoever wants them. That goes past what is documented, so it is only done where it is seen first
that the memory says what the generator says. Refuses to own when they are noted (rng.py).
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
"""Notes where a generator stands; what it returns gives that in the generator's own form, whenever it is called."""
_PYTHONS, _NUMPYS = struct.Struct("=i624I"), struct.Struct("=624Ii")
"""The words, and how many of them are used up."""
_PAIR = struct.Struct("=i4xd")
"""Of numpy's: whether one is left of two normal numbers, which are made together, and that one."""


def python_capture() -> Capture | None:
    """What notes where the functions of `random` stand; None where memory cannot be trusted to say it."""
    generator: Any = getattr(random, "_inst", None)
    begin, end = object.__basicsize__, _random.Random.__basicsize__
    another = type(generator) is not random.Random  # whose memory would be laid out otherwise
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
    """The same of the functions of `numpy.random`, which is the module."""
    said: Any = module.mtrand._rand
    generator: Any = said._bit_generator
    if not _is_cpython() or type(generator) is not module.MT19937 or (pair_at := _pair_at(module)) is None:
        return None
    memory = _memory(generator.ctypes.state_address, _NUMPYS)
    pair = _memory(id(said) + pair_at, _PAIR)

    def note() -> Callable[[], Any]:
        if said._bit_generator is not generator:  # numpy.random.set_bit_generator
            asked = said.get_state(legacy=False)
            return lambda: asked
        with generator.lock:
            words, left = memory.raw, pair.raw
        return lambda: _numpy_state(words, left)

    return note if _same_state(note()(), said.get_state(legacy=False)) else None


def _numpy_state(memory: bytes, pair: bytes) -> dict[str, Any]:
    import numpy

    *_, used = _NUMPYS.unpack(memory)
    words = numpy.frombuffer(memory, numpy.uint32, 624).copy()
    has, left = _PAIR.unpack(pair)
    state = {"key": words, "pos": used}
    return {"bit_generator": "MT19937", "state": state, "has_gauss": has, "gauss": left}


def _pair_at(module: ModuleType) -> int | None:
    """How far into a RandomState of numpy's the pair lies: found in one of which it is known."""
    probe = module.RandomState(0)
    probe.standard_normal()
    known = _PAIR.pack(1, probe.get_state(legacy=False)["gauss"])
    lies = ctypes.string_at(id(probe), module.RandomState.__basicsize__)
    number, at = known[8:], lies.find(known[8:]) - 8
    once = lies.count(number) == 1 and at >= 0
    return at if once and lies[at : at + 4] == known[:4] else None


def _same_state(memory: dict[str, Any], said: dict[str, Any]) -> bool:
    words, pos = memory["state"]["key"], memory["state"]["pos"]
    same = said["state"]["key"].tobytes() == words.tobytes() and said["state"]["pos"] == pos
    return same and all(said[name] == memory[name] for name in ("bit_generator", "has_gauss", "gauss"))


def _memory(address: int, form: struct.Struct) -> Any:
    return (ctypes.c_char * form.size).from_address(address)


def _is_cpython() -> bool:
    return platform.python_implementation() == "CPython"
