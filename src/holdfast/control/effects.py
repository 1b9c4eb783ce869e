"""Findings for commands that could not be carried out; the controller itself goes on."""

from __future__ import annotations

from pathlib import Path

import msgspec

from holdfast.errors import HoldfastError
from holdfast.findings import Fault, Finding, Severity
from holdfast.shortage import holding_up, shortage_of

_EVIDENCE_CHARS = 500
"""Of an error's own words."""


def failed_effect(error: Exception, subject: str, *, retried: bool = True) -> Finding:
    """What to write down of a command that failed: `subject` says which, `error` is why."""
    if isinstance(error, OSError) and shortage_of(error) is not None and retried:
        return holding_up(error, subject, Path(_where(error) or "/"))
    if isinstance(error, HoldfastError) and error.findings:
        first = error.findings[0]
        return msgspec.structs.replace(first, what=f"{subject}: {first.what}", severity=Severity.WARNING)
    then = "It is tried again by itself." if retried else "It is not tried again."
    return Finding(
        code="command-failed",
        severity=Severity.WARNING,
        what=f"{subject}: {_in_words(error)}",
        where=_where(error),
        evidence=(f"{type(error).__name__}: {error}"[:_EVIDENCE_CHARS],),
        remedy=f"Fix what the evidence says; the controller's log has the traceback. {then}",
        fault=Fault.CLUSTER if isinstance(error, OSError) else Fault.HOLDFAST,
    )


def _in_words(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return f"{type(error).__name__}: {error}"[:_EVIDENCE_CHARS]


def _where(error: Exception) -> str:
    return str(error.filename) if isinstance(error, OSError) and error.filename else ""
