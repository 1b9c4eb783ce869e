"""Owns what must hold between a job and a cluster's profile before anything is rendered; one row a rule.

Refuses to own what the cluster itself has (check.py), and whether the job is right in itself (job/rules.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from holdfast.findings import Finding, Severity
from holdfast.job.profile import Template, Workload
from holdfast.job.source import shown
from holdfast.job.spec import OBJECT_NAME_PATTERN, Job, Launch
from holdfast.launch.kubernetes.mounts import inside, refused, seen
from holdfast.launch.kubernetes.names import HOME
from holdfast.launch.kubernetes.submission import Submission

PROFILE = "profile."
"""What the place of a finding begins with that is about a field of the profile, not of the job."""

LEAST_CPU = 0.001
"""Kubernetes counts CPU in thousandths of a core."""


def possible(asked: Submission) -> tuple[Finding, ...]:
    """All that stands in the way of rendering this run (errors), and what will be otherwise (the rest)."""
    return tuple(finding for rule in RULES for finding in rule(asked))


def image(asked: Submission) -> Iterator[Finding]:
    """A pod is made of an image."""
    if asked.job.image is None:
        what = "the job names no `image`, and on a cluster every node is made of one"
        yield _error("no-image", "image", what, "Add `image: REGISTRY/NAME:TAG`, with the program and holdfast in it.")


def paths(asked: Submission) -> Iterator[Finding]:
    """What lies outside the shared volume is this machine's, or the pod's own, and gone with it."""
    path = asked.job.checkpoint.path
    if path is not None and path.startswith(("/", "~")) and not path.startswith(f"{HOME}/"):
        what = f"`checkpoint.path: {path}` is a path of a machine, and nothing there outlives a pod"
        remedy = f"Write a relative path, which starts from the shared volume at {HOME}, or a URL such as s3://."
        yield _error("path-not-shared", "checkpoint.path", what, remedy)


def volume(asked: Submission) -> Iterator[Finding]:
    """Of the volume ranks see a few folders, and whatever the job names there is in one of them."""
    job, of_claim = asked.job, asked.profile.volume
    if of_claim is None:
        return
    checkpoint = job.checkpoint
    named = [("checkpoint.path", checkpoint.path), ("checkpoint.local", checkpoint.local)]
    named += [("workdir", job.workdir)] if job.workdir.startswith("/") else []
    for where, path in (*named, *((f"{PROFILE}volume.folders", folder) for folder in of_claim.folders)):
        folder = inside(path) if path else None
        if folder is not None and (why := refused(folder)):
            yield _error("folder-refused", where, f"`{path}` cannot be given to ranks: {why}", "Name a folder in it.")
    unseen = dict.fromkeys((where, path) for where, text in _words(job) for path in _on_volume(text))
    for where, path in unseen:
        if seen(asked, path):
            continue
        only = "of which ranks see their checkpoints and the profile's folders alone"
        first = path.removeprefix(HOME).strip("/").split("/")[0]
        if not first:  # it may be the beginning of a path to what they see
            what = f"`{path}` is the shared volume, {only}"
            yield _warning("folder-not-mounted", where, what, "Write the paths of those folders.")
            continue
        remedy = f"Write `folders: [{first}]` in the profile's `volume`, if no other run's secrets lie there."
        yield _error("folder-not-mounted", where, f"`{path}` is on the shared volume, {only}", remedy)


def _words(job: Job) -> Iterator[tuple[str, str]]:
    """Whatever the job gives its program, with the field it comes from."""
    yield from (("command", word) for word in job.command)
    yield from ((f"env.{name}", value) for name, value in job.env.items())


def _on_volume(text: str) -> Iterator[str]:
    """Paths on the volume in a text, which may be a sentence or a shell's."""
    return (found.rstrip(".") for found in _ON_VOLUME.findall(text))


_ON_VOLUME = re.compile(rf"(?<![\w./}}-]){HOME}(?:/[^\s:,;'\"()|&<>`{{}}\\]*|(?![\w.-]))")


