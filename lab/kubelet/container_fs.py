"""Sets up the file system of a container: this machine's, plus the container's mounts. Runs as the container.

It starts in the pod's namespaces and a separate mount namespace, sets up the mounts, and execs the container's program.
It imports only what it needs, since every container waits for it.

A mount needs a mount point, and this machine may have no `/checkpoints`. So the root is a new tmpfs into which all
entries of the old root are mounted. A folder that lacks an entry is replaced in the same way.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import sys

_RDONLY, _REMOUNT, _BIND, _REC, _SLAVE = 1, 32, 1 << 12, 1 << 14, 1 << 19
_START_FAILED = 128
"""Exit code of a container that could not be started, as in other runtimes."""

_libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """`container_fs.py DESCRIPTOR SPEC PROGRAM [WORD...]`.

    SPEC is JSON: root, hostname, folder, and mounts of [source, target, read-only]. The descriptor closes at exec,
    which tells the kubelet that the program runs.
    """
    spec = json.loads(sys.argv[2])
    program = sys.argv[3:]
    try:
        os.set_inheritable(int(sys.argv[1]), False)
        socket.sethostname(spec["hostname"])
        root = spec["root"]
        # Mounts made here do not propagate to the machine.
        _mount("", "/", _REC | _SLAVE)
        _mirror("/", root)
        for source, target, read_only in spec["mounts"]:
            _place(root, target, folder=os.path.isdir(source))
            _mount(source, root + target, _BIND | _REC)
            if read_only:
                _mount("", root + target, _BIND | _REMOUNT | _RDONLY)
        os.chroot(root)
        os.chdir(spec["folder"] or "/")
        os.execvp(program[0], program)
    except OSError as error:
        sys.stderr.write(f"{program[0]}: {error}\n")
        sys.exit(_START_FAILED)


def _place(root: str, target: str, *, folder: bool) -> None:
    """Create a mount point, without a trace on the machine."""
    here = root
    *above, last = target.strip("/").split("/")
    for name in above:
        _ensure(here, name, folder=True)
        here = os.path.join(here, name)
    _ensure(here, last, folder=folder)


def _ensure(parent: str, name: str, *, folder: bool) -> None:
    path = os.path.join(parent, name)
    link = os.path.islink(path)
    if not link and os.path.exists(path):
        return
    if parent not in _ours:
        _replace(parent)
    if link:
        # The link would lead out of the new root; mount its target in its place.
        led = os.path.realpath(path)
        os.unlink(path)
        os.mkdir(path)
        if os.path.isdir(led):
            _mount(led, path, _BIND | _REC)
    elif folder:
        os.mkdir(path)
    else:
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o644))


_ours: set[str] = set()
"""Folders on tmpfs, to which entries can be added."""


def _replace(folder: str) -> None:
    """Mount a tmpfs copy over a folder, so that entries can be added."""
    old = os.open(folder, os.O_PATH)
    _mirror(f"/proc/self/fd/{old}", folder)
    os.close(old)


def _mirror(source: str, target: str) -> None:
    """Mount a tmpfs on a folder, and every entry of another folder in it."""
    mode = os.stat(source).st_mode & 0o7777
    entries = list(os.scandir(source))
    _mount("lab", target, 0, "tmpfs", f"mode={mode:o},size=16m")
    _ours.add(target)
    for entry in entries:
        there, here = os.path.join(source, entry.name), os.path.join(target, entry.name)
        if entry.is_symlink():
            os.symlink(os.readlink(there), here)
        elif entry.is_dir():
            os.mkdir(here)
            _mount(there, here, _BIND | _REC)
        else:
            os.close(os.open(here, os.O_CREAT | os.O_WRONLY, 0o644))
            _mount(there, here, _BIND)


def _mount(source: str, target: str, flags: int, kind: str = "", data: str = "") -> None:
    done = _libc.mount(source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), data.encode())
    if done != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"mount {source} on {target}: {os.strerror(number)}")


main()
