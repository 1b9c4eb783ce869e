"""Kills the calling process, once per run: the only line that the programs contain for the test suite."""

import os
import signal
from pathlib import Path


def killed_once(rank: int, epoch: int) -> None:
    """Rank 1 dies by SIGKILL before epoch 2, the first time it gets there."""
    note = Path("killed")
    if (rank, epoch) == (1, 2) and not note.exists():
        note.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def tell(rank: int, first: int, weights: float) -> None:
    """Print what the suite reads: where this process began, and its final values."""
    Path(f"rank-{rank}.txt").write_text(f"{first} {weights:.6f}")
