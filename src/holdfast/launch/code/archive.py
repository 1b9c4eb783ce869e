"""Packs and unpacks a job's code as a reproducible tar, whose bytes depend only on names and contents.

It omits owners, times and the order on disk, and of the permissions keeps only the executable bit. So the same code has
the same digest everywhere, as `sha256sum` computes it. It unpacks into a new folder, and no member can point outside.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import stat
import sys
import tarfile
from collections.abc import Generator
from pathlib import Path
from typing import BinaryIO

from msgspec import Struct

from holdfast.errors import ExitCode, HoldfastError, failure
from holdfast.findings import Severity
from holdfast.host.files import open_lock, private_opener
from holdfast.launch.code.file_list import IGNORE_FILE, EntryKind, FileEntry, FileList, printable

READ_ATTEMPTS = 5
"""How often to read a file that another process is writing."""
BLOCK_BYTES = 1 << 20
_TAR_END = bytes(2 * tarfile.BLOCKSIZE)
_MODES = {EntryKind.FOLDER: 0o755, EntryKind.LINK: 0o777}
_TYPES = {EntryKind.FOLDER: tarfile.DIRTYPE, EntryKind.FILE: tarfile.REGTYPE, EntryKind.LINK: tarfile.SYMTYPE}


class CorruptArchive(Exception):
    """An archive is not what it should be; the message says how."""


class PackedArchive(Struct, frozen=True, kw_only=True):
    """A finished archive."""

    path: Path
    digest: str
    """SHA-256 of the file, in hexadecimal."""
    bytes: int


def archive_path(folder: Path, digest: str) -> Path:
    """Path of an archive in a folder of archives."""
    return folder / f"{digest}.tar"


def pack(file_list: FileList, into: Path) -> PackedArchive:
    """Pack a file list into an archive in the private folder `into`; raises HoldfastError on failure."""
    errors = tuple(finding for finding in file_list.findings if finding.severity is Severity.ERROR)
    if errors:
        raise HoldfastError(errors, ExitCode.CANNOT_RUN_HERE)
    fresh = into / "packing"
    try:
        into.mkdir(parents=True, exist_ok=True, mode=0o700)
        with open(fresh, "w+b", opener=private_opener) as file:
            for entry in file_list.entries:
                _add(file, file_list.root, entry)
            file.write(_TAR_END)
            size = file.tell()
            file.seek(0)
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        path = archive_path(into, digest)
        fresh.rename(path)
    except OSError as error:
        raise failure(
            "unwritable-folder",
            f"the archive of the code cannot be written in {into}",
            exit_code=ExitCode.CANNOT_RUN_HERE,
            where=str(into),
            evidence=(str(error),),
            remedy="Make room there, or set HOLDFAST_HOME to another folder.",
        ) from error
    return PackedArchive(path=path, digest=digest, bytes=size)


@contextlib.contextmanager
def locked(folder: Path, digest: str) -> Generator[Path]:
    """Hold the lock for unpacking an archive into the folder that is returned, under `folder`.

    Several nodes of one machine may share it. The kernel releases the lock when the process ends.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with open_lock(folder / f"{digest}.lock") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield folder / digest


def store(data: bytes, folder: Path, digest: str) -> None:
    """Unpack an archive in memory under `folder`, unless it is there. Raises CorruptArchive, or OSError."""
    with locked(folder, digest) as into:
        if into.is_dir():
            return
        if (found := hashlib.sha256(data).hexdigest()) != digest:
            raise CorruptArchive(f"its digest is {found}")
        part = archive_path(folder, f"{digest}.part")
        try:
            with open(part, "wb", opener=private_opener) as file:
                file.write(data)
            unpack(part, into)
        finally:
            part.unlink(missing_ok=True)


def unpack(archive: Path, into: Path) -> None:
    """Unpack an archive into the folder `into`, atomically. Raises CorruptArchive, or OSError (a full disk).

    Only the process that holds the lock may do it. Removes what a killed one left behind.
    """
    fresh = into.with_name(f"{into.name}.new")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(mode=0o700)
    try:
        try:
            with tarfile.open(archive, "r:", encoding=sys.getfilesystemencoding(), errors="surrogateescape") as members:
                _extract(members, fresh)
        except tarfile.TarError as error:
            raise CorruptArchive(str(error)) from error
        fresh.rename(into)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


# Packing


