"""Marks in the names of frames in which a rank waits, so that a stack shows what for.

py-spy prints the qualified name of a frame's code. The mark stays when a function is renamed or moved.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import ParamSpec, TypeVar

FOR_REPLICAS = "@waits-for-replicas"
"""In such a frame a rank waits for other replicas, and not for ranks of this one."""
FOR_DEVICE = "@waits-for-device"
"""In such a frame a rank waits for its device, where an operation may wait for other ranks."""

_P = ParamSpec("_P")
_R = TypeVar("_R")


def marked(mark: str) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Mark the frames of a function; not those of what it calls."""

    def mark_code(function: Callable[_P, _R]) -> Callable[_P, _R]:
        assert isinstance(function, FunctionType)
        code = function.__code__
        function.__code__ = code.replace(co_qualname=f"{code.co_qualname}{mark}")
        return function

    return mark_code
