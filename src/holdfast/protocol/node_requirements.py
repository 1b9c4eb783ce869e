"""What a job needs of each of its nodes, as far as the checks before a start look at it."""

from __future__ import annotations

import msgspec


class NodeRequirements(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The same for every node of a run."""

    gpus: int = 0
    processes: int = 1
    """Ranks on the node."""
    network: str = "Socket"
    """Text of NCCL's `Using network ...` line for the job's fabric: `Socket`, `IB`, ..."""
    env: dict[str, str] = {}
    """The variables of NCCL, Gloo, UCX and libfabric that every rank gets."""
    python: str = ""
    """The interpreter of the job's command; empty if the command names none."""
    workdir: str = ""
    """Folder in which the ranks start; empty if the code is shipped."""
    checkpoints: str = ""
    """Folder to which ranks write checkpoints; empty if they write none."""
    logs: str = ""
    """Folder of the node's own logs."""
