"""Checks what a target's `pod` adds to a run's pods; pod_patch_checks.py checks its patch."""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.findings import Finding, Severity
from holdfast.job.targets import Workload
from holdfast.job.yaml_source import Path, dotted_path, printable
from holdfast.launch.kubernetes.manifests.controller_objects import KEYS_DIR
from holdfast.launch.kubernetes.manifests.pod_template import (
    FABRIC_CLAIM,
    SCRATCH,
    fabric_annotations,
    host_folders,
    volume_name,
)
from holdfast.launch.kubernetes.manifests.render_context import RenderContext
from holdfast.launch.kubernetes.object_names import VOLUME_ROOT

TARGET_PREFIX = "target."
"""Prefix of a finding's `where` for a field of the target instead of the job."""

POD = f"{TARGET_PREFIX}pod"
"""The field that adds to pods."""

MULTIKUEUE = f"{TARGET_PREFIX}multikueue"
"""The field with the clusters to which a run may be sent."""

OWNERS_OF_KEYS = {
    "holdfast/": "holdfast",
    "app.kubernetes.io/name": "holdfast",
    "jobset.sigs.k8s.io/": "JobSet",
    "leaderworkerset.sigs.k8s.io/": "LeaderWorkerSet",
    "batch.kubernetes.io/": "Kubernetes' Job controller",
    "job-name": "Kubernetes' Job controller",
    "controller-uid": "Kubernetes' Job controller",
    "kueue.x-k8s.io/": "Kueue, from `queue`, `priority` and `placement`",
    "trainer.kubeflow.org/": "Kubeflow Trainer",
    "training.kubeflow.org/": "the Kubeflow operators",
}
"""Labels and annotations that a target may not set, by their first characters: who sets them."""

OWN_PATHS = (VOLUME_ROOT, SCRATCH, KEYS_DIR, "/dev/shm")
"""Folders that holdfast mounts in the ranks' container."""


def settings(ctx: RenderContext) -> Iterator[Finding]:
    """Labels, annotations, volumes and variables may not replace those of holdfast and the operators."""
    own = ctx.target.pod
    for field, values in (("labels", own.labels), ("annotations", own.annotations)):
        for key in values:
            if owner := key_owner(ctx, key):
                yield reserved_key(("pod", field, key), key, owner)
    taken: set[str] = set()
    for number, volume in enumerate(own.volumes):
        path: Path = ("pod", "volumes", number)
        if volume.name in taken or volume.name in own_volume_names(ctx):
            what = f"the pod has another volume named `{volume.name}`"
            yield _error("volume-clash", (*path, "name"), what, "Choose another name.")
        taken.add(volume.name)
        if other := covered(ctx, volume.mount):
            what = f"`{volume.mount}` covers or is in {other}, which holdfast mounts"
            yield _error("volume-clash", (*path, "mount"), what, "Mount it elsewhere.")
        if ctx.target.volume and volume.claim == ctx.target.volume.claim:
            what = f"claim `{volume.claim}` is the target's `volume`, which holds the files of all runs"
            remedy = "Write its folder in `volume.folders`: ranks see it under /holdfast."
            yield _error("volume-clash", (*path, "claim"), what, remedy)
    for number, claim in enumerate(own.resource_claims):
        if ctx.pod_access.claim and claim.name == FABRIC_CLAIM:
            what = f"`{claim.name}` is the name of the claim of the fabric's devices"
            yield _error("reserved-name", ("pod", "resource_claims", number, "name"), what, "Choose another name.")
    by_ssh = ctx.workload is Workload.MPIJOB and not ctx.target.agent
    if by_ssh and (own.env_from.secrets or own.env_from.config_maps):
        what = "the ranks of an MPIJob are started by sshd, which passes on no variables of its container"
        remedy = "Write the variables as the job's `env` or `secrets`."
        yield _error("not-supported", ("pod", "env_from"), what, remedy)


def key_owner(ctx: RenderContext, key: str) -> str:
    """Who sets this label or annotation; empty if only the target does."""
    if key in fabric_annotations(ctx):
        return "holdfast, for the fabric"
    return next((owner for start, owner in OWNERS_OF_KEYS.items() if _owns(start, key)), "")


def _owns(start: str, key: str) -> bool:
    return key.startswith(start) if start.endswith("/") else key == start


def covered(ctx: RenderContext, mount: str) -> str:
    """The path of holdfast's in the ranks' container that a mount would cover or be in; empty if there is none."""
    own = (*OWN_PATHS, *(path for _, path in ctx.pod_access.mounts))
    return next((each for each in own if _inside(each, mount) or _inside(mount, each)), "")


def _inside(path: str, folder: str) -> bool:
    return path == folder or path.startswith(f"{folder.rstrip('/')}/")


def own_volume_names(ctx: RenderContext) -> frozenset[str]:
    """Names of the volumes that holdfast renders."""
    return frozenset({"shm", "scratch", "home", "keys"} | {volume_name(path) for path in host_folders(ctx.pod_access)})


def reserved_key(path: Path, key: str, owner: str) -> Finding:
    """The finding for a label or annotation that belongs to somebody else."""
    return _error("reserved-key", path, f"`{printable(key)}` is set by {owner}", "Remove it.")


def about_target(code: str, path: Path, what: str, remedy: str, *, severity: Severity = Severity.ERROR) -> Finding:
    """A finding about a field of the target."""
    where = f"{TARGET_PREFIX}{dotted_path(path)}"
    return Finding(code=code, severity=severity, what=printable(what, 300), where=where, remedy=remedy)


def _error(code: str, path: Path, what: str, remedy: str) -> Finding:
    return about_target(code, path, what, remedy)
