"""Checks a job against a Kubernetes target before rendering, with one function per rule.

Rules on the cluster itself are in cluster_checks.py, rules on the job alone in job/rules.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from holdfast.findings import Finding, Severity
from holdfast.job.spec import OBJECT_NAME_PATTERN, CheckLevel, Job, Launch
from holdfast.job.targets import GangScheduler, ManifestTemplate, Workload
from holdfast.job.yaml_source import printable
from holdfast.launch.kubernetes.manifests.render_context import RenderContext
from holdfast.launch.kubernetes.manifests.volume_mounts import is_visible, refusal_reason, relative_to_volume
from holdfast.launch.kubernetes.object_names import VOLUME_ROOT
from holdfast.launch.kubernetes.preflight import gpu_sharing, pod_checks, pod_patch_checks
from holdfast.launch.kubernetes.preflight.pod_checks import TARGET_PREFIX
from holdfast.launch.kubernetes.workload_catalog import CATALOG

MIN_CPU = 0.001
"""The smallest CPU amount in Kubernetes: a thousandth of a core."""


def check_job_on_cluster(ctx: RenderContext) -> tuple[Finding, ...]:
    """Errors that prevent rendering this run, and notices of what will differ from the job file."""
    return tuple(finding for rule in CHECKS for finding in rule(ctx))


def image(ctx: RenderContext) -> Iterator[Finding]:
    """Every pod needs an image."""
    if ctx.job.image is None:
        what = "the job names no `image`, and on a cluster every node is made of one"
        yield _error("no-image", "image", what, "Add `image: REGISTRY/NAME:TAG`, with the program and holdfast in it.")


def paths(ctx: RenderContext) -> Iterator[Finding]:
    """Paths outside the shared volume are on a machine or in a pod, and are lost with it."""
    path = ctx.job.checkpoint.path
    if path is not None and path.startswith(("/", "~")) and not path.startswith(f"{VOLUME_ROOT}/"):
        what = f"`checkpoint.path: {path}` is a path of a machine, and nothing there outlives a pod"
        remedy = f"Write a relative path, which starts from the shared volume at {VOLUME_ROOT}, or a URL such as s3://."
        yield _error("path-not-shared", "checkpoint.path", what, remedy)


def volume(ctx: RenderContext) -> Iterator[Finding]:
    """Ranks see only some folders of the volume; all paths in the job must be in one of these."""
    job, of_claim = ctx.job, ctx.target.volume
    if of_claim is None:
        return
    checkpoint = job.checkpoint
    named = [("checkpoint.path", checkpoint.path), ("checkpoint.local", checkpoint.local)]
    named += [("workdir", job.workdir)] if job.workdir.startswith("/") else []
    for where, path in (*named, *((f"{TARGET_PREFIX}volume.folders", folder) for folder in of_claim.folders)):
        folder = relative_to_volume(path) if path else None
        if folder is not None and (why := refusal_reason(folder)):
            yield _error("folder-refused", where, f"`{path}` cannot be given to ranks: {why}", "Name a folder in it.")
    unseen = dict.fromkeys((where, path) for where, text in _program_inputs(job) for path in _on_volume(text))
    for where, path in unseen:
        if is_visible(ctx, path):
            continue
        only = "of which ranks see their checkpoints and the target's folders alone"
        first = path.removeprefix(VOLUME_ROOT).strip("/").split("/")[0]
        if not first:  # it may be the prefix of a visible path
            what = f"`{path}` is the shared volume, {only}"
            yield _warning("folder-not-mounted", where, what, "Write the paths of those folders.")
            continue
        remedy = f"Write `folders: [{first}]` in the target's `volume`, if no other run's secrets lie there."
        yield _error("folder-not-mounted", where, f"`{path}` is on the shared volume, {only}", remedy)


def _program_inputs(job: Job) -> Iterator[tuple[str, str]]:
    """All text that the job passes to its program, with its field."""
    yield from (("command", word) for word in job.command)
    yield from ((f"env.{name}", value) for name, value in job.env.items())


def _on_volume(text: str) -> Iterator[str]:
    """Paths on the volume in a text, such as a sentence or a shell command."""
    return (found.rstrip(".") for found in _ON_VOLUME.findall(text))


_ON_VOLUME = re.compile(rf"(?<![\w./}}-]){VOLUME_ROOT}(?:/[^\s:,;'\"()|&<>`{{}}\\]*|(?![\w.-]))")


def quantities(ctx: RenderContext) -> Iterator[Finding]:
    """Resource amounts must be possible."""
    resources = ctx.job.resources
    if resources.cpu is not None and resources.cpu < MIN_CPU:
        what = f"`resources.cpu: {resources.cpu:g}` is less than {MIN_CPU:g} of a core, the least a pod can ask for"
        yield _error("impossible-quantity", "resources.cpu", what, "Ask for more.")
    if resources.shm is not None and resources.memory is not None and resources.shm > resources.memory:
        what = f"/dev/shm of {resources.shm:,} bytes is part of the pod's {resources.memory:,} bytes of memory"
        yield _error(
            "impossible-quantity", "resources.shm", what, "Ask for more memory, or for less of it in /dev/shm."
        )


def queue(ctx: RenderContext) -> Iterator[Finding]:
    """A queue's name must be a valid object name and label value."""
    name = ctx.job.queue
    if name is not None and (len(name) > 63 or not re.fullmatch(OBJECT_NAME_PATTERN, name)):
        what = f"`queue: {name}` is no name of a queue on Kubernetes"
        yield _error("bad-name", "queue", what, "Lower-case letters, digits, hyphens and dots, at most 63.")


