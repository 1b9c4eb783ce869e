"""What is wrong with a run's event log, as findings. Pure."""

from __future__ import annotations

from pathlib import Path

from holdfast.events.log import UnsupportedFormat
from holdfast.findings import Finding, Owner, Severity
from holdfast.host.files import UnexpectedFile
from holdfast.report.formatting import count

UNREADABLE = (UnsupportedFormat, LookupError, OSError)
"""What reading a log and applying its events may raise; LookupError if earlier lines are missing."""


def unreadable_log(error: UnsupportedFormat | LookupError | OSError, path: Path) -> Finding:
    """Why a log cannot be read."""
    match error:
        case LookupError():
            return incomplete_log(1, path)
        case UnsupportedFormat():
            return unsupported_format(error)
        case UnexpectedFile():
            return unexpected_file(error)
        case OSError():
            return Finding(
                code="run-file-corrupt",
                what=f"the event log cannot be read: {error.strerror}",
                where=str(path),
                evidence=(str(error),),
                remedy="See who may read it (`ls -l`), and whether its disk works.",
                owner=Owner.CLUSTER,
            )


def unsupported_format(error: UnsupportedFormat) -> Finding:
    """The log is of another version of holdfast."""
    remedy = "Use the version of holdfast that started this run, or the one after it."
    return Finding(code="log-format-unsupported", what=f"the {error}", remedy=remedy)


def unexpected_file(error: UnexpectedFile) -> Finding:
    """One of holdfast's files is something else."""
    return Finding(
        code="run-file-corrupt",
        what=f"a file of holdfast's is not what holdfast wrote there: {error.strerror}",
        where=str(error.filename),
        remedy="Look at what is there (`ls -l`), and put the file back. `holdfast cancel --force` ends a run.",
        owner=Owner.CLUSTER,
    )


def incomplete_log(corrupt_lines: int, path: Path) -> Finding:
    """Lines of a log do not match their checksums, or its beginning is gone."""
    return Finding(
        code="run-file-corrupt",
        severity=Severity.WARNING,
        what=f"{count(corrupt_lines, 'line')} of the event log cannot be read: what they say is missing here",
        where=str(path),
        remedy="The controller of a live run restores its log; of a finished run, restore the file from a backup.",
        owner=Owner.CLUSTER,
    )
