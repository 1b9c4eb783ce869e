"""The Python packages that a run's processes on a host need, as they are installed on this machine.

Pure Python or not: a host that lacks one gets this machine's, if it has the same version of Python and processor.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import io
import os
import platform
import re
import sys
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import holdfast

OWN = "holdfast"
NEEDED = ("google-re2", "httpx", "msgspec", "nvidia-ml-py", "py-spy", "websockets", "zstandard")
"""What an agent imports or starts; a test runs one with nothing else installed."""
_REQUIREMENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
PYTHON = (sys.version_info[0], sys.version_info[1])
MACHINE = platform.machine()


@functools.cache
def packages() -> Mapping[str, str]:
    """Version of each package, by name; that of holdfast is a digest of its source."""
    found = {OWN: _source_digest()}
    todo: list[str] = list(NEEDED)
    while todo:
        name = todo.pop()
        if name in found:
            continue
        try:
            package = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # a requirement on other systems only
        found[name] = package.version
        named = map(_REQUIREMENT.match, (line for line in package.requires or () if "extra ==" not in line))
        todo += (name[0].lower().replace("_", "-") for name in named if name)
    return found


def archive(names: tuple[str, ...]) -> bytes:
    """A zip archive of packages, each in a folder of its name; programs are in its folder `bin`."""
    output = io.BytesIO()
    with zipfile.ZipFile(output, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as files:
        for name in names:
            for place, path in _own_files() if name == OWN else _files(name):
                files.write(path, f"{name}/{place}")
    return output.getvalue()


def _own_files() -> Iterator[tuple[str, str]]:
    """The source of holdfast, wherever it is installed. Paths are text: each start of a run reads all files."""
    root = os.path.dirname(holdfast.__file__)
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(each for each in folders if each != "__pycache__")
        for name in sorted(names):
            path = f"{folder}/{name}"
            if not name.endswith(".pyc") and os.path.isfile(path):  # an editor's lock is a link to nothing
                yield f"{OWN}{folder.removeprefix(root)}/{name}", path


def _files(name: str) -> Iterator[tuple[str, str]]:
    for file in importlib.metadata.distribution(name).files or ():
        path = Path(str(file.locate()))
        if path.suffix != ".pyc" and path.is_file():
            yield (f"bin/{path.name}" if ".." in file.parts else file.as_posix()), str(path)


def _source_digest() -> str:
    digest = hashlib.sha256()
    for place, path in _own_files():
        with open(path, "rb", buffering=0) as file:
            source = file.read()
        digest.update(f"{place}\0{len(source)}\0".encode() + source)
    return f"{holdfast.__version__}-{digest.hexdigest()[:16]}"