def _add(file: BinaryIO, root: Path, entry: FileEntry) -> None:
    """Append an entry, unless its file has been deleted since it was listed."""
    if entry.kind is not EntryKind.FILE:
        file.write(_header(entry, _MODES[entry.kind], 0))
        return
    begun = file.tell()
    for _ in range(READ_ATTEMPTS):
        try:
            source = open(root / entry.path, "rb", opener=_open_regular)  # noqa: SIM115 - closed just below
        except FileNotFoundError:
            return
        except OSError as error:
            raise _unreadable(root, entry, error) from error
        with source:
            if _copied(source, file, entry):
                return
        file.seek(begun)
        file.truncate()
    raise failure(
        "code-changed-during-upload",
        f"{printable(entry.path)} is being written while it is shipped",
        exit_code=ExitCode.CANNOT_RUN_HERE,
        where=printable(str(root / entry.path)),
        evidence=(f"it changed each of the {READ_ATTEMPTS} times it was read",),
        remedy=f"Wait until it is written, or name it in {IGNORE_FILE}.",
    )


def _copied(source: BinaryIO, file: BinaryIO, entry: FileEntry) -> bool:
    """Append a file's content; False if the file changed while it was read."""
    before = os.fstat(source.fileno())
    if not stat.S_ISREG(before.st_mode):
        return False
    file.write(_header(entry, 0o755 if before.st_mode & stat.S_IXUSR else 0o644, before.st_size))
    left = before.st_size
    while left and (block := source.read(min(left, BLOCK_BYTES))):
        file.write(block)
        left -= len(block)
    file.write(bytes(-before.st_size % tarfile.BLOCKSIZE))
    after = os.fstat(source.fileno())
    return not left and (before.st_size, before.st_mtime_ns) == (after.st_size, after.st_mtime_ns)


def _header(entry: FileEntry, mode: int, size: int) -> bytes:
    member = tarfile.TarInfo(entry.path)
    member.type, member.mode, member.size, member.linkname = _TYPES[entry.kind], mode, size, entry.target
    return member.tobuf(tarfile.GNU_FORMAT, sys.getfilesystemencoding(), "surrogateescape")


def _unreadable(root: Path, entry: FileEntry, error: OSError) -> HoldfastError:
    return failure(
        "code-unreadable",
        f"{printable(entry.path)} cannot be read",
        exit_code=ExitCode.CANNOT_RUN_HERE,
        where=printable(str(root / entry.path)),
        evidence=(str(error.strerror),),
        remedy=f"Permit it, or name it in {IGNORE_FILE}.",
    )


# Unpacking


def _extract(members: tarfile.TarFile, root: Path) -> None:
    """Write every member below `root`. A member's parent must be a folder that an earlier member made, so never a link.

    Link targets are checked once all links exist: several links, each of which stays inside, can together lead outside.
    """
    folders = {""}
    links: list[Path] = []
    for member in members:
        parent, _, name = member.name.rpartition("/")
        if parent not in folders or name in ("", ".", "..") or "\0" in name:
            raise CorruptArchive(f"{printable(member.name)!r} has no place in the folder")
        path = root / member.name
        try:
            if member.isdir():
                path.mkdir(mode=0o755)
                folders.add(member.name)
            elif member.issym():
                path.symlink_to(member.linkname)
                links.append(path)
            elif member.isreg():
                _write(members, member, path)
            else:
                raise CorruptArchive(f"{printable(member.name)!r} is neither file, folder nor link")
        except FileExistsError as error:
            raise CorruptArchive(f"{printable(member.name)!r} is there twice") from error
    inside = root.resolve()
    for link in links:
        if not Path(os.path.realpath(link)).is_relative_to(inside):
            raise CorruptArchive(f"the link {printable(str(link.relative_to(root)))!r} points out of the folder")


def _write(members: tarfile.TarFile, member: tarfile.TarInfo, path: Path) -> None:
    source = members.extractfile(member)
    assert source is not None, "a regular file has content"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o755 if member.mode & stat.S_IXUSR else 0o644)
    with source, open(descriptor, "wb") as file:
        shutil.copyfileobj(source, file, BLOCK_BYTES)
    if path.stat().st_size != member.size:
        raise CorruptArchive(f"{printable(member.name)!r} is cut off")


def _open_regular(path: str, flags: int) -> int:
    """Open a file without following a link, and without blocking if a fifo has replaced it."""
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOFOLLOW)
