"""Names shared by agents and ranks to dump torch's flight recorders: variables, pipes and files.

torch's NCCL groups create a pipe, and dump when something is written to it. Gloo groups have none: a Session creates
one for the other recorders of its process.
"""

from __future__ import annotations

from pathlib import Path

ENTRIES = "TORCH_FR_BUFFER_SIZE"
"""Collectives that a recorder keeps; 0 turns recorders off."""
DUMP_PREFIX = "TORCH_FR_DUMP_TEMP_FILE"
"""Prefix of the files that torch's NCCL groups dump to; the rank follows."""
NCCL_PIPE_PREFIX = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"
"""Prefix of the pipes that torch's NCCL groups create; the rank and `.pipe` follow."""

GLOO = "gloo"
"""The recorder that a Session dumps last."""


def nccl_pipe(prefix: str, rank: int) -> Path:
    """The pipe of a rank's NCCL groups."""
    return Path(f"{prefix}{rank}.pipe")


def session_pipe(socket: Path, rank: int) -> Path:
    """The pipe of a rank's Session, next to the socket of its agent."""
    return Path(f"{socket}-flight-{rank}.pipe")


def dump_path(prefix: str, rank: int, recorder: str = "") -> Path:
    """The file that a rank's NCCL groups dump to, or its Session for another recorder."""
    return Path(f"{prefix}{rank}.{recorder}" if recorder else f"{prefix}{rank}")
