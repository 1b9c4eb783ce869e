"""Checks a job against a Slurm target: what can be told without Slurm, and what Slurm says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from holdfast.errors import HoldfastError
from holdfast.findings import Finding, Severity
from holdfast.job.run_spec import RunSpec
from holdfast.job.spec import Job
from holdfast.job.targets import TargetSpec
from holdfast.launch.secret_values import missing_secrets
from holdfast.launch.slurm import slurm_commands
from holdfast.launch.slurm.batch_script import Meeting, batch_script


def check_job(job: Job, spec: TargetSpec, *, base: Path, environ: Mapping[str, str]) -> Iterator[Finding]:
    """What can be told without asking Slurm."""
    if job.recovery.replicas > 1:
        yield Finding(
            code="not-supported",
            what="replicas form a quorum with a service that nodes of Slurm cannot reach yet",
            where="recovery.replicas",
            remedy="Use one replica here: a lost node restarts all ranks. On Kubernetes replicas continue without it.",
        )
    if job.nodes.max > 1 and not (job.checkpoint.is_remote or job.checkpoint.path or spec.checkpoint_root):
        yield Finding(
            code="checkpoint-not-shared",
            severity=Severity.WARNING,
            what="each node keeps its own part of every checkpoint, and a node that is lost takes it along",
            where="checkpoint.path",
            remedy="Name a folder of the shared file system, or a URL such as s3://bucket/run, as `checkpoint.path`.",
        )
    yield from missing_secrets(job, base, environ, spec.notify)
    for field, value in (("image", job.image), ("queue", job.queue), ("resources.shm", job.resources.shm)):
        if value is not None:
            yield Finding(
                code="not-used-on-hosts",
                severity=Severity.INFO,
                what=f"`{field}` is not used by a Slurm target",
                where=field,
                remedy="Nothing: a cluster uses it. The partition of Slurm is `slurm.partition` in the target.",
            )


def check_slurm(accepted: RunSpec) -> Iterator[Finding]:
    """Whether Slurm would accept the run; submits nothing."""
    script = batch_script(accepted, "check", Meeting(address="127.0.0.1", port="1", key="", ca=""))
    try:
        slurm_commands.test_submission(script)
    except HoldfastError as error:
        yield from error.findings
