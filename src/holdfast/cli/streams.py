"""Standard streams that are closed, full or gone: opened where they are missing, and recognized when they fail."""

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
"""Verbs that show a run, which their own end leaves alone."""


class _Output(io.FileIO):
    """Standard output that remembers why it could not be written."""

    failure: OSError | None = None

    def write(self, data: ReadableBuffer, /) -> int | None:
        try:
            return super().write(data)
        except OSError as error:
            self.failure = error
            raise


def prepare() -> None:
    """Make the standard streams fit to be written to, whatever the caller did with them.

    What the caller closed is opened, so that no file or socket gets its number: to write to such an output fails, as it
    does for any program, and such a standard error swallows what it gets.
    """
    for number, flags in enumerate((os.O_RDONLY, os.O_RDONLY, os.O_WRONLY)):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, flags)  # the lowest free number, which is this one
    sys.stdin = sys.stdin or io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)))
    sys.stderr = sys.stderr or _text(io.FileIO(2, "w", closefd=False))
    if sys.stdout is sys.__stdout__:  # nobody has put something else in its place
        sys.stdout = _text(_Output(1, "w", closefd=False))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _text(raw: io.FileIO) -> io.TextIOWrapper:
    encoding = sys.__stdout__.encoding if sys.__stdout__ else "utf-8"
    return io.TextIOWrapper(io.BufferedWriter(raw), encoding=encoding, line_buffering=raw.isatty())


def output_failure() -> OSError | None:
    """Why standard output does not take what was written to it; None where it has taken everything."""
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    if not isinstance(raw, _Output):
        return None
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    return raw.failure


def discard_output() -> None:
    """Have the interpreter find nothing wrong with standard output when it ends."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)


def output_lost_finding(error: OSError, words: Sequence[str]) -> tuple[tuple[Finding, ...], ExitCode]:
    """What to say of an output that failed while these words were carried out.

    Whoever closes a pipe has read enough (`holdfast logs | head`): only what goes on without a reader is said.
    """
    watches = words[:1] and words[0] in _FOLLOWING_COMMANDS
    if error.errno == errno.EPIPE and not watches:
        return (), ExitCode.OUTPUT_LOST
    gone = error.errno in _GONE
    remedy = "Write it somewhere else." if gone else "Make room there (`df`), or write it somewhere else."
    if watches:
        remedy += " The run goes on if it had started: `holdfast ps`, `holdfast attach`."
    finding = Finding(
        code="output-lost",
        what=f"what `holdfast` has to say cannot be written: {error.strerror}",
        where="standard output",
        evidence=(str(error),),
        remedy=remedy,
        owner=Owner.USER if gone else Owner.CLUSTER,
    )
    return (finding,), ExitCode.OUTPUT_LOST
