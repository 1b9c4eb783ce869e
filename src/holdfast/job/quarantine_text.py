"""The findings about quarantined machines."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from datetime import UTC, datetime

from holdfast.findings import Finding, Owner, Severity
from holdfast.job.quarantine import (
    SAME_CODE_MACHINES,
    SAME_CODE_WINDOW_S,
    Candidate,
    Decision,
    QuarantineOutcome,
    QuarantineRow,
)
from holdfast.job.target_files import LOCAL

MAX_NAMED = 5
"""Machines that one finding describes."""


def utc(at: float) -> str:
    """A time for users, to the minute."""
    try:
        return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M UTC")
    except (OverflowError, ValueError, OSError):  # from a file that somebody wrote
        return "released"


def release_command(machine: str, target: str) -> str:
    """The command that ends a quarantine."""
    on = "" if target == LOCAL else f" --on {shlex.quote(target)}"
    return f"holdfast nodes --release {shlex.quote(machine)}{on}"


def describe(row: QuarantineRow) -> str:
    """One clause: the machine, why and until when."""
    again = f", quarantine {row.times} in a row" if row.times > 1 else ""
    return f"{row.machine}: {row.code}, found by {row.run}; until {utc(row.until)}{again}"


def cordoned(machine: str, target: str) -> Finding:
    """The cluster places nothing more on a machine, for this run's sake."""
    return Finding(
        code="machine-cordoned",
        severity=Severity.WARNING,
        what=f"the cluster places no further job on {machine}, because a device failed there",
        where=machine,
        remedy=f"Have it repaired, then `{release_command(machine, target)}`, which ends this too.",
        owner=Owner.CLUSTER,
    )


def not_cordoned(machine: str, refusal: tuple[str, ...], remedy: str) -> Finding:
    """The cluster does not let this run cordon a machine; the remedy tells who may."""
    return Finding(
        code="machine-not-cordoned",
        severity=Severity.WARNING,
        what=f"this run avoids the machine {machine}, and other jobs do not",
        where=machine,
        evidence=refusal,
        remedy=remedy,
        owner=Owner.CLUSTER,
    )


def decision_finding(decision: Decision, candidate: Candidate, target: str) -> Finding | None:
    """What the user must know of a decision; None if it changes nothing for later runs."""
    machine, row = candidate.machine, decision.accepted
    match decision.outcome:
        case QuarantineOutcome.QUARANTINED if row is not None:
            return Finding(
                code="machine-quarantined",
                severity=Severity.WARNING,
                what=f"later runs on {target} avoid {machine} until {utc(row.until)}",
                where=machine,
                evidence=(describe(row), *row.evidence),
                remedy=f"Have it repaired, then `{release_command(machine, target)}`.",
                owner=Owner.CLUSTER,
            )
        case QuarantineOutcome.FULL:
            return Finding(
                code="quarantine-full",
                severity=Severity.WARNING,
                what=f"{machine} is not quarantined: {decision.limit} of {target}'s machines are, and no more may be",
                where=machine,
                evidence=tuple(map(describe, _newest(decision))),
                remedy=f"`holdfast nodes --on {target}` lists them. Repair and release some, or find what they share.",
                owner=Owner.CLUSTER,
            )
        case QuarantineOutcome.DOUBTFUL:
            minutes = SAME_CODE_WINDOW_S / 60
            return Finding(
                code="quarantine-doubtful",
                severity=Severity.WARNING,
                what=f"{machine} is not quarantined: its job had the same on {SAME_CODE_MACHINES} others within "
                f"{minutes:.0f} min, so the program or the check may be at fault",
                where=machine,
                evidence=(f"{candidate.code}: {candidate.evidence.finding.what}",),
                remedy="Look at what these machines share. If only the job does, release them: "
                f"`{release_command('MACHINE', target)}`.",
                owner=Owner.USER,
            )
        case _:
            return None


def avoided_finding(rows: Sequence[QuarantineRow], machines: int | None, target: str) -> tuple[Finding, ...]:
    """What a new run avoids; nothing without quarantined machines. `machines` is how many there are, if known."""
    if not rows:
        return ()
    one = len(rows) == 1
    count = f"{len(rows)} of {machines} machines" if machines else f"{len(rows)} machine{'s' * (not one)}"
    return (
        Finding(
            code="machines-quarantined",
            severity=Severity.INFO,
            what=f"{count} of {target} {'is' if one else 'are'} quarantined: runs avoid {'it' if one else 'them'}",
            where=", ".join(row.machine for row in rows[:MAX_NAMED]),
            evidence=tuple(map(describe, rows[:MAX_NAMED])),
            remedy=f"`{release_command(rows[0].machine, target)}` once a machine is repaired.",
            owner=Owner.CLUSTER,
        ),
    )


def _newest(decision: Decision) -> Sequence[QuarantineRow]:
    rows = sorted(decision.quarantine.rows, key=lambda row: -row.since)
    return [row for row in rows if not row.released_at][:MAX_NAMED]
