"""Public API inside a rank: `Session` for any PyTorch loop, `Data` for any dataset, `Packed` and `Text`.

Importing this package loads neither torch nor the session; each loads on first use of a name. It also installs the
excepthook that prints holdfast's errors as findings (session/excepthook.py).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from holdfast.errors import require_extra
from holdfast.train.session import excepthook

if TYPE_CHECKING:
    from holdfast.train.data.elastic_data import Data
    from holdfast.train.data.packed import Packed
    from holdfast.train.data.text import Text
    from holdfast.train.session.rank_config import RankConfig
    from holdfast.train.session.session import Session

__all__ = ["Data", "Packed", "RankConfig", "Session", "Text"]

_HOMES = {
    "Data": "data.elastic_data",
    "RankConfig": "session.rank_config",
    "Packed": "data.packed",
    "Session": "session.session",
    "Text": "data.text",
}


excepthook.install()


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        home = import_module(f"{__name__}.{_HOMES[name]}")
    except ModuleNotFoundError as error:
        require_extra("train", error.name or "torch", f"`{__name__}.{name}` needs")
        raise
    return getattr(home, name)
