"""What runs inside a rank: `Session` for any PyTorch loop, `Data` for any dataset, `Packed` and `Text`.

Importing this package loads neither torch nor the session; they come with the first use of a name. A program that
imports it and ends by an error of holdfast's own says so in words (parting.py).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from holdfast.train import parting

if TYPE_CHECKING:
    from holdfast.train.data.data import Data
    from holdfast.train.data.packed import Packed
    from holdfast.train.environment import Environment
    from holdfast.train.session import Session
    from holdfast.train.text import Text

__all__ = ["Data", "Environment", "Packed", "Session", "Text"]

_HOMES = {
    "Data": "data.data",
    "Environment": "environment",
    "Packed": "data.packed",
    "Session": "session",
    "Text": "text",
}


parting.install()


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