def pod_group(ctx: RenderContext) -> Iterator[Finding]:
    """Only the pods of a JobSet can refer to a PodGroup: the other kinds' operators do not know the field."""
    if ctx.target.pod_group and ctx.workload is not Workload.JOBSET:
        what = f"the pods of a {ctx.workload} cannot be in the run's PodGroup; those of a JobSet can"
        remedy = "Write `workload: jobset` in the target, or a `queue` in place of `pod_group`."
        yield _error("not-supported", f"{TARGET_PREFIX}pod_group", what, remedy)
    if ctx.target.volcano_queue and ctx.target.pod_group is not GangScheduler.VOLCANO:
        what = f"Volcano does not schedule the run, so it would not be in its queue {ctx.target.volcano_queue}"
        remedy = "Write `pod_group: volcano` in the target; `queue` is a LocalQueue of Kueue."
        yield _error("not-supported", f"{TARGET_PREFIX}volcano_queue", what, remedy)


def multikueue(ctx: RenderContext) -> Iterator[Finding]:
    """What MultiKueue cannot send to a worker cluster."""
    target, where = ctx.target, pod_checks.MULTIKUEUE
    if not target.multikueue:
        return
    if ctx.queue is None:
        what = "MultiKueue sends only runs of a queue to worker clusters, and the run is in none"
        yield _error("multikueue-needs-queue", where, what, "Write `queue: NAME` in the job or in the target.")
    unsupported = {
        f"a {ctx.workload}": (ctx.workload is not Workload.JOBSET, "Write `workload: jobset` in the target."),
        "a run without agents": (not target.agent, "Remove `agent: false` from the target."),
        "a tree": (ctx.accepted.from_tree, "Start it with `holdfast run`, or render it for one of the workers."),
        "a controller behind a Gateway": (
            target.controller.gateway is not None,
            "Remove `controller.gateway` from the target: it names the Gateway of one cluster.",
        ),
        "a PodGroup": (target.pod_group is not None, "Remove `pod_group` from the target: Kueue admits all nodes."),
        "a claim that a run creates": (
            target.volume is not None and target.volume.size is not None,
            "Create the claim in each worker cluster, and remove `volume.size` from the target.",
        ),
    }
    for thing, (is_wanted, remedy) in unsupported.items():
        if is_wanted:
            yield _error("not-supported", where, f"{thing} cannot be sent to a worker cluster", remedy)


