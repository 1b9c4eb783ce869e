"""Owns the one vocabulary in which validation, preflight, run-time watching and diagnosis speak.

A finding states a fact with its evidence and what to do next; it never decides anything (control/policy.py does).
"""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Severity(StrEnum):
    """How much a finding matters: an error stops what was asked, a warning does not, info only tells."""

    ERROR = "error"
    WARNING = "warning"
    INFO = "info"


class Owner(StrEnum):
    """Who can mend it."""

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
"""In words."""


class Finding(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One thing somebody should know: a stable code, what, where, the evidence, what to do next, and whose fault."""

    code: str
    what: str
    severity: Severity = Severity.ERROR
    where: str = ""
    """`file:line`, `rank 3 on node1`, a job field such as `recovery.replicas`; empty when it has no place."""
    evidence: tuple[str, ...] = ()
    """Lines or figures, quoted as they are."""
    remedy: str = ""
    """What to do next, as a command or an edit where there is one."""
    owner: Owner = Owner.USER


def replica_suffix(replica: int) -> str:
    """What follows a rank's number, or an attempt's, of all replicas but the first: each counts its own from 0."""
    return f" of replica {replica}" if replica else ""
