"""Maps operating-system resource errors to findings.

One row per error. The reaction is elsewhere: the controller waits (control/controller.py), a checkpoint is skipped
(train/checkpoint/manager.py), a rank's exit is judged (control/policy.py).
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
from msgspec import Struct

from holdfast.findings import Finding, Owner, Severity

_LOW_SPACE_BYTES = 64 << 10
_NUMBER = re.compile(r"\[Errno (\d+)\]")
# OSError: [Errno 30] Read-only file system: 'out/step 1' -> '/data/ckpt'
# mkdir: cannot create directory ‘/data/ckpt’: Read-only file system
# RuntimeError: Parent directory /data/ckpt does not exist.
_PATH = re.compile(r"""['"‘]([^'"’]+)['"’]|(?<![\w.'"‘])(/[^\s'"’:,;()]+)""")
_BY_ITSELF = "emergency_ro"
"""Option of an ext4 that has become read-only after an error, as Linux 6.15 and later show it."""


class ResourceError(Struct, frozen=True, kw_only=True):
    """One operating-system error."""

    code: str
    """Code of the finding."""
    phrase: str
    """The C library's message, which programs in any language repeat."""
    what: str
    remedy: str
    """The fix; the caller adds the consequence for its operation."""


_OF_DISKS = frozenset({"disk-full", "read-only-file-system", "disk-error"})
_FULL = "Free some space there, or point the job at another file system."
_WRITABLE = (
    "Mount it read-write, or write elsewhere. If it became read-only by itself, the kernel's log says why: `dmesg`."
)
_FILES = "Raise the limit on open files (`ulimit -n`, LimitNOFILE=), or find what holds so many (`ls /proc/PID/fd`)."

RESOURCE_ERRORS: Mapping[int, ResourceError] = {
    errno.ENOSPC: ResourceError(
        code="disk-full", phrase="No space left on device", what="no space is left on the disk", remedy=_FULL
    ),
    errno.EDQUOT: ResourceError(
        code="disk-full", phrase="Disk quota exceeded", what="the disk quota is used up", remedy=_FULL
    ),
    errno.EROFS: ResourceError(
        code="read-only-file-system",
        phrase="Read-only file system",
        what="the file system is read-only",
        remedy=_WRITABLE,
    ),
    errno.EIO: ResourceError(
        code="disk-error",
        phrase="Input/output error",
        what="the disk fails",
        remedy="Look at the kernel's log: `dmesg`.",
    ),
    errno.EMFILE: ResourceError(
        code="too-many-open-files",
        phrase="Too many open files",
        what="the process may open no more files",
        remedy=_FILES,
    ),
    errno.ENFILE: ResourceError(
        code="too-many-open-files",
        phrase="Too many open files in system",
        what="the machine may open no more files",
        remedy=_FILES,
    ),
    errno.EAGAIN: ResourceError(
        code="too-many-processes",
        phrase="Resource temporarily unavailable",
        what="no more processes may be started",
        remedy="Raise the limit on processes (`ulimit -u`, pids.max of the cgroup), or end some.",
    ),
    errno.ENOMEM: ResourceError(
        code="no-memory",
        phrase="Cannot allocate memory",
        what="the machine has no memory to give",
        remedy="Ask for less memory, or end what else runs there.",
    ),
}


def resource_error_of(error: BaseException | None) -> ResourceError | None:
    """The row for an error or for its cause; None if it is not a resource error."""
    while error is not None:
        if isinstance(error, OSError) and (row := RESOURCE_ERRORS.get(error.errno or 0)):
            return row
        error = error.__cause__ or error.__context__
    return None


def resource_error_in(words: str) -> ResourceError | None:
    """The row for an error text, such as `OSError: [Errno 28] No space left on device`, or for a finding's code."""
    if (number := _NUMBER.search(words)) and int(number[1]) in RESOURCE_ERRORS:
        return RESOURCE_ERRORS[int(number[1])]
    return next((row for row in RESOURCE_ERRORS.values() if row.phrase in words or f"[{row.code}]" in words), None)


def os_error_finding(error: OSError, subject: str, path: Path, severity: Severity = Severity.ERROR) -> Finding:
    """The finding for an operating-system error: `subject` is what cannot be done, `path` is where."""
    row = resource_error_of(error)
    return Finding(
        code=row.code if row else "os-error",
        severity=severity,
        what=f"{subject}: {row.what if row else error.strerror}",
        where=str(path),
        evidence=(str(error), *disk_usage(path)),
        remedy=row.remedy if row else "See who may use it (`ls -ld`), and what the kernel says of its disk (`dmesg`).",
        owner=Owner.CLUSTER,
    )


def waiting_finding(error: OSError, subject: str, path: Path) -> Finding:
    """The same as a warning, for an operation that is retried until it succeeds."""
    finding = os_error_finding(error, subject, path, Severity.WARNING)
    return msgspec.structs.replace(finding, remedy=f"{finding.remedy} What waits for it resumes by itself.")


def probe_disk(path: Path) -> OSError | None:
    """The error of a file system that is full or read-only; None if it is writable."""
    size = os.statvfs(_nearest_existing(path))
    if _read_only(size, path):
        number = errno.EROFS
    elif size.f_blocks and size.f_bavail * size.f_frsize < _LOW_SPACE_BYTES:  # /proc has no blocks and is never full
        number = errno.ENOSPC
    else:
        return None
    return OSError(number, os.strerror(number))


def resolved(known: Finding, recovered: Finding) -> Finding:
    """A disk finding, marked as resolved by a later `disk-space-recovered` finding at the same place."""
    if recovered.code != "disk-space-recovered" or known.where != recovered.where or known.code not in _OF_DISKS:
        return known
    return msgspec.structs.replace(known, what=f"{known.what}; {recovered.what}", severity=Severity.INFO, remedy="")


def disk_usage(path: Path) -> tuple[str, ...]:
    """Free space of a path's file system, or that it is read-only, as a line of evidence.

    Empty if it is unknown.
    """
    nearest = _nearest_existing(path)
    try:
        size, disk = os.statvfs(nearest), _mount_of(nearest)
    except OSError:
        return ()
    if _read_only(size, nearest):
        how = "became read-only after an error" if _BY_ITSELF in disk.options else "is mounted read-only"
        return (f"{disk.point} {how} ({disk.kind}, {disk.device})",)
    free, whole = size.f_bavail * size.f_frsize, size.f_blocks * size.f_frsize
    files = f", {size.f_favail:,} of {size.f_files:,} files" if size.f_files else ""
    return (f"{disk.kind} on {disk.point}: {free:,} of {whole:,} bytes free{files}",)


def room_in(words: str, folder: Path, log: Path) -> tuple[str, ...]:
    """The same for the file system that a program's own error text about a full or read-only disk refers to.

    That is the one of a path in the text, relative to `folder`, or of the `log` that it was written to. A read-only
    error requires a file system that is read-only.
    """
    row = resource_error_in(words)
    if row is None or row.code not in _OF_DISKS:
        return ()
    paths = [folder / name for match in _PATH.finditer(words) for name in match.groups() if name]
    for path in (*paths, folder, log):
        with contextlib.suppress(OSError, ValueError):  # such as for a name that is too long
            if (refusal := probe_disk(path)) is not None and resource_error_of(refusal) is row:
                return disk_usage(path)
    return () if row is RESOURCE_ERRORS[errno.EROFS] else disk_usage(paths[0] if paths else log)


def _nearest_existing(path: Path) -> Path:
    """The path, or the nearest parent that exists."""
    return next((parent for parent in (path, *path.parents) if parent.exists()), Path("/"))


def _read_only(size: os.statvfs_result, path: Path) -> bool:
    """Whether a file system is read-only; Linux 6.15 does not flag ext4 that became so after an error."""
    if size.f_flag & os.ST_RDONLY:
        return True
    try:
        return _BY_ITSELF in _mount_of(path).options
    except OSError:  # such as when no descriptor is left
        return False


class _Mount(Struct, frozen=True, kw_only=True):
    point: Path
    kind: str
    device: str
    """Such as `/dev/sda1` or `server:/export`."""
    options: tuple[str, ...]
    """Options of the file system, not of this mount."""


def _mount_of(path: Path) -> _Mount:
    """The longest mount point above a path; of equal ones the last hides the others."""
    whole = path.resolve()
    return max(_mounts(), key=lambda mount: len(mount.point.parts) if whole.is_relative_to(mount.point) else -1)


def _mounts() -> Iterator[_Mount]:
    # 36 35 98:0 /root /mnt/scratch rw,noatime shared:1 - tmpfs tmpfs rw,size=8192k
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    for line in reversed(lines):
        before, _, after = line.partition(" - ")
        point = Path(_unescaped(before.split()[4]))
        kind, device, options = after.split(maxsplit=2)
        yield _Mount(point=point, kind=kind, device=_unescaped(device), options=tuple(options.split(",")))


def _unescaped(word: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), word)
