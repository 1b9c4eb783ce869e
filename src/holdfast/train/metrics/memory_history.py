"""Records the allocations of a rank's GPU memory while its steps are profiled, and saves a snapshot of them."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from holdfast.train import torch_private

MAX_ENTRIES = 100_000
"""Latest allocations and releases that are kept, some 100 bytes each without their shared stacks."""
NO_GPU = "the rank uses no GPU, and torch records only GPU memory"
NOT_RECORDED = "another profile was running, which recorded no memory"


class MemoryHistory:
    """Records for one rank, one profile at a time."""

    def __init__(self) -> None:
        self._running = False
        self._started = False
        """Whether recording began here, and not in the program itself."""

    def start(self) -> None:
        """Record from now on, if the rank uses a GPU."""
        self._running = torch.cuda.is_initialized()
        if self._running and not self._started and not torch_private.memory_is_recorded():
            torch_private.record_memory(max_entries=MAX_ENTRIES)
            self._started = True

    def stop(self) -> Callable[[str], None] | str:
        """Stop recording; what writes the snapshot to a path, or why there is none."""
        if not self._running:
            return NOT_RECORDED if torch.cuda.is_initialized() else NO_GPU
        try:
            return partial(_write, torch_private.memory_snapshot())
        except RuntimeError as error:
            return f"{type(error).__name__}: {error}"
        finally:
            self._running = False
            if self._started:
                torch_private.stop_recording_memory()
                self._started = False


def _write(snapshot: Any, path: str) -> None:
    with Path(path).open("wb") as file:
        pickle.dump(snapshot, file)
