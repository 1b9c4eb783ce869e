"""Lists the files of a code folder to upload, in a fixed order, and reports what prevents the upload.

Nothing here reads a file's content; archive.py does.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections import Counter, deque
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct

from holdfast.findings import Finding, Severity

if TYPE_CHECKING:
    from pathspec import GitIgnoreSpec

    from holdfast.job.spec import Job  # brings pydantic: half of the import time of an agent's first step

IGNORE_FILE = ".holdfastignore"
MAX_ENTRIES = 100_000
"""A folder with more files and folders than this is not code; listing it would take seconds."""
LARGEST_SHOWN = 5
MAX_QUOTED = 10
"""Most names that a finding quotes."""


class EntryKind(Enum):
    """Kind of an entry; nothing else is uploaded."""

    FOLDER = "folder"
    FILE = "file"
    LINK = "link"


class FileEntry(Struct, frozen=True, kw_only=True):
    """One file, folder or link to upload."""

    path: str
    """Relative to the root, with slashes; bytes that are not UTF-8 are decoded as by `os.fsdecode`."""
    kind: EntryKind
    bytes: int = 0
    """A file's size when it was listed."""
    target: str = ""
    """A link's target, relative to the link's folder."""


class FileList(Struct, frozen=True, kw_only=True):
    """A job's code in a folder, parents before children, and the findings about it."""

    root: Path
    cwd: str
    """The job's `workdir`, relative to the root."""
    entries: tuple[FileEntry, ...] = ()
    findings: tuple[Finding, ...] = ()

    @property
    def files(self) -> int:
        return sum(entry.kind is not EntryKind.FOLDER for entry in self.entries)


def list_files(job: Job, base: Path, *, exclude: tuple[Path, ...] = ()) -> FileList:
    """List the code of a job whose relative paths start from `base`, without the folders in `exclude`."""
    workdir = Path(base, job.workdir).resolve()
    root = Path(workdir, job.code.root).resolve()
    if not workdir.is_relative_to(root) or not root.is_dir():
        what = f"code.root is {root}, which is no folder that holds the working directory {workdir}"
        remedy = "Name `.`, or a folder above `workdir` such as `..`."
        return FileList(root=root, cwd=".", findings=(_error("bad-code-root", "code.root", what, remedy),))
    cwd = str(workdir.relative_to(root))
    spec, findings = _patterns(job.code.ignore, root)
    if findings:
        return FileList(root=root, cwd=cwd, findings=tuple(findings))
    walk = _Walk(root, spec, frozenset(path.resolve() for path in exclude))
    return FileList(
        root=root, cwd=cwd, entries=tuple(walk.entries), findings=tuple(walk.findings(limit_bytes=job.code.max_bytes))
    )


_BACKEND = "simple"
"""Python's own regular expressions: re2, which pathspec prefers, refuses names that are not UTF-8."""


def _patterns(ignore: tuple[str, ...], root: Path) -> tuple[GitIgnoreSpec, list[Finding]]:
    """The job's patterns, then the ignore file's; the last match decides, as for git."""
    from pathspec import GitIgnoreSpec

    lines = [(f"code.ignore[{index}]", line) for index, line in enumerate(ignore)]
    findings: list[Finding] = []
    path = root / IGNORE_FILE
    try:
        text = path.read_text(errors="surrogateescape")
        lines += [(f"{path}:{number}", line) for number, line in enumerate(text.splitlines(), 1)]
    except FileNotFoundError:
        pass
    except OSError as error:
        what = f"{path} cannot be read"
        findings.append(_error("bad-ignore-pattern", str(path), what, "Make it a file you can read.", (str(error),)))
    for where, line in lines:
        try:
            GitIgnoreSpec.from_lines([line], backend=_BACKEND)
        except (ValueError, re.error) as error:
            what = f"`{line}` is no pattern: {error}"
            remedy = "Write it as in a .gitignore; a backslash before `!`, `#` or `[` takes it as it is."
            findings.append(_error("bad-ignore-pattern", where, what, remedy))
    return GitIgnoreSpec.from_lines([] if findings else [line for _, line in lines], backend=_BACKEND), findings


