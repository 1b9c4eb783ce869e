"""Names shared by agents, renderers and readers for the files in which ranks log the set-up of NCCL.

NCCL opens its file with `fopen(…, "w")`, writes whole lines, and keeps its own offset: to free the middle of a file
changes nothing for it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

LEVEL, SUBSYSTEMS, FILE = "NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE"
INTERFACES = "NCCL_SOCKET_IFNAME"

SETUP_SUBSYSTEMS = "INIT,BOOTSTRAP,ENV,NET,GRAPH"
"""What describes a set-up. TUNING is left out: up to 2.30 it logs a line for each collective."""

_FOLDER = re.compile(r"nccl-(?P<replica>\d{1,9})-attempt-\d{1,9}")
_PRIVATE = re.compile(r"rank-(?P<rank>\d{1,9})\.\d{1,10}\.log")


def log_env(path: str, given: Iterable[str]) -> dict[str, str]:
    """The variables by which NCCL logs its set-up to `path`; none if one of them is among those given already."""
    if {LEVEL, SUBSYSTEMS, FILE} & set(given):
        return {}
    return {LEVEL: "INFO", SUBSYSTEMS: SETUP_SUBSYSTEMS, FILE: path}


def private_folder(node_folder: Path, replica: int | str, attempt: int | str) -> Path:
    """The folder of an attempt's private files on a node; `*` for those of all."""
    return node_folder / f"nccl-{replica}-attempt-{attempt}"


def private_path(folder: Path, rank: int) -> str:
    """The file of a rank's processes, in which NCCL replaces `%p` with the process's number."""
    return f"{folder}/rank-{rank}.%p.log"


def private_files(nodes: Path, replica: int | str = "*", attempt: int | str = "*") -> Iterator[tuple[int, Path]]:
    """The ranks and private files of an attempt, or of all, below the folder of all nodes' folders, in order."""
    for path in sorted(nodes.glob(f"*/{private_folder(Path(), replica, attempt)}/rank-*.log")):
        if name := _PRIVATE.fullmatch(path.name):
            yield int(name["rank"]), path


def place_of(path: Path) -> tuple[str, int] | None:
    """The node and the replica whose ranks wrote a private file; None for any other file."""
    folder = _FOLDER.fullmatch(path.parent.name)
    return (path.parent.parent.name.partition(".")[0], int(folder["replica"])) if folder else None


def files_written(path: str) -> list[Path]:
    """The files of a rank's processes, by its `private_path`; none if that is empty."""
    pattern = Path(path)
    found = pattern.parent.glob(pattern.name.replace("%p", "*")) if path else ()
    return [each for each in found if _PRIVATE.fullmatch(each.name)]
