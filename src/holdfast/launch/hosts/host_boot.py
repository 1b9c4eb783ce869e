"""Prepares a host for a run: checks its Python, stores the packages that it lacks, and becomes host_process.py.

`ssh` starts this source on the host as `PYTHON -c`, so it needs nothing but the standard library.
"""

from __future__ import annotations

import importlib.metadata
import io
import json
import os
import platform
import shutil
import stat
import sys
import tempfile
import zipfile
from typing import Any

OLDEST_PYTHON = (3, 11)


def main() -> None:
    """Answer with what is missing here, receive it, and run the requested program."""
    wanted = json.loads(_read_line())
    if sys.version_info < OLDEST_PYTHON:
        _reply(error="version", detail=platform.python_version())
        return
    packages = os.path.join(wanted["folder"], "packages")
    if refusal := _private_folder(wanted["folder"]):
        _reply(error="folder", detail=refusal)
        return
    suffix = f"-py{sys.version_info[0]}{sys.version_info[1]}-{platform.machine()}"
    places = {name: os.path.join(packages, f"{name}-{version}{suffix}") for name, version in wanted["packages"].items()}
    ours = {name: place for name, place in places.items() if name == wanted["own"] or not _is_installed(name)}
    missing = [name for name, place in ours.items() if not os.path.isdir(place)]
    _reply(python=list(sys.version_info[:2]), machine=platform.machine(), missing=missing)
    if missing:
        size = json.loads(_read_line())["bytes"]
        _unpack(_read(size), {name: ours[name] for name in missing})
    path = [os.path.dirname(sys.executable), *(os.path.join(place, "bin") for place in ours.values())]
    os.environ["PATH"] = os.pathsep.join([*path, os.environ.get("PATH", os.defpath)])
    theirs = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([*([theirs] if theirs else []), *ours.values()])
    os.environ["HOLDFAST_HOME"] = wanted["folder"]
    os.chdir("/")
    os.execv(sys.executable, [sys.executable, "-m", *wanted["run"]])


def _private_folder(folder: str) -> str:
    """Create a folder that only this user may enter; returns what prevents that."""
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        found = os.lstat(folder)
    except OSError as error:
        return str(error)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        return f"{folder} is not a folder of this user alone"
    return ""


def _is_installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _unpack(archive: bytes, places: dict[str, str]) -> None:
    """Store each package under its own folder; another process may do the same."""
    os.makedirs(os.path.dirname(next(iter(places.values()))), mode=0o700, exist_ok=True)
    with zipfile.ZipFile(io.BytesIO(archive)) as files:
        for name, place in places.items():
            fresh = tempfile.mkdtemp(dir=os.path.dirname(place))
            for entry in files.namelist():
                if entry.startswith(f"{name}/"):
                    files.extract(entry, fresh)
            programs = os.path.join(fresh, name, "bin")
            for program in os.listdir(programs) if os.path.isdir(programs) else ():
                os.chmod(os.path.join(programs, program), 0o755)
            try:
                os.rename(os.path.join(fresh, name), place)
            except OSError:
                if not os.path.isdir(place):
                    raise
            shutil.rmtree(fresh)


def _read(size: int) -> bytes:
    """Exactly so many bytes of standard input, and no more: the rest is for the program that follows."""
    parts: list[bytes] = []
    while size:
        part = os.read(0, min(size, 1 << 20))
        if not part:
            sys.exit(1)
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def _read_line() -> bytes:
    line = b""
    while not line.endswith(b"\n"):
        line += _read(1)
    return line


def _reply(**found: Any) -> None:
    os.write(1, json.dumps(found).encode() + b"\n")


if __name__ == "__main__":
    main()
