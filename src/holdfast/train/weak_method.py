"""Lets an object be called without being kept alive."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec
from weakref import WeakMethod

P = ParamSpec("P")


def weakly(method: Callable[P, None]) -> Callable[P, None]:
    """A call of a bound method that does not keep its object alive, and does nothing once the object is gone.

    A Session closes its connection with its last reference; in a cycle it would wait for the garbage collector.
    """
    held = WeakMethod(method)

    def call(*args: P.args, **kwargs: P.kwargs) -> None:
        if (alive := held()) is not None:
            alive(*args, **kwargs)

    return call
