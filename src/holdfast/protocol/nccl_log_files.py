"""Names shared by agents and renderers for the files in which ranks log the set-up of NCCL."""

from __future__ import annotations

from collections.abc import Iterable

LEVEL, SUBSYSTEMS, FILE = "NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE"
INTERFACES = "NCCL_SOCKET_IFNAME"

SETUP_SUBSYSTEMS = "INIT,BOOTSTRAP,ENV,NET,GRAPH"
"""What describes a set-up. TUNING is left out: up to 2.30 it logs a line for each collective."""


def log_env(path: str, given: Iterable[str]) -> dict[str, str]:
    """The variables by which NCCL logs its set-up to `path`; none if one of them is among those given already."""
    if {LEVEL, SUBSYSTEMS, FILE} & set(given):
        return {}
    return {LEVEL: "INFO", SUBSYSTEMS: SETUP_SUBSYSTEMS, FILE: path}
