"""Detects edits to a program's files between two attempts.

It reads the files that a command names, those that a named shell script names, and the modules next to a Python script
that it imports. It does not read installed packages.
"""

from __future__ import annotations

import ast
import asyncio
import hashlib
import os
import re
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from holdfast.agent.python_command import parse_python_command
from holdfast.agent.python_script import MAX_SCRIPT_BYTES
from holdfast.agent.zygote import RankCommand
from holdfast.findings import Finding, Severity, replica_suffix
from holdfast.host.files import open_regular

MAX_FILES = 100
"""Files compared per program; each takes about 5 ms on first sight, 0.1 ms later."""

MAX_SHOWN = 8
"""Most files listed in a finding."""

_NAME = re.compile(r"[^\s\"'=;|&<>()]+\.(?:py|sh|yaml|yml|toml)(?![\w.])")
# from parts import (head,
#     norm)
_IMPORT = re.compile(r"^[ \t]*((?:import|from)[ \t]+[^\n(]*(?:\([^)]*\))?)", re.MULTILINE)
"""Import statements at the start of a line. Parsing whole files would block the agent for 20 ms on a long one."""
_INSTALLED = frozenset({"site-packages", "dist-packages"})

_Lead = tuple[Path, tuple[Path, ...]]
"""A file that may exist, and the folders in which to find the modules that it imports."""


class _File(Struct, frozen=True, kw_only=True):
    """State of a file when an attempt started."""

    attempt: int
    identity: tuple[int, int, int]
    """Inode, size and mtime; equal values mean equal content."""
    size: int
    changed_at: float
    """The inode's ctime in Unix seconds; a file copied over it may have any mtime."""
    digest: bytes
    leads_to: tuple[_Lead, ...]
    """Files that it may name or import."""


class Sources:
    """The files of one replica's program, as each attempt on this node found them."""

    def __init__(self) -> None:
        self._known: dict[Path, _File] = {}
        self._turn = asyncio.Lock()

    async def compare(self, replica: int, attempt: int, programs: Sequence[RankCommand]) -> Finding | None:
        """Record an attempt's files; return a finding on those that changed since the last attempt."""
        async with self._turn:
            found = await asyncio.to_thread(_survey, programs, attempt, self._known)
            former = {path: self._known[path] for path in found if path in self._known}
            self._known |= found
        edited = {path: file for path, file in found.items() if path in former and former[path].digest != file.digest}
        return _edited(replica, attempt, edited, former, programs[0].cwd) if edited else None


def _edited(
    replica: int, attempt: int, edited: Mapping[Path, _File], former: Mapping[Path, _File], cwd: Path
) -> Finding:
    names = {path: str(path.relative_to(cwd) if path.is_relative_to(cwd) else path) for path in edited}
    last = max(edited, key=lambda path: edited[path].changed_at)
    others = len(edited) - 1
    were = f"and {others} other file{'s' if others > 1 else ''} were" if others else "was"
    at = time.strftime("%H:%M:%S", time.localtime(edited[last].changed_at))
    since = f"attempt {max(former[path].attempt for path in edited)}{replica_suffix(replica)}"
    listed = sorted(edited, key=lambda path: -edited[path].changed_at)
    evidence = [f"{names[path]}: {_change(former[path], edited[path])}" for path in listed[:MAX_SHOWN]]
    return Finding(
        code="code-edited",
        severity=Severity.WARNING,
        what=f"{names[last]} {were} edited{', the last time' if others else ''} at {at}, after {since} started; "
        f"attempt {attempt} runs the edited file{'s' if others else ''}",
        where=str(last),
        evidence=(*evidence, *([f"and {len(listed) - MAX_SHOWN} more"] if len(listed) > MAX_SHOWN else [])),
        remedy="Nothing, if you meant it. If not, put the file back: `holdfast update` restarts the ranks with what is "
        "there. With `code: shipped` in its target a run has its own copy of the code, and only `holdfast update` "
        "changes it.",
    )


def _change(before: _File, now: _File) -> str:
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(now.changed_at))
    return f"{before.size:,} -> {now.size:,} bytes, changed at {at}"


