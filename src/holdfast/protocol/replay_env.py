"""The variables by which an agent has a Session repeat the run's last steps in a replay, and where its result lies."""

from __future__ import annotations

UNTIL = "HOLDFAST_REPLAY_UNTIL"
"""The last step to repeat."""

FOLDER = "HOLDFAST_REPLAY_FOLDER"
"""The folder for the digests of the ranks of a node."""

MAX_STEPS = 20
"""Steps that a replay repeats at most: a checkpoint may be hours old."""


def digest_file(rank: int) -> str:
    """The name of the file with a rank's digest."""
    return f"rank-{rank:05d}.digest"