def quantities(asked: Submission) -> Iterator[Finding]:
    """Amounts that no node can give."""
    resources = asked.job.resources
    if resources.cpu is not None and resources.cpu < LEAST_CPU:
        what = f"`resources.cpu: {resources.cpu:g}` is less than {LEAST_CPU:g} of a core, the least a pod can ask for"
        yield _error("impossible-quantity", "resources.cpu", what, "Ask for more.")
    if resources.shm is not None and resources.memory is not None and resources.shm > resources.memory:
        what = f"/dev/shm of {resources.shm:,} bytes is part of the pod's {resources.memory:,} bytes of memory"
        yield _error(
            "impossible-quantity", "resources.shm", what, "Ask for more memory, or for less of it in /dev/shm."
        )


def queue(asked: Submission) -> Iterator[Finding]:
    """A queue is an object, and its name a label's value."""
    name = asked.job.queue
    if name is not None and (len(name) > 63 or not re.fullmatch(OBJECT_NAME_PATTERN, name)):
        what = f"`queue: {name}` is no name of a queue on Kubernetes"
        yield _error("bad-name", "queue", what, "Lower-case letters, digits, hyphens and dots, at most 63.")


def fabric(asked: Submission) -> Iterator[Finding]:
    """A pod needs more than a fabric's name to reach it."""
    row, access, device = asked.fabric, asked.access, asked.profile.fabric_device
    if access.per_node and not access.resource:
        yield _unnamed(f"fabric `{row.name}` needs `fabric_device.resource`: what its device plugin offers")
    if access.resource and not access.per_node:
        yield _unnamed(f"fabric `{row.name}` needs `fabric_device.per_node`: as many as its machines have")
    if access.huge_pages and asked.job.resources.cpu is None and asked.job.resources.memory is None:
        what = f"fabric `{row.name}` takes huge pages, which a pod gets that asks for CPU or memory too"
        yield _error("impossible-quantity", "resources.memory", what, "Write `resources: {memory: ...}`.")
    if access.attached and device.network is None:
        yield _unnamed(f"fabric `{row.name}` needs `fabric_device.network`: the attachment that Multus gives")
    if access.capabilities and asked.profile.user and not access.privileged:
        what = f"fabric `{row.name}` pins memory, and IPC_LOCK counts only for root"
        remedy = "See to it that containers may lock memory without limit (LimitMEMLOCK of the container runtime), or "
        yield _warning("memory-lock", "fabric.name", what, f"{remedy}write `user: 0` in the profile.")
    if access.host_network:
        what = f"fabric `{row.name}` puts pods on the machines' own network, where no NetworkPolicy guards their ports"
        yield _warning("host-network", "fabric.name", what, "Fence those machines off from everybody else.")


def whoever_starts_ranks(asked: Submission) -> Iterator[Finding]:
    """Without an agent the command is started once on a node, told its place by variables alone."""
    job, workload = asked.job, asked.workload
    if asked.profile.agent:
        if workload is Workload.MPIJOB:
            what = "an MPIJob has no place for holdfast's agents"
            remedy = "Write `workload: jobset` in the profile, where `launch: mpi` needs no ssh, or `agent: false`."
            yield _error("needs-no-agent", "launch", what, remedy)
        return
    if workload is Workload.MPIJOB and job.launch is not Launch.MPI:
        what = f"an MPIJob is started by `mpirun`, and `launch` is `{job.launch}`"
        yield _error("needs-agent", "launch", what, "Write `launch: mpi`, or another `workload` in the profile.")
    elif job.launch in (Launch.ACCELERATE, Launch.DEEPSPEED):
        what = f"`launch: {job.launch}` is given its node's place by holdfast's agent, and the profile has none"
        yield _error("needs-agent", "launch", what, "Remove `agent: false` from the profile.")
    elif job.recovery.replicas > 1:
        what = f"{job.recovery.replicas} replicas are kept apart by holdfast's agents, and the profile has none"
        yield _error("needs-agent", "recovery.replicas", what, "Remove `agent: false` from the profile.")
    elif job.launch is Launch.PER_RANK and job.local_world_size > 1:
        what = f"{job.local_world_size} ranks on each node are started by holdfast's agent, and the profile has none"
        remedy = "Write `launch: per-node` and begin the command with torchrun, or remove `agent: false`."
        yield _error("needs-agent", "launch", what, remedy)


def ssh(asked: Submission) -> Iterator[Finding]:
    """What an MPIJob asks of its image, which nobody can look into from here."""
    if asked.workload is Workload.MPIJOB and not asked.profile.agent:
        yield Finding(
            code="image-needs-ssh",
            severity=Severity.INFO,
            what="`mpirun` reaches the nodes of an MPIJob by ssh",
            where="image",
            remedy="See that the image has mpirun, openssh-client and openssh-server (/usr/sbin/sshd).",
        )


