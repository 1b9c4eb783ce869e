"""The private names of Lightning that holdfast uses.

tests/train/test_lightning_private.py checks them, and says what an upgrade of Lightning breaks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from lightning.pytorch import Trainer


def training_loaders(trainer: Trainer) -> tuple[Iterable[Any], Callable[[], object]]:
    """The loaders of a fit that has started, and a function that creates their iterator again."""
    loop = trainer.fit_loop
    combined, fetcher = loop._combined_loader, loop._data_fetcher
    assert combined is not None
    assert fetcher is not None
    return combined.flattened, lambda: iter(fetcher)
