"""Checks whether a job's orchestrator can be used on its target, before anything starts."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

from holdfast.errors import missing_extra
from holdfast.findings import Finding, Severity
from holdfast.job.spec import Job, Orchestrator
from holdfast.job.target_files import LOCAL
from holdfast.job.targets import TargetSpec

KINDS = (LOCAL, "hosts", "slurm")
"""The targets where Monarch places agents."""

SUPPORTED = "0.7"
"""The versions of Monarch that monarch_adapter.py is tested with; pyproject.toml has the same bounds."""


def check_orchestrator(job: Job, spec: TargetSpec) -> Iterator[Finding]:
    """What prevents that Monarch places a job's agents, and what the user must know of it."""
    if job.orchestrator is not Orchestrator.MONARCH:
        return
    if spec.kind not in KINDS:
        yield Finding(
            code="not-supported",
            what=f"Monarch cannot place agents on a target with `kind: {spec.kind}`, where each node is a pod",
            where="orchestrator",
            remedy="Leave `orchestrator` out, which works on every target, or use a target of another kind.",
        )
    elif spec.ssh.shared_connection:
        yield Finding(
            code="not-supported",
            what="Monarch cannot place agents on hosts with a shared connection, which would keep its ports",
            where="orchestrator",
            remedy="Leave out `orchestrator` in the job or `ssh.shared_connection` in the target.",
        )
    elif lacking := missing_extra("monarch", "monarch", "`orchestrator: monarch` needs"):
        yield lacking
    elif (found := _installed()) and not _is_supported(found):
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
            what="Monarch's sockets have no authentication: other users of a machine may be able to run code as you",
            where="orchestrator",
            remedy="Leave `orchestrator` out on machines that you share with users whom you do not trust.",
        )


def check_monarch_on_host(job: Job, host: str, found: str) -> Iterator[Finding]:
    """What is wrong with the version of Monarch on a host, which is empty if there is none."""
    if job.orchestrator is Orchestrator.MONARCH and not _is_supported(found):
        yield Finding(
            code="missing-extra",
            what=f"{host} has no torchmonarch {SUPPORTED}, which `orchestrator: monarch` needs",
            where=host,
            evidence=(f"installed in the environment of `ssh.python`: {found or 'none'}",),
            remedy=f"Run `pip install 'torchmonarch=={SUPPORTED}.*'` there, with that Python.",
        )


def _is_supported(found: str) -> bool:
    return f"{found}.".startswith(f"{SUPPORTED}.")


def _installed() -> str:
    try:
        return version("torchmonarch")
    except PackageNotFoundError:
        return ""
