"""Private folders with short paths for the sockets of a node's ranks.

The names have a random suffix: in a shared folder such as /tmp any user could create a guessable name first. A link in
the node's folder points to it, so that a later controller finds and removes it.
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
"""Longest path of such a folder: a Unix socket's path, including its name, holds 107 bytes."""

LINK_NAME = "sockets"
"""The link in the node's folder to its socket folder."""

_RUNTIME_DIRS = Path("/run/user")
"""Where logind keeps a user's runtime folder, which it removes at logout; a run continues after that."""
_LINGERING = Path("/var/lib/systemd/linger")
"""Has a file for each user whose runtime folder logind keeps."""


def create(node_folder: Path) -> Path:
    """Create a private folder for a node's sockets; raises OSError if every location fails."""
    remove(node_folder)  # left by an earlier failed start of the same node
    (node_folder / LINK_NAME).unlink(missing_ok=True)
    refused: OSError | None = None
    for parent in dict.fromkeys(_parents()):
        folder = parent / f"{_name_prefix(node_folder)}{secrets.token_hex(8)}"
        if len(os.fsencode(folder)) > MAX_PATH_BYTES:
            continue
        try:
            (node_folder / LINK_NAME).symlink_to(
                folder
            )  # first, so that a controller that dies here leaves no unlinked folder
            folder.mkdir(mode=0o700)
        except OSError as error:
            refused = error
            (node_folder / LINK_NAME).unlink(missing_ok=True)
        else:
            return folder
    raise refused or FileNotFoundError("no folder for temporary files has a path short enough for a Unix socket")


def remove(node_folder: Path) -> None:
    """Remove a node's socket folder, if it has one."""
    link = node_folder / LINK_NAME
    try:
        folder = link.readlink()
    except OSError:  # missing, or not a link that `create` made
        return
    if folder.name.startswith(_name_prefix(node_folder)) and _is_own_private_dir(folder):
        shutil.rmtree(folder, ignore_errors=True)
    if not os.path.lexists(folder):
        link.unlink(missing_ok=True)


def existing(node_folder: Path) -> list[Path]:
    """All socket folders of a node, including unlinked ones."""
    return [folder for parent in dict.fromkeys(_parents()) for folder in parent.glob(f"{_name_prefix(node_folder)}*")]


def _name_prefix(node_folder: Path) -> str:
    """Prefix of a node's socket folders; a copy of the run's folder has another, so it never removes the run's."""
    of = f"{node_folder.parent.parent.name}/{node_folder.name}"
    return f"holdfast-{hashlib.blake2b(os.fsencode(of), digest_size=4).hexdigest()}-"


def _parents() -> Iterator[Path]:
    """Candidate parent folders, best first."""
    runtime = Path(os.environ.get("XDG_RUNTIME_DIR", ""))
    if runtime.is_absolute() and _is_own_private_dir(runtime) and _outlives_logout(runtime):
        yield runtime
    yield Path(tempfile.gettempdir())
    yield Path("/tmp")


def _outlives_logout(runtime: Path) -> bool:
    user = os.environ.get("USER", "")
    return not runtime.is_relative_to(_RUNTIME_DIRS) or bool(user and (_LINGERING / user).exists())


def _is_own_private_dir(folder: Path) -> bool:
    """Whether the folder exists, belongs to this user, and is closed to all others."""
    try:
        return is_private(folder)
    except OSError:
        return False
