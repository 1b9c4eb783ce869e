"""Checks a job against hosts: what can be told without them, and what they say."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from holdfast.errors import missing_extra
from holdfast.findings import Finding, Owner, Severity
from holdfast.job.quarantine_text import avoided_finding
from holdfast.job.spec import Job
from holdfast.job.targets import TargetSpec
from holdfast.launch.hosts.host_survey import HostFacts, HostSurvey
from holdfast.launch.monarch.monarch_checks import check_monarch_on_host
from holdfast.launch.quarantine_file import QuarantineFile
from holdfast.launch.secret_values import missing_secrets


def check_job(
    job: Job, spec: TargetSpec, *, target: str, base: Path, environ: Mapping[str, str], now: float
) -> Iterator[Finding]:
    """What can be told without connecting to a host."""
    known, unreadable = QuarantineFile(target).read()
    bad = tuple(row for row in known.active(now) if row.machine in spec.hosts)
    yield from unreadable
    yield from avoided_finding(bad, len(spec.hosts), target)
    if doubled := sorted({host for host in spec.hosts if spec.hosts.count(host) > 1}):
        yield _error(
            "host-named-twice", "target: hosts", f"{', '.join(doubled)} is named twice", "Name each host once."
        )
    usable = len(spec.hosts) - len(bad)
    if usable < job.nodes.min:
        out = f", {len(bad)} of them quarantined" if bad else ""
        what = f"the job asks for {job.nodes.min} nodes, and the target has {len(spec.hosts)} hosts{out}"
        yield _error("too-few-nodes", "nodes", what, "Ask for fewer nodes, or add hosts to the target.")
    yield from check_without_cluster(job, spec, base=base, environ=environ)


def check_without_cluster(job: Job, spec: TargetSpec, *, base: Path, environ: Mapping[str, str]) -> Iterator[Finding]:
    """What holds for a job on any machines that are connected to a controller elsewhere, without a cluster."""
    if job.nodes.max > 1 and not (job.checkpoint.is_remote or job.checkpoint.path or spec.checkpoint_root):
        yield Finding(
            code="checkpoint-not-shared",
            severity=Severity.WARNING,
            what="each node keeps its own part of every checkpoint, and a node that is lost takes it along",
            where="checkpoint.path",
            remedy="Name a folder that all nodes share, or a URL such as s3://bucket/run, as `checkpoint.path`.",
        )
    if job.recovery.replicas > 1 and (lacking := missing_extra("ft", "grpc", "replicas need")):
        yield lacking
    yield from missing_secrets(job, base, environ, spec.notify)
    for field, value in (("image", job.image), ("queue", job.queue), ("resources.shm", job.resources.shm)):
        if value is not None:
            yield Finding(
                code="not-used-on-hosts",
                severity=Severity.INFO,
                what=f"`{field}` is not used by a target with `kind: {spec.kind}`",
                where=field,
                remedy="Nothing: a Kubernetes cluster uses it.",
            )


def check_survey(job: Job, found: HostSurvey) -> Iterator[Finding]:
    """What the hosts say."""
    for host, what, remedy in found.unusable:
        yield Finding(
            code="host-unusable",
            what=f"{host} cannot take part: {what}",
            where=host,
            remedy=remedy,
            owner=Owner.CLUSTER,
        )
    for source, goal, error in found.unreachable:
        what = f"{source} cannot connect to {goal}, as its ranks would"
        remedy = "Open the ports between the hosts, or name the address by which they reach it in `ssh.addresses`."
        yield Finding(
            code="hosts-not-connected", what=what, where=goal, evidence=(error,), remedy=remedy, owner=Owner.CLUSTER
        )
    for host in found.facts:
        yield from _check_host(job, host)
    same = dict[tuple[str, str], str]()
    for host in found.facts:
        if (other := same.setdefault((host.hostname, host.address), host.host)) != host.host:
            what = f"{host.host} and {other} are the same machine: {host.hostname} at {host.address}"
            yield _error("host-named-twice", "target: hosts", what, "Name each host once.")


def _check_host(job: Job, host: HostFacts) -> Iterator[Finding]:
    if host.gpus < job.gpus_per_node:
        what = f"{host.host} has {host.gpus} GPUs, and a node needs {job.gpus_per_node}"
        yield Finding(
            code="too-few-gpus",
            severity=Severity.WARNING,
            what=what,
            where=host.host,
            evidence=("NVIDIA devices under /dev",),
            remedy="Ask for fewer, or leave the host out: no node is placed there.",
            owner=Owner.CLUSTER,
        )
    if job.resources.memory and host.memory_bytes < job.resources.memory:
        what = f"{host.host} has {host.memory_bytes:,} bytes of memory, and a node needs {job.resources.memory:,}"
        yield _error("too-little-memory", "resources.memory", what, "Ask for less memory.")
    program = job.command[0]
    if "/" not in program and program not in host.programs:
        what = f"{host.host} has no program `{program}`"
        remedy = "Set `ssh.python` in the target to the Python of the job's environment, or install it there."
        yield _error("missing-program", "command", what, remedy, (host.host,))
    yield from check_monarch_on_host(job, host.host, host.monarch)
    if host.holder:
        yield Finding(
            code="host-in-use",
            severity=Severity.WARNING,
            what=f"{host.host}: {host.holder}",
            where=host.host,
            remedy="A run that needs this host waits until it is free.",
            owner=Owner.CLUSTER,
        )


def _error(code: str, where: str, what: str, remedy: str, evidence: tuple[str, ...] = ()) -> Finding:
    return Finding(code=code, what=what, where=where, remedy=remedy, evidence=evidence)