class _Walk:
    """One walk over everything below a root; it does not enter ignored folders."""

    def __init__(self, root: Path, ignored: GitIgnoreSpec, excluded: frozenset[Path]) -> None:
        self.entries: list[FileEntry] = []
        self._root = root
        self._ignored = ignored
        self._excluded = excluded
        self._unreadable: list[str] = []
        self._outside: list[str] = []
        self._special: list[str] = []
        self._to_visit = deque([""])
        self._complete = True
        while self._to_visit and self._complete:
            self._complete = all(map(self._add, *self._list(self._to_visit.popleft())))

    def _list(self, folder: str) -> tuple[list[str], list[os.stat_result]]:
        """Paths of a folder's entries, in byte order, and the stat result of each."""
        paths: list[str] = []
        states: list[os.stat_result] = []
        try:
            with os.scandir(self._root / folder) as listing:
                for item in sorted(listing, key=lambda item: os.fsencode(item.name)):
                    with contextlib.suppress(FileNotFoundError):
                        states.append(item.stat(follow_symlinks=False))
                        paths.append(f"{folder}{item.name}")
        except FileNotFoundError:
            pass
        except OSError as error:
            self._unreadable.append(f"{folder}: {error.strerror}")
        return paths, states

    def _add(self, path: str, state: os.stat_result) -> bool:
        """Add one entry; False if that exceeds MAX_ENTRIES."""
        is_folder = stat.S_ISDIR(state.st_mode)
        if self._ignored.match_file(f"{path}/" if is_folder else path) or self._root / path in self._excluded:
            return True
        if len(self.entries) >= MAX_ENTRIES:
            return False
        if is_folder:
            self.entries.append(FileEntry(path=path, kind=EntryKind.FOLDER))
            self._to_visit.append(f"{path}/")
        elif stat.S_ISLNK(state.st_mode):
            self._add_link(path)
        elif stat.S_ISREG(state.st_mode):
            self.entries.append(FileEntry(path=path, kind=EntryKind.FILE, bytes=state.st_size))
            if not os.access(self._root / path, os.R_OK, effective_ids=True):
                self._unreadable.append(f"{path}: {stat.filemode(state.st_mode)}")
        else:
            self._special.append(f"{path}: {_SPECIAL_KINDS.get(stat.S_IFMT(state.st_mode), 'special file')}")
        return True

    def _add_link(self, path: str) -> None:
        """Add a link as a link, without following it; an absolute target inside the root becomes relative."""
        here = self._root / path
        try:
            target = os.readlink(here)
        except OSError:  # deleted, or no longer a link
            return
        reached = os.path.realpath(here)
        if not Path(reached).is_relative_to(self._root):
            self._outside.append(f"{path} -> {target}")
            return
        if os.path.isabs(target):
            target = os.path.relpath(reached, here.parent)
        self.entries.append(FileEntry(path=path, kind=EntryKind.LINK, target=target))

    def findings(self, *, limit_bytes: int) -> Iterator[Finding]:
        """Errors and warnings about the listed files."""
        total = sum(entry.bytes for entry in self.entries)
        if not self._complete or total > limit_bytes:
            yield self._too_large(total, limit_bytes)
        if self._unreadable:
            what = f"{_count_of(self._unreadable, 'file')} of the code cannot be read"
            remedy = f"Permit it, or name it in {IGNORE_FILE}."
            yield _error("code-unreadable", str(self._root), what, remedy, _quoted(self._unreadable))
        if self._outside:
            what = (
                f"{_count_of(self._outside, 'link')} of the code points out of {self._root}, where nodes have nothing"
            )
            remedy = f"Name it in {IGNORE_FILE} and use the absolute path in the job, or put a copy in its place."
            yield _error("code-link-outside", str(self._root), what, remedy, _quoted(self._outside))
        if self._special:
            yield Finding(
                code="code-file-skipped",
                severity=Severity.WARNING,
                what=f"{_count_of(self._special, 'name')} is neither file, folder nor link, and is not shipped",
                where=str(self._root),
                evidence=_quoted(self._special),
                remedy=f"Name it in {IGNORE_FILE} to suppress this warning.",
            )

    def _too_large(self, total: int, limit_bytes: int) -> Finding:
        if self._complete:
            what = f"the code has {format_size(total)}, and code.max_bytes allows {format_size(limit_bytes)}"
        else:
            what = f"the code has more than {MAX_ENTRIES:,} files and folders, which is too many to be shipped"
        remedy = (
            f"Name in {self._root / IGNORE_FILE} what ranks need not have (one pattern a line, as in a .gitignore), or "
            "raise code.max_bytes."
        )
        return _error("code-too-large", "code.max_bytes", what, remedy, tuple(self._largest()))

    def _largest(self) -> Iterator[str]:
        """The largest top-level entries, then the largest files below them."""
        sizes: Counter[str] = Counter()
        counts: Counter[str] = Counter()
        for entry in self.entries:
            top, below, _ = entry.path.partition("/")
            name = top + below if below or entry.kind is not EntryKind.FOLDER else f"{top}/"
            sizes[name] += entry.bytes
            counts[name] += entry.kind is not EntryKind.FOLDER
        by_weight = sorted(sizes, key=lambda name: (sizes[name], counts[name]), reverse=True)
        for name in by_weight[:LARGEST_SHOWN]:
            of = f" in {counts[name]:,} files" if name.endswith("/") else ""
            yield f"{printable(name)}  {format_size(sizes[name])}{of}"
        deep = (entry for entry in self.entries if "/" in entry.path and entry.kind is EntryKind.FILE)
        for entry in sorted(deep, key=lambda entry: entry.bytes, reverse=True)[:LARGEST_SHOWN]:
            yield f"{printable(entry.path)}  {format_size(entry.bytes)}"


_SPECIAL_KINDS = {stat.S_IFIFO: "fifo", stat.S_IFSOCK: "socket", stat.S_IFBLK: "block device", stat.S_IFCHR: "device"}


def format_size(count: int) -> str:
    """`512 MiB`, `34.2 KiB`, `7 B`."""
    for power, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if count >= 1024**power:
            return f"{round(count / 1024**power, 1):g} {unit}"
    return f"{count} B"


def printable(name: str) -> str:
    """A file's name as printable text, whatever bytes it has."""
    return name.encode(errors="surrogateescape").decode(errors="backslashreplace")


def _count_of(names: list[str], noun: str) -> str:
    return f"1 {noun}" if len(names) == 1 else f"each of {len(names):,} {noun}s"


def _quoted(names: list[str]) -> tuple[str, ...]:
    more = (f"and {len(names) - MAX_QUOTED:,} more",) if len(names) > MAX_QUOTED else ()
    return (*map(printable, names[:MAX_QUOTED]), *more)


def _error(code: str, where: str, what: str, remedy: str, evidence: tuple[str, ...] = ()) -> Finding:
    return Finding(code=code, what=what, where=where, remedy=remedy, evidence=evidence)
