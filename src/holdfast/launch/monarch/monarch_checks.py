"""Checks whether a job's orchestrator can be used on its target, before anything starts."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

from holdfast.errors import missing_extra
from holdfast.findings import Finding, Severity
from holdfast.job.spec import Job, Orchestrator
from holdfast.job.target_files import LOCAL
from holdfast.job.targets import TargetSpec

SUPPORTED = "0.7"
"""The versions of Monarch that monarch_adapter.py is tested with; pyproject.toml has the same bounds."""


def check_orchestrator(job: Job, spec: TargetSpec) -> Iterator[Finding]:
    """What prevents that Monarch places a job's agents, and what the user must know of it."""
    if job.orchestrator is not Orchestrator.MONARCH:
        return
    if spec.kind != LOCAL:
        yield Finding(
            code="not-supported",
            what=f"Monarch cannot place agents on a target with `kind: {spec.kind}` yet",
            where="orchestrator",
            remedy="Leave `orchestrator` out, which works on every target, or use a local target.",
        )
    elif lacking := missing_extra("monarch", "monarch", "`orchestrator: monarch` needs"):
        yield lacking
    elif (found := _installed()) and not f"{found}.".startswith(f"{SUPPORTED}."):
        yield Finding(
            code="not-supported",
            what=f"torchmonarch {found} is installed, and holdfast works with {SUPPORTED}",
            where="orchestrator",
            remedy=f"Run `pip install 'torchmonarch=={SUPPORTED}.*'`, or leave `orchestrator` out.",
        )
    else:
        yield Finding(
            code="orchestrator-not-authenticated",
            severity=Severity.WARNING,
            what="Monarch's sockets have no authentication: other users of this machine may be able to run code as you",
            where="orchestrator",
            remedy="Leave `orchestrator` out on a machine that you share with users whom you do not trust.",
        )


def _installed() -> str:
    try:
        return version("torchmonarch")
    except PackageNotFoundError:
        return ""