def _survey(programs: Sequence[RankCommand], attempt: int, known: Mapping[Path, _File]) -> dict[Path, _File]:
    """The current files of these programs; unchanged files are not read again."""
    found: dict[Path, _File] = {}
    seen: set[Path] = set()
    for each in {(each.argv, each.cwd): each for each in programs}.values():
        waiting = deque(_named(each))
        while waiting and len(found) < MAX_FILES:
            path, roots = waiting.popleft()
            if path in seen:
                continue
            seen.add(path)
            file = _read_source(path, each, roots, known.get(path))
            if file is not None:
                found[path] = replace(file, attempt=attempt)
                waiting.extend(file.leads_to)
    return found


def _named(command: RankCommand) -> Iterator[_Lead]:
    """Files that a command names."""
    found = parse_python_command(command.argv)
    if isinstance(found, str):
        if "/" in command.argv[0]:
            yield _script(command, command.argv[0])
    elif found.kind == "script":
        yield _script(command, found.text)
    elif found.kind == "module":
        yield from _modules(f"{found.text}.__main__", _roots(command, command.cwd))
    else:
        yield from _imported(found.text, command.cwd, _roots(command, command.cwd))
    for word in command.argv:
        for name in dict.fromkeys((word.rpartition("=")[2], *_NAME.findall(word))):
            if _NAME.search(name):
                yield _script(command, name)


def _script(command: RankCommand, name: str) -> _Lead:
    """A named file; Python finds its imports next to it."""
    path = Path(os.path.normpath(command.cwd / name))
    return path, _roots(command, path.resolve().parent)


def _roots(command: RankCommand, first: Path) -> tuple[Path, ...]:
    """Folders in which a program's own modules are found."""
    search = [command.cwd / path for path in command.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    return (first, *(path for path in search if not _INSTALLED & {*path.parts}))


def _read_source(path: Path, command: RankCommand, roots: tuple[Path, ...], known: _File | None) -> _File | None:
    """Read a source file; None if it is missing, not a regular file, or too long for source code."""
    try:
        state = path.stat()
        identity = (state.st_ino, state.st_size, state.st_mtime_ns)
        if known is not None and known.identity == identity:
            return known
        if state.st_size > MAX_SCRIPT_BYTES:
            return None
        with open_regular(path) as file:
            content = file.read(MAX_SCRIPT_BYTES)
    except (OSError, ValueError):
        return None
    script = content.startswith(b"#!") and b"python" not in content[:100].splitlines()[0]
    if path.suffix == ".sh" or (script and path.suffix != ".py"):
        names = dict.fromkeys(_NAME.findall(content.decode(errors="replace")))
        leads_to = tuple(_script(command, name) for name in names)
    elif path.suffix in ("", ".py"):
        leads_to = tuple(dict.fromkeys(_imported(content, path.parent, roots)))
    else:
        leads_to = ()
    return _File(
        attempt=-1,
        identity=identity,
        size=state.st_size,
        changed_at=state.st_ctime,
        digest=hashlib.sha256(content).digest(),
        leads_to=leads_to,
    )


def _imported(source: bytes | str, folder: Path, roots: tuple[Path, ...]) -> Iterator[_Lead]:
    """Candidate files of the modules that a source text imports."""
    text = source if isinstance(source, str) else source.decode(errors="replace")
    for statement in dict.fromkeys(_IMPORT.findall(text.replace("\\\n", " "))):
        try:
            nodes = ast.parse(statement).body
        except (ValueError, SyntaxError):  # docstring text that looks like an import
            continue
        for node in nodes:
            yield from _led_to(node, folder, roots)


def _led_to(node: ast.stmt, folder: Path, roots: tuple[Path, ...]) -> Iterator[_Lead]:
    match node:
        case ast.Import(names=names):
            for name in names:
                yield from _modules(name.name, roots)
        case ast.ImportFrom(module=module, names=names, level=level):
            within = (folder, *folder.parents)[level - 1 : level] if level else roots
            for name in names:
                for path, _ in _modules(f"{module}.{name.name}" if module else name.name, within):
                    yield path, roots
        case _:
            pass


def _modules(name: str, roots: tuple[Path, ...]) -> Iterator[_Lead]:
    """Candidate files of a module and its parent packages."""
    for root in roots:
        path = root
        for part in name.split("."):
            yield path / f"{part}.py", roots
            path /= part
            if not path.is_dir():
                break
            yield path / "__init__.py", roots
