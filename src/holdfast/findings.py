"""Findings: the one format in which validation, preflight, monitoring and diagnosis report.

A finding states a fact with its evidence and the next action; control/policy.py makes decisions.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Severity(StrEnum):
    """How much a finding matters: an error stops the command, a warning does not, info only informs."""

    ERROR = "error"
    WARNING = "warning"
    INFO = "info"


class Owner(StrEnum):
    """Who can fix it."""

    USER = "user"
    CLUSTER = "cluster"
    PEER = "peer"
    HOLDFAST = "holdfast"


OWNER_TEXT: dict[Owner, str] = {
    Owner.USER: "the job or its program",
    Owner.CLUSTER: "the machines or the cluster",
    Owner.PEER: "the program at the other end",
    Owner.HOLDFAST: "holdfast",
}
"""Descriptions for users."""


class Finding(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One fact for the user: a stable code, what, where, the evidence, what to do next, and who can fix it."""

    code: str
    what: str
    severity: Severity = Severity.ERROR
    where: str = ""
    """`file:line`, `rank 3 on node1`, a job field such as `recovery.replicas`; empty if it has no location."""
    evidence: tuple[str, ...] = ()
    """Lines or figures, quoted unmodified."""
    remedy: str = ""
    """What to do next, as a command or an edit if there is one."""
    owner: Owner = Owner.USER


def replica_suffix(replica: int) -> str:
    """Suffix of a rank or attempt number for all replicas but the first: each replica counts from 0."""
    return f" of replica {replica}" if replica else ""


class CheckOutcome(StrEnum):
    """How a check of a node ended; one that could not look has not passed."""

    PASSED = "passed"
    FAILED = "failed"
    NOT_LOOKED_AT = "not-looked-at"


class CheckResult(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One check of one node; it has failed if a finding is an error."""

    check: str
    """Its name, such as `gpu-health`."""
    outcome: CheckOutcome = CheckOutcome.PASSED
    reason: str = ""
    """Why it could not look."""
    findings: tuple[Finding, ...] = ()
