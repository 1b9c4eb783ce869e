"""Excepthook that prints a holdfast error as a finding with its remedy, and sets its exit code.

It prints no traceback: the user can change nothing in holdfast or torch. All other errors keep the default handling.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import TracebackType

from holdfast.errors import HoldfastError
from holdfast.findings import OWNER_TEXT, Finding, Owner


def install() -> None:
    """Install the excepthook in this process."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, HoldfastError):
            before(kind, error, trace)
            return
        # In a process group, torch buffers what a hook writes to sys.stderr, and then loses it.
        stderr = sys.__stderr__ or sys.stderr
        stderr.write("".join(f"{line}\n" for finding in error.findings for line in finding_lines(finding)))
        stderr.flush()
        raise SystemExit(error.exit_code)

    sys.excepthook = hook


def finding_lines(finding: Finding) -> Iterator[str]:
    """Format a finding as lines."""
    yield f"holdfast: {finding.severity} [{finding.code}]: {finding.what}"
    if finding.where:
        yield f"  where: {finding.where}"
    yield from (f"  evidence: {line}" for each in finding.evidence for line in each.splitlines())
    if finding.remedy:
        yield f"  what to do: {finding.remedy}"
    if finding.owner is not Owner.USER:
        yield f"  fixable by: {OWNER_TEXT[finding.owner]}"
