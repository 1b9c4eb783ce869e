"""Owns what a container sees: this machine, with the container's mounts where it wants them. Runs as the container.

It is started in the pod's namespaces and a mount namespace of its own, arranges that, and becomes the container's
program. It imports nothing that is not needed, since every container waits for it.

A mount needs a place to be mounted on, and `/checkpoints` may be none of this machine. So the root is a new one, in
memory, in which everything of the old one lies; and a folder that lacks an entry is replaced in the same way.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import sys

_RDONLY, _REMOUNT, _BIND, _REC, _SLAVE = 1, 32, 1 << 12, 1 << 14, 1 << 19
_START_FAILED = 128
"""What a container ends with that could not be started, as elsewhere."""

_libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """`container_fs.py DESCRIPTOR SPEC PROGRAM [WORD...]`.

    SPEC is JSON: root, hostname, folder, and mounts of [source, target, read-only]. The descriptor is closed when the
    program takes over, by which the kubelet knows.
    """
    spec = json.loads(sys.argv[2])
    program = sys.argv[3:]
    try:
        os.set_inheritable(int(sys.argv[1]), False)
        socket.sethostname(spec["hostname"])
        root = spec["root"]
        # Whatever is mounted here stays here.
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
    """Make sure that there is something to mount on, without a trace on the machine."""
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
        # Followed from here it would lead out of the new root; what it leads to is put in its place.
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
"""Folders that are in memory, to which entries can be added."""


def _replace(folder: str) -> None:
    """Put a copy made of mounts over a folder, to which entries can be added."""
    old = os.open(folder, os.O_PATH)
    _mirror(f"/proc/self/fd/{old}", folder)
    os.close(old)


def _mirror(source: str, target: str) -> None:
    """Mount memory on a folder, and in it every entry of another."""
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
