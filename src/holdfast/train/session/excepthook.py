"""Owns the last words of a program that an error of holdfast's own ends: what is wrong, what to do, and its exit code.

Not a traceback through holdfast and torch, of which the reader can change nothing. Refuses to own all other errors:
they end as they always did.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import TracebackType

from holdfast.errors import HoldfastError
from holdfast.findings import OWNER_TEXT, Finding, Owner


def install() -> None:
    """Have the process end so from here on."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, HoldfastError):
            before(kind, error, trace)
            return
        # Torch, in a process group, keeps what a hook writes to sys.stderr for later, and then loses it.
        stderr = sys.__stderr__ or sys.stderr
        stderr.write("".join(f"{line}\n" for finding in error.findings for line in finding_lines(finding)))
        stderr.flush()
        raise SystemExit(error.exit_code)

    sys.excepthook = hook


def finding_lines(finding: Finding) -> Iterator[str]:
    """A finding in lines."""
    yield f"holdfast: {finding.severity} [{finding.code}]: {finding.what}"
    if finding.where:
        yield f"  where: {finding.where}"
    yield from (f"  evidence: {line}" for each in finding.evidence for line in each.splitlines())
    if finding.remedy:
        yield f"  what to do: {finding.remedy}"
    if finding.owner is not Owner.USER:
        yield f"  fixable by: {OWNER_TEXT[finding.owner]}"
