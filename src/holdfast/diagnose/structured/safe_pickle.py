"""Reads a pickle as data: plain containers, text and numbers; it refuses whatever could run code.

A pickle is a program for a small machine that can import and call anything. This machine only builds dicts, lists,
tuples and scalars, so that a user can open a dump from someone else.
"""

from __future__ import annotations

import pickletools
import struct
from typing import Any

MAX_OPCODES = 4_000_000
"""Opcodes per pickle: a flight recorder dump of 2,000 collectives has about half a million."""

_NUMBERS = ("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT")
_TEXTS = ("STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8")
_PUSHES = frozenset({*_NUMBERS, *_TEXTS, "BINBYTES", "SHORT_BINBYTES", "BINBYTES8"})
_CONSTANTS: dict[str, Any] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_EMPTY = {"EMPTY_DICT": dict[Any, Any], "EMPTY_LIST": list[Any]}
_PUT, _GET = frozenset({"PUT", "BINPUT", "LONG_BINPUT"}), frozenset({"GET", "BINGET", "LONG_BINGET"})
_NOTHING = frozenset({"PROTO", "FRAME"})
_KEYS = (str, int, float, bytes)
"""Types of dict keys: tuples can be nested so deep that hashing one crashes the interpreter."""
_DAMAGE_ERRORS = (ValueError, KeyError, IndexError, TypeError, OverflowError, struct.error)


class UnsafePickle(Exception):
    """Not a pickle, a damaged one, or one that is more than data."""


class _Mark:
    """The start of a run of items on the stack."""


def read(data: bytes) -> Any:
    """The value of a pickle; raises `Refused`. Its objects may share parts, and nest without end."""
    try:
        return _run(data)
    except _DAMAGE_ERRORS as error:
        raise UnsafePickle(f"damaged: {error}") from error


def _run(data: bytes) -> Any:
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    for count, (opcode, argument, _) in enumerate(pickletools.genops(data)):
        if count > MAX_OPCODES:
            raise UnsafePickle("too long")
        name = opcode.name
        if name in _PUSHES:
            stack.append(argument)
        elif name in _PUT:
            memo[int(argument or 0)] = stack[-1]
        elif name in _GET:
            stack.append(memo[int(argument or 0)])
        elif name == "MEMOIZE":
            memo[len(memo)] = stack[-1]
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name in _EMPTY:
            stack.append(_EMPTY[name]())
        elif name == "MARK":
            stack.append(_Mark)
        elif name in _TUPLES:
            size = len(stack) - _TUPLES[name]
            stack[size:] = [tuple(stack[size:])]
        elif name == "STOP":
            return stack.pop()
        elif name not in _NOTHING:
            _build(name, stack)
    raise UnsafePickle("cut short")


def _build(name: str, stack: list[Any]) -> None:
    match name:
        case "TUPLE":
            items = _items(stack)
            stack.append(tuple(items))
        case "LIST":
            items = _items(stack)
            stack.append(items)
        case "DICT":
            items = _items(stack)
            stack.append({})
            _set(stack, items)
        case "APPEND":
            item = stack.pop()
            _extend(stack, [item])
        case "APPENDS":
            items = _items(stack)
            _extend(stack, items)
        case "SETITEM":
            value, key = stack.pop(), stack.pop()
            _set(stack, [key, value])
        case "SETITEMS":
            items = _items(stack)
            _set(stack, items)
        case "POP":
            stack.pop()
        case "POP_MARK":
            _items(stack)
        case "DUP":
            stack.append(stack[-1])
        case _:
            raise UnsafePickle(f"it is more than data: {name}")


def _items(stack: list[Any]) -> list[Any]:
    """Pops everything above the last mark off the stack, and the mark."""
    at = len(stack) - 1
    while stack[at] is not _Mark:
        at -= 1
        if at < 0:
            raise UnsafePickle("damaged: no mark")
    items = stack[at + 1 :]
    del stack[at:]
    return items


def _extend(stack: list[Any], items: list[Any]) -> None:
    if not isinstance(stack[-1], list):
        raise UnsafePickle("damaged: no list")
    stack[-1].extend(items)


def _set(stack: list[Any], items: list[Any]) -> None:
    if not isinstance(stack[-1], dict):
        raise UnsafePickle("damaged: no dict")
    for key, value in zip(items[::2], items[1::2], strict=True):
        if not (key is None or isinstance(key, _KEYS)):
            raise UnsafePickle("damaged: a key that is no scalar")
        stack[-1][key] = value
