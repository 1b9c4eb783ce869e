"""Handles standard streams that are closed, full or broken."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from holdfast.errors import ExitCode
from holdfast.findings import Finding, Owner

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_GONE = (errno.EPIPE, errno.EBADF, errno.EIO)
_FOLLOWING_COMMANDS = ("run", "attach")
"""Commands that follow a run; it continues after they end."""


class _Output(io.FileIO):
    """Standard output that keeps its last write error."""

    failure: OSError | None = None

    def write(self, data: ReadableBuffer, /) -> int | None:
        try:
            return super().write(data)
        except OSError as error:
            self.failure = error
            raise


def prepare() -> None:
    """Open the standard streams that the caller closed, so that no file or socket gets their number.

    Writes to such a standard output fail, as in any program; such a standard error discards its input.
    """
    for number, flags in enumerate((os.O_RDONLY, os.O_RDONLY, os.O_WRONLY)):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, flags)  # the lowest free number, which is this one
    sys.stdin = sys.stdin or io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)))
    sys.stderr = sys.stderr or _text(io.FileIO(2, "w", closefd=False))
    if sys.stdout is sys.__stdout__:  # not replaced by the caller
        sys.stdout = _text(_Output(1, "w", closefd=False))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _text(raw: io.FileIO) -> io.TextIOWrapper:
    encoding = sys.__stdout__.encoding if sys.__stdout__ else "utf-8"
    return io.TextIOWrapper(io.BufferedWriter(raw), encoding=encoding, line_buffering=raw.isatty())


def output_failure() -> OSError | None:
    """The error of standard output; None if everything was written."""
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    if not isinstance(raw, _Output):
        return None
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    return raw.failure


def discard_output() -> None:
    """Keep the interpreter from reporting standard output as broken at exit."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)


def output_lost_finding(error: OSError, words: Sequence[str]) -> tuple[tuple[Finding, ...], ExitCode]:
    """The finding and exit code for a command line whose output failed.

    A reader that closes a pipe has read enough (`holdfast logs | head`): that is reported only if a run continues.
    """
    watches = words[:1] and words[0] in _FOLLOWING_COMMANDS
    if error.errno == errno.EPIPE and not watches:
        return (), ExitCode.OUTPUT_LOST
    gone = error.errno in _GONE
    remedy = "Write it somewhere else." if gone else "Make room there (`df`), or write it somewhere else."
    if watches:
        remedy += " If the run has started, it continues: `holdfast ps`, `holdfast attach`."
    finding = Finding(
        code="output-lost",
        what=f"the output of `holdfast` cannot be written: {error.strerror}",
        where="standard output",
        evidence=(str(error),),
        remedy=remedy,
        owner=Owner.USER if gone else Owner.CLUSTER,
    )
    return (finding,), ExitCode.OUTPUT_LOST
