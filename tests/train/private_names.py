"""How a test checks the private names of a library that an adapter uses."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import pytest


def missing(owner: object, *names: str) -> list[str]:
    return [name for name in names if not hasattr(owner, name)]


def takes(function: Callable[..., object], *names: str) -> bool:
    """Whether a function's first parameters have these names, in this order."""
    return [*inspect.signature(function).parameters][: len(names)] == [*names]


def require(holds: bool, library: str, name: str, feature: str) -> None:
    """Fail with the feature that an upgrade breaks."""
    if not holds:
        pytest.fail(f"{library}: {name} has changed, which breaks {feature}; see the adapter of that library")
