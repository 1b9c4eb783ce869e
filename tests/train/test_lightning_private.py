"""The private names of Lightning that holdfast uses: an upgrade fails here first."""

from __future__ import annotations

import inspect
from importlib.metadata import version

import pytest
from tests.train.private_names import require


@pytest.mark.slow
def test_fit_loop_has_its_loaders_and_fetcher() -> None:
    pytest.importorskip("lightning")  # here, because every worker imports the module: 2 s of CPU time
    from lightning.pytorch.loops import fit_loop
    from lightning.pytorch.utilities.combined_loader import CombinedLoader

    source = inspect.getsource(fit_loop)
    for name in ("self._combined_loader", "self._data_fetcher", "iter(self._data_fetcher)"):
        require(name in source, f"lightning {version('lightning')}", name, "resuming a Trainer in an epoch")
    require(hasattr(CombinedLoader, "flattened"), "lightning", "CombinedLoader.flattened", "resuming in an epoch")
