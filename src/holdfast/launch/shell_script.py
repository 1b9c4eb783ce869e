"""Detects a shell script that would start a launcher once per rank."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path, PurePath

from holdfast.findings import Finding
from holdfast.host.files import open_regular
from holdfast.job.launcher_catalog import find_launcher
from holdfast.job.rules import launcher_for_every_rank, launcher_per_rank
from holdfast.job.spec import Job, Launch
from holdfast.job.yaml_source import printable

MAX_BYTES = 64 * 1024
"""Start scripts are a page or two; of a longer one only this much is read."""

_SHELLS = frozenset({"bash", "dash", "ksh", "sh", "zsh"})
_PREFIXES = frozenset({"env", "exec", "nohup", "time"})
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
_SHEBANG = re.compile(rf"#!.*\b(?:{'|'.join(sorted(_SHELLS))})\b")


def launcher_in_script(job: Job, base: Path) -> Iterator[Finding]:
    """Refuse a script whose line starts a launcher, for a job in which holdfast starts each rank.

    `base` is the folder that the job's relative paths start from. Shell variables are not expanded.
    """
    if job.launch is not Launch.PER_RANK or job.world_size == 1 or any(launcher_for_every_rank(job)):
        return
    name, text = _script(job, base / job.workdir)
    for number, line in enumerate(text.replace("\\\n", "  ").splitlines(), 1):
        found = find_launcher(words) if (words := _command(line)) else None
        if found is not None:
            where = f"{name or 'command'}:{number}"
            yield launcher_per_rank(found.launcher, where=where, evidence=(printable(line.strip(), 200),))
            return


def _script(job: Job, workdir: Path) -> tuple[str, str]:
    """The script that the command runs, by name and text; no name for the text after `sh -c`."""
    program, *rest = job.command
    if PurePath(program).name not in _SHELLS:
        text = _read(workdir / program) if "/" in program else ""
        return program, text if _SHEBANG.match(text) else ""
    for at, word in enumerate(rest):
        if re.fullmatch(r"-[a-z]*c", word):
            return "", "".join(rest[at + 1 : at + 2])
        if not word.startswith("-"):
            return word, _read(workdir / word)
    return "", ""


def _read(path: Path) -> str:
    """The beginning of a regular file; empty for anything else."""
    try:
        with open_regular(path) as file:
            return file.read(MAX_BYTES).decode(errors="replace")
    except (OSError, ValueError):
        return ""


def _command(line: str) -> tuple[str, ...]:
    """The words of a line's command, without assignments and prefixes such as `exec`; empty if there is none."""
    try:
        words = shlex.split(line, comments=True)
    except ValueError:
        return ()
    while words and (words[0] in _PREFIXES or _ASSIGNMENT.match(words[0])):
        words = words[1:]
    return tuple(words)
