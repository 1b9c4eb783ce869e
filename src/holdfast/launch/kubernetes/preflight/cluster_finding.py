"""The finding that a cluster lacks something."""

from __future__ import annotations

from holdfast.findings import Finding, Owner, Severity


def cluster_finding(
    code: str, where: str, what: str, remedy: str, *evidence: str, severity: Severity = Severity.ERROR
) -> Finding:
    """A finding for the cluster's administrator; `where` is a field of the target or an object."""
    return Finding(
        code=code,
        severity=severity,
        what=what,
        where=where,
        evidence=evidence,
        remedy=remedy,
        owner=Owner.CLUSTER,
    )
