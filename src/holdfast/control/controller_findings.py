"""Findings about the controller's own work: commands that failed, and the state of its log."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import msgspec

from holdfast.errors import HoldfastError
from holdfast.events.log_writer import Repair
from holdfast.findings import Finding, Owner, Severity
from holdfast.os_errors import resource_error_of, waiting_finding

_EVIDENCE_CHARS = 500
"""Maximum characters of the error's text."""


def command_failed(error: Exception, subject: str, *, retried: bool = True) -> Finding:
    """The finding for a failed command: `subject` names the command, `error` is the cause."""
    if isinstance(error, OSError) and resource_error_of(error) is not None and retried:
        return waiting_finding(error, subject, Path(_where(error) or "/"))
    if isinstance(error, HoldfastError) and error.findings:
        first = error.findings[0]
        return msgspec.structs.replace(first, what=f"{subject}: {first.what}", severity=Severity.WARNING)
    then = "It is tried again by itself." if retried else "It is not tried again."
    return Finding(
        code="command-failed",
        severity=Severity.WARNING,
        what=f"{subject}: {_error_text(error)}",
        where=_where(error),
        evidence=(f"{type(error).__name__}: {error}"[:_EVIDENCE_CHARS],),
        remedy=f"Fix what the evidence says; the controller's log has the traceback. {then}",
        owner=Owner.CLUSTER if isinstance(error, OSError) else Owner.HOLDFAST,
    )


def disk_space_finding(error: OSError | None, log: Path) -> Finding:
    """The finding for when the log begins to use the space reserved for it, or ceases to, without an error."""
    if error is not None:
        return waiting_finding(error, "the event log lives on space kept for it", log)
    what = "there is room for the event log again"
    return Finding(code="disk-space-recovered", what=what, severity=Severity.INFO, where=str(log))


def repair_findings(repairs: Iterable[Repair], log: str) -> tuple[Finding, ...]:
    """Findings about undone changes to the log that no controller made."""
    sizes: defaultdict[str, list[int]] = defaultdict(list)
    for repair in repairs:
        sizes[repair.what].append(repair.size_bytes)
    return tuple(
        Finding(
            code="event-log-repaired",
            severity=Severity.WARNING,
            what=f"the event log was changed by something else than this run: {what}",
            where=log,
            evidence=(f"{sum(found):,} bytes{f', {len(found)} times' if len(found) > 1 else ''}",),
            remedy="Nothing is lost. Find what writes there: another program, a script, a sync of that folder.",
            owner=Owner.CLUSTER,
        )
        for what, found in sizes.items()
    )


def _error_text(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return f"{type(error).__name__}: {error}"[:_EVIDENCE_CHARS]


def _where(error: Exception) -> str:
    return str(error.filename) if isinstance(error, OSError) and error.filename else ""
