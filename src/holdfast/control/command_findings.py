"""Findings for commands that failed; the controller itself continues."""

from __future__ import annotations

from pathlib import Path

import msgspec

from holdfast.errors import HoldfastError
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


def _error_text(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return f"{type(error).__name__}: {error}"[:_EVIDENCE_CHARS]


def _where(error: Exception) -> str:
    return str(error.filename) if isinstance(error, OSError) and error.filename else ""
