"""Private folders with short paths for the sockets of a node's ranks.

Their names end at random: in a shared folder such as /tmp anybody could make one with a name that can be guessed. A
link in the node's folder says where the folder is, so that every later controller finds it again and removes it.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from holdfast.host.files import is_private

MAX_PATH_BYTES = 80
"""Longest path of such a folder: the path of a Unix socket holds 107 bytes, and the socket's name is part of it."""

LINK_NAME = "sockets"
"""In the node's folder: links to its folder for sockets."""

_RUNTIME_DIRS = Path("/run/user")
"""Where logind keeps a user's runtime folder, which it removes when the user logs out; a run goes on after that."""
_LINGERING = Path("/var/lib/systemd/linger")
"""Holds a file for each user whose runtime folder is kept."""


def create(node_folder: Path) -> Path:
    """Make a private folder for a node's sockets; raises OSError where none can be made anywhere."""
    remove(node_folder)  # of an earlier start of the same node that went wrong
    (node_folder / LINK_NAME).unlink(missing_ok=True)
    refused: OSError | None = None
    for parent in dict.fromkeys(_parents()):
        folder = parent / f"{_name_prefix(node_folder)}{secrets.token_hex(8)}"
        if len(os.fsencode(folder)) > MAX_PATH_BYTES:
            continue
        try:
            (node_folder / LINK_NAME).symlink_to(folder)  # first, so that a controller that dies here leaves no orphan
            folder.mkdir(mode=0o700)
        except OSError as error:
            refused = error
            (node_folder / LINK_NAME).unlink(missing_ok=True)
        else:
            return folder
    raise refused or FileNotFoundError("no folder for temporary files has a path short enough for a Unix socket")


def remove(node_folder: Path) -> None:
    """Remove a node's folder for sockets, if it has one."""
    link = node_folder / LINK_NAME
    try:
        folder = link.readlink()
    except OSError:  # there is none, or it is not what `make` leaves
        return
    if folder.name.startswith(_name_prefix(node_folder)) and _is_own_private_dir(folder):
        shutil.rmtree(folder, ignore_errors=True)
    if not os.path.lexists(folder):
        link.unlink(missing_ok=True)


def existing(node_folder: Path) -> list[Path]:
    """Every folder for sockets of a node that is there, also one that nothing links to any more."""
    return [folder for parent in dict.fromkeys(_parents()) for folder in parent.glob(f"{_name_prefix(node_folder)}*")]


def _name_prefix(node_folder: Path) -> str:
    """Of the names of a node's folders: a copy of a run's folder has another, and leaves those of the run alone."""
    of = f"{node_folder.parent.parent.name}/{node_folder.name}"
    return f"holdfast-{hashlib.blake2b(os.fsencode(of), digest_size=4).hexdigest()}-"


def _parents() -> Iterator[Path]:
    """Folders in which to make one, best first."""
    runtime = Path(os.environ.get("XDG_RUNTIME_DIR", ""))
    if runtime.is_absolute() and _is_own_private_dir(runtime) and _outlives_logout(runtime):
        yield runtime
    yield Path(tempfile.gettempdir())
    yield Path("/tmp")


def _outlives_logout(runtime: Path) -> bool:
    user = os.environ.get("USER", "")
    return not runtime.is_relative_to(_RUNTIME_DIRS) or bool(user and (_LINGERING / user).exists())


def _is_own_private_dir(folder: Path) -> bool:
    """Whether it is there, and a folder of this user that nobody else may enter."""
    try:
        return is_private(folder)
    except OSError:
        return False