def placement(ctx: RenderContext) -> Iterator[Finding]:
    """Checks that levels have labels, and that a queue or Volcano places the nodes."""
    wanted = ctx.job.placement
    if wanted is None:
        return
    if ctx.queue is None and not ctx.placed_by_volcano:
        what = "without a queue nothing places all nodes together: the scheduler places one pod at a time"
        remedy = "Write `queue: NAME` in the job or the target, or `pod_group: volcano` in the target."
        yield _error("placement-needs-queue", "placement", what, remedy)
    if ctx.placed_by_volcano and wanted.slices:
        what = "Volcano does not number a run's nodes along the topology, so slices of neighbours cannot be placed"
        yield _error("not-supported", "placement.slices", what, "Write `queue: NAME`, or leave `slices` out.")
    levels = {"placement.level": wanted.level}
    if wanted.slices:
        levels["placement.slices.level"] = wanted.slices.level
    for where, level in levels.items():
        if ctx.topology_label(level) is None:
            what = f"the target does not say which label of its machines is `{level}`"
            remedy = (
                f"Write `topology_levels: {{{level}: LABEL}}` in the target; `kubectl get topologies -o yaml` has them."
            )
            yield _error("placement-level-unknown", where, what, remedy)
    by_agents = (Workload.JOBSET, Workload.MPIJOB)
    split = ctx.workload is Workload.PYTORCHJOB or (ctx.workload in by_agents and ctx.target.agent)
    if wanted.slices and split and ctx.job.nodes.max > 1:
        what = f"Kueue divides the pods of one template into slices, and this {ctx.workload} has several"
        yield _error("not-supported", "placement.slices", what, "Write `workload: trainjob` in the target.")


def fabric(ctx: RenderContext) -> Iterator[Finding]:
    """Checks the settings through which pods reach the fabric."""
    row, access, device = ctx.fabric, ctx.pod_access, ctx.target.fabric_device
    if access.per_node and not access.gke_interfaces and sum(ctx.fabric_resources.values()) < access.per_node:
        yield _device_unnamed(f"fabric `{row.name}` needs `fabric_device.resource`: what its device plugin offers")
    if access.resource and not access.per_node:
        yield _device_unnamed(f"fabric `{row.name}` needs `fabric_device.per_node`: as many as its machines have")
    if access.huge_pages and ctx.job.resources.cpu is None and ctx.job.resources.memory is None:
        what = f"fabric `{row.name}` takes huge pages, which a pod gets that asks for CPU or memory too"
        yield _error("impossible-quantity", "resources.memory", what, "Write `resources: {memory: ...}`.")
    if not all(ctx.multus_networks):
        yield _device_unnamed(f"fabric `{row.name}` needs `fabric_device.network`: the attachment that Multus gives")
    if device.rails and row.pod.gke_interfaces and len(device.rails) != len(row.pod.gke_interfaces):
        what = f"fabric `{row.name}` has {len(row.pod.gke_interfaces)} networks, and `rails` names {len(device.rails)}"
        yield _error("fabric-device-unnamed", f"{TARGET_PREFIX}fabric_device.rails", what, "Name one for each adapter.")
    if access.claim and not (access.claim.device_class and access.claim.count):
        missing = "per_node" if access.claim.device_class else "device_class"
        yield _device_unnamed(f"fabric `{row.name}` needs `fabric_device.{missing}`, for the claim of its devices")
    if ctx.job.gpus_per_node < access.gpus:
        what = (
            f"fabric `{row.name}` serves whole machines only: a node with fewer than {access.gpus} GPUs cannot use it"
        )
        yield _error("fabric-needs-whole-machine", "gpus_per_node", what, f"Write `gpus_per_node: {access.gpus}`.")
    if row.pod.capabilities and ctx.target.user and not access.privileged:
        what = f"fabric `{row.name}` pins memory, and IPC_LOCK counts only for root"
        remedy = "See to it that containers may lock memory without limit (LimitMEMLOCK of the container runtime), or "
        yield _warning("memory-lock", "fabric.name", what, f"{remedy}write `user: 0` in the target.")
    if access.host_network:
        what = f"fabric `{row.name}` puts pods on the host network, where no NetworkPolicy guards their ports"
        yield _warning("host-network", "fabric.name", what, "Isolate those machines from everybody else.")