def elastic(asked: Submission) -> Iterator[Finding]:
    """A gang has one size."""
    nodes = asked.job.nodes
    if nodes.elastic:
        what = f"`nodes: {nodes.min}..{nodes.max}` asks for all {nodes.max} nodes here: a gang has one size"
        yield _warning("gang-of-one-size", "nodes", what, "Write the number of nodes it is to start with.")


def standbys(asked: Submission) -> Iterator[Finding]:
    """Pods beyond those of the gang."""
    if asked.job.standbys:
        what = "standbys are for the local back end as yet: this one makes as many pods as `nodes` says"
        yield _error("not-yet", "recovery.standby", what, "Remove it: a lost pod is made again.")


def template(asked: Submission) -> Iterator[Finding]:
    """A production run rests on four things; a demo is told which of them it lacks."""
    lacking = tuple(_lacking(asked))
    if asked.profile.template is Template.PRODUCTION:
        yield from lacking
    elif lacking:
        yield Finding(
            code="demo-template",
            severity=Severity.INFO,
            what="`template: demo` renders what a production run would be refused for",
            evidence=tuple(finding.what for finding in lacking),
            remedy="Mend these, and write `template: production` in the profile.",
        )


def own_disk(asked: Submission) -> Iterator[Finding]:
    """Without a volume or a store, what a pod has is gone with it."""
    if asked.profile.template is Template.PRODUCTION or asked.profile.volume or asked.job.checkpoint.in_store:
        return
    what = (
        "checkpoints die with their pod: the profile names no volume, so a node that is lost takes its part of every "
        "checkpoint along, and the run begins again at step 0"
    )
    remedy = "Write `volume: {claim: NAME}` in the profile, or a URL such as s3://bucket/run as `checkpoint.path`."
    yield _warning("checkpoint-not-shared", f"{PROFILE}volume", what, remedy)


def _lacking(asked: Submission) -> Iterator[Finding]:
    """What a production run would be refused for."""
    job, profile = asked.job, asked.profile
    if job.nodes.max > 1 and profile.fabric_verified is None:
        what = f"nobody has said that `{asked.fabric.name}` was seen to carry collectives on this cluster"
        remedy = (
            "Run a job with NCCL_DEBUG=INFO, have `holdfast diagnose` read its logs, and write when and how it was "
            "seen as `fabric_verified` in the profile."
        )
        yield _error("fabric-not-verified", "fabric.name", what, remedy)
    if profile.volume is None and not job.checkpoint.in_store:
        what = "checkpoints are lost with their pod: there is neither a shared volume nor a store"
        remedy = "Write `volume: {claim: NAME}` in the profile, or a URL as `checkpoint.path`."
        yield _error("checkpoint-not-shared", "checkpoint.path", what, remedy)
    if job.nodes.max > 1 and asked.queue is None:
        what = "without a queue nodes are placed one by one: two jobs may each hold half of what they need, and wait"
        yield _error("no-gang", "queue", what, "Write `queue: NAME` in the job or in the profile.")
    if "max_restarts" not in job.recovery.model_fields_set:
        what = "nobody has chosen how often this job may be restarted"
        remedy = "Write `recovery: {max_restarts: 10}` in the job."
        yield _error("no-restart-budget", "recovery.max_restarts", what, remedy)


RULES: tuple[Callable[[Submission], Iterator[Finding]], ...] = (
    image,
    paths,
    volume,
    quantities,
    queue,
    fabric,
    whoever_starts_ranks,
    ssh,
    elastic,
    standbys,
    own_disk,
    template,
)


def _unnamed(what: str) -> Finding:
    return _error("fabric-device-unnamed", f"{PROFILE}fabric_device", what, "Whoever runs the cluster knows it.")


def _error(code: str, where: str, what: str, remedy: str) -> Finding:
    return Finding(code=code, what=shown(what, 300), where=where, remedy=remedy)


def _warning(code: str, where: str, what: str, remedy: str) -> Finding:
    return Finding(code=code, severity=Severity.WARNING, what=shown(what, 300), where=where, remedy=remedy)
