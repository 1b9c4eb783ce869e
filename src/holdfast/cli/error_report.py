"""Turns a command's error into findings on standard error and an exit code, without a traceback."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import sys
import time
import traceback
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import typer

from holdfast import __version__
from holdfast.cli.streams import discard_output, output_failure, output_lost_finding
from holdfast.errors import ExitCode, HoldfastError
from holdfast.events.log import UnsupportedFormat
from holdfast.findings import Finding, Owner
from holdfast.host.files import UnexpectedFile
from holdfast.os_errors import room_in
from holdfast.report.log_problems import unexpected_file, unsupported_format
from holdfast.run_dir import runs_root

# The parser's messages, which are pydantic's -> plain English.
_PLAIN_WORDS = (
    (re.compile(r"Input should be a valid integer.*"), "it must be a whole number"),
    (re.compile(r"Input should be greater than or equal to (\S+)"), r"it must be at least \1"),
    (re.compile(r"Value error, ('.*') is not one of (.*)"), r"\1 is none of \2"),
)
_PERMISSION_ERRNOS = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT)


def report_error(error: Exception, words: Sequence[str]) -> int:
    """Print the findings of a failed command line; returns the exit code."""
    lost = output_failure() if isinstance(error, OSError) else None
    if lost is not None:
        findings, code = output_lost_finding(lost, words)
        discard_output()
    else:
        findings, code = _findings_of(error)
    with contextlib.suppress(OSError):  # without standard error, only the exit code remains
        if wants_json(words):
            from holdfast.cli.output import to_json

            sys.stderr.write(f"{to_json({'findings': findings, 'exit_code': int(code)})}\n")
        elif findings:
            from holdfast.cli.finding_text import render_findings
            from holdfast.cli.output import console

            console(stderr=True).print(render_findings(findings))
    return code


def wants_json(words: Sequence[str]) -> bool:
    """Whether a command line requests JSON; a guess if it could not be parsed."""
    end = next((at for at, word in enumerate(words) if word == "--" or word.endswith(".py")), len(words))
    own = list(words[:end])
    joined = {"-ojson", "-o=json", "--output=json"}
    return any(word in joined for word in own) or any(
        flag in ("-o", "--output") and value == "json" for flag, value in pairwise(own)
    )


def _findings_of(error: Exception) -> tuple[tuple[Finding, ...], ExitCode]:
    match error:
        case HoldfastError():
            return error.findings, error.exit_code
        case typer.Abort():
            return (), ExitCode.CANCELLED
        case typer.TyperException():
            return (_usage(error),), ExitCode.USAGE
        case UnsupportedFormat():
            return (unsupported_format(error),), ExitCode.UNAVAILABLE
        case UnexpectedFile():
            return (unexpected_file(error),), ExitCode.STORAGE_FAILED
        case OSError(errno=number, filename=name) if number in _PERMISSION_ERRNOS and name:
            what = f"the operating system refused: {error.strerror}"
            remedy = "See who may use it (`ls -ld`), and whether its disk has room and can be written (`df`)."
            refused = Finding(
                code="os-error",
                what=what,
                where=str(name),
                evidence=room_in(str(error), Path(), Path()),
                remedy=remedy,
                owner=Owner.CLUSTER,
            )
            return (refused,), ExitCode.CANNOT_RUN_HERE
        case _:
            return (_internal(error),), ExitCode.INTERNAL


def _usage(error: typer.TyperException) -> Finding:
    context = getattr(error, "ctx", None)
    path = context.command_path if context else "holdfast"
    what = error.format_message().rstrip(".")
    for words, plain in _PLAIN_WORDS:
        what = words.sub(plain, what)
    return Finding(code="bad-usage", what=what, remedy=f"See `{path} --help`.")


def _internal(error: Exception) -> Finding:
    details = _write_details(error)
    return Finding(
        code="internal",
        what=f"a fault of holdfast's own: {type(error).__name__}: {error}",
        where=details,
        remedy="Please report it, with that file." if details else "Please report it.",
        owner=Owner.HOLDFAST,
    )


def _write_details(error: Exception) -> str:
    """Write the traceback to a file that only the user can read; returns its path, or "" if that fails."""
    folder = runs_root().parent / "faults"
    path = folder / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.txt"
    text = f"holdfast {__version__}, Python {sys.version}\n\n{''.join(traceback.format_exception(error))}"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            file.write(text)
    except OSError:
        return ""
    return str(path)