def rank_starter(ctx: RenderContext) -> Iterator[Finding]:
    """Without an agent the command starts once per node, and only variables give it the node's rank."""
    job, workload = ctx.job, ctx.workload
    if ctx.target.agent:
        return
    if workload is Workload.MPIJOB and job.launch is not Launch.MPI:
        what = f"an MPIJob is started by `mpirun`, and `launch` is `{job.launch}`"
        yield _error("needs-agent", "launch", what, "Write `launch: mpi`, or another `workload` in the target.")
    elif CATALOG[workload].never_completes:
        what = f"the pods of a {CATALOG[workload].kind} restart whenever they exit, and so would a command that is done"
        yield _error("needs-agent", "launch", what, "Remove `agent: false` from the target, or change its `workload`.")
    elif job.launch in (Launch.ACCELERATE, Launch.DEEPSPEED):
        what = f"`launch: {job.launch}` is given its node's place by holdfast's agent, and the target has none"
        yield _error("needs-agent", "launch", what, "Remove `agent: false` from the target.")
    elif job.recovery.replicas > 1:
        what = f"{job.recovery.replicas} replicas are kept apart by holdfast's agents, and the target has none"
        yield _error("needs-agent", "recovery.replicas", what, "Remove `agent: false` from the target.")
    elif job.checks.before_start is not CheckLevel.OFF:
        what = "nodes are checked by holdfast's agents, and the target has none"
        yield _error("needs-agent", "checks", what, "Write `checks: off`, or remove `agent: false` from the target.")
    elif job.launch is Launch.PER_RANK and job.local_world_size > 1:
        what = f"{job.local_world_size} ranks on each node are started by holdfast's agent, and the target has none"
        remedy = "Write `launch: per-node` and begin the command with torchrun, or remove `agent: false`."
        yield _error("needs-agent", "launch", what, remedy)


def ssh(ctx: RenderContext) -> Iterator[Finding]:
    """Names what an MPIJob needs in its image, which cannot be checked from here."""
    if ctx.workload is Workload.MPIJOB and not ctx.target.agent:
        yield Finding(
            code="image-needs-ssh",
            severity=Severity.INFO,
            what="`mpirun` reaches the nodes of an MPIJob by ssh",
            where="image",
            remedy="See that the image has mpirun, openssh-client and openssh-server (/usr/sbin/sshd).",
        )


def elastic(ctx: RenderContext) -> Iterator[Finding]:
    """A gang has a fixed size."""
    nodes = ctx.job.nodes
    if nodes.is_elastic:
        what = f"`nodes: {nodes.min}..{nodes.max}` asks for all {nodes.max} nodes here: a gang has one size"
        yield _warning("gang-size-fixed", "nodes", what, "Write the number of nodes it is to start with.")


def standbys(ctx: RenderContext) -> Iterator[Finding]:
    """This target creates no standby pods."""
    if ctx.job.standbys:
        what = "standbys are for the local target as yet: this one makes as many pods as `nodes` says"
        yield _error("not-supported", "recovery.standby", what, "Remove it: a lost pod is replaced.")


def time_to_live(ctx: RenderContext) -> Iterator[Finding]:
    """An object that never completes is not deleted some time later."""
    kind = CATALOG[ctx.workload]
    if kind.never_completes and "ttl_s" in ctx.target.model_fields_set:
        what = f"the objects of a finished run stay: a {kind.kind} has no time to live"
        remedy = "Remove `ttl_s` from the target; `holdfast prune --on TARGET` deletes finished runs by age."
        yield _warning("not-supported", f"{TARGET_PREFIX}ttl_s", what, remedy)


def template(ctx: RenderContext) -> Iterator[Finding]:
    """A production run needs four settings; a demo gets a warning with the missing ones."""
    lacking = tuple(_production_gaps(ctx))
    if ctx.target.template is ManifestTemplate.PRODUCTION:
        yield from lacking
    elif lacking:
        yield Finding(
            code="demo-template",
            severity=Severity.INFO,
            what="`template: demo` renders what a production run would be refused for",
            evidence=tuple(finding.what for finding in lacking),
            remedy="Fix these, and write `template: production` in the target.",
        )


def pod_local_checkpoints(ctx: RenderContext) -> Iterator[Finding]:
    """Without a volume or a store a pod's checkpoints are lost with the pod."""
    if ctx.target.template is ManifestTemplate.PRODUCTION or ctx.target.volume or ctx.job.checkpoint.is_remote:
        return
    what = (
        "checkpoints die with their pod: the target names no volume, so a node that is lost takes its part of every "
        "checkpoint along, and the run begins again at step 0"
    )
    remedy = "Write `volume: {claim: NAME}` in the target, or a URL such as s3://bucket/run as `checkpoint.path`."
    yield _warning("checkpoint-not-shared", f"{TARGET_PREFIX}volume", what, remedy)


def _production_gaps(ctx: RenderContext) -> Iterator[Finding]:
    """Reasons to refuse a production run."""
    job, target = ctx.job, ctx.target
    if job.nodes.max > 1 and target.fabric_verified is None:
        what = f"the target does not say that `{ctx.fabric.name}` carries collectives on this cluster"
        remedy = (
            "Run a job with NCCL_DEBUG=INFO, have `holdfast diagnose` read its logs, and write when and how it was "
            "verified as `fabric_verified` in the target."
        )
        yield _error("fabric-not-verified", "fabric.name", what, remedy)
    if target.volume is None and not job.checkpoint.is_remote:
        what = "checkpoints are lost with their pod: there is neither a shared volume nor a store"
        remedy = "Write `volume: {claim: NAME}` in the target, or a URL as `checkpoint.path`."
        yield _error("checkpoint-not-shared", "checkpoint.path", what, remedy)
    if job.nodes.max > 1 and ctx.queue is None and not target.pod_group:
        what = "without a queue nodes are placed one by one: two jobs may each hold half of what they need, and wait"
        remedy = "Write `queue: NAME` in the job or the target, or `pod_group: kubernetes` or `volcano` in the target."
        yield _error("no-gang-scheduling", "queue", what, remedy)
    if "max_restarts" not in job.recovery.model_fields_set:
        what = "the job does not set how often it may be restarted"
        remedy = "Write `recovery: {max_restarts: 10}` in the job."
        yield _error("no-restart-budget", "recovery.max_restarts", what, remedy)


CHECKS: tuple[Callable[[RenderContext], Iterator[Finding]], ...] = (
    image,
    paths,
    volume,
    quantities,
    queue,
    pod_group,
    multikueue,
    placement,
    fabric,
    rank_starter,
    ssh,
    elastic,
    standbys,
    time_to_live,
    pod_checks.settings,
    gpu_sharing.by_name,
    pod_patch_checks.patch,
    pod_local_checkpoints,
    template,
)


def _device_unnamed(what: str) -> Finding:
    return _error("fabric-device-unnamed", f"{TARGET_PREFIX}fabric_device", what, "Ask the cluster's administrator.")


def _error(code: str, where: str, what: str, remedy: str) -> Finding:
    return Finding(code=code, what=printable(what, 300), where=where, remedy=remedy)


def _warning(code: str, where: str, what: str, remedy: str) -> Finding:
    return Finding(code=code, severity=Severity.WARNING, what=printable(what, 300), where=where, remedy=remedy)
