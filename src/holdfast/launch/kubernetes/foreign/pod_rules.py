"""Rules on the pods of a workload: shared memory, checkpoints, variables, resources and names."""

from __future__ import annotations

import re
from collections.abc import Iterator

from holdfast.findings import Severity
from holdfast.job.rules import RESERVED_NAMES, RESERVED_PREFIXES
from holdfast.job.yaml_source import Data, printable
from holdfast.launch.kubernetes.foreign.json_patch import NO_PATCH, Patch, put, remove
from holdfast.launch.kubernetes.foreign.mistake import Mistake, add_volume, named
from holdfast.launch.kubernetes.foreign.training_workload import SHM, NodeGroup, PodContainer, TrainingWorkload

_LASTING = frozenset(
    {"persistentVolumeClaim", "nfs", "csi", "cephfs", "glusterfs", "azureFile", "flexVolume", "iscsi", "fc", "rbd"}
)
"""Kinds of volume that outlive a pod and its machine; a hostPath outlives the pod only."""
_STORE = re.compile(r"(?<!\w)(s3|gs|gcs|az|abfss?|wasbs?|oss|hf|hdfs|oci|tos)://")
_OVERCOMMITTED = frozenset({"cpu", "memory", "ephemeral-storage"})
_SETS_RANKS = {"PyTorchJob": "training-operator", "TrainJob": "Trainer"}


def default_shm(workload: TrainingWorkload) -> Iterator[Mistake]:
    """A container's /dev/shm has 64 MiB unless a volume is mounted there."""
    groups = [
        group
        for group in workload.trainers
        if group.pod.complete
        and group.pod.main.gpu_resource
        and group.pod.spec.get("hostIPC") is not True
        and group.pod.main.mount_of(SHM) is None
    ]
    if not groups:
        return
    several = any(group.pod.main.gpus != 1 for group in groups)
    patch = Patch()
    for group in groups:
        patch += add_volume(workload, group, "shm", {"emptyDir": {"medium": "Memory"}}, SHM)
    yield Mistake(
        code="manifest-shm-default",
        what=f"the pods of {named(groups)} have a /dev/shm of 64 MiB, the container runtime's default: NCCL and data "
        "workers that share memory fail with SIGBUS or `No space left on device`",
        path=groups[0].pod.main.path,
        remedy="Mount an emptyDir with `medium: Memory` there; its files count as memory of the pod.",
        patch=patch,
        severity=Severity.ERROR if several else Severity.WARNING,
        evidence=tuple(_amount(group.pod.main) for group in groups),
    )


def _amount(container: PodContainer) -> str:
    resource = container.gpu_resource or ""
    return f"container `{printable(container.name)}`: {resource}: {printable(str(container.amounts.get(resource)))}"


def shm_on_disk(workload: TrainingWorkload) -> Iterator[Mistake]:
    """An emptyDir is a folder on the machine's disk unless its medium is memory."""
    for group in workload.trainers:
        mount = group.pod.main.mount_of(SHM)
        volume = group.pod.volume(mount.volume) if mount else None
        if volume and volume.kind == "emptyDir" and volume.settings.get("medium") != "Memory":
            yield Mistake(
                code="manifest-shm-on-disk",
                what=f"/dev/shm of `{group.name}` is on the machine's disk: shared memory is as slow as that disk",
                path=volume.path,
                remedy="Write `medium: Memory`.",
                patch=put(workload.target, (*volume.path, "emptyDir", "medium"), "Memory"),
            )


def no_checkpoint(workload: TrainingWorkload) -> Iterator[Mistake]:
    """Files of a pod are lost with it, unless they are on a volume that outlives it or in a store."""
    if not workload.has_gpus or workload.is_benchmark or any(map(_names_store, workload.containers())):
        return
    groups = [group for group in workload.trainers if group.pod.complete and not _has_lasting_volume(workload, group)]
    if not groups:
        return
    patch = Patch()
    for group in groups:
        claim: dict[str, Data] = {"persistentVolumeClaim": {"claimName": "checkpoints"}}
        patch += add_volume(workload, group, "checkpoints", claim, "/checkpoints")
    yield Mistake(
        code="manifest-no-checkpoint",
        what=f"the pods of {named(groups)} mount no volume that outlives them and name no store, so checkpoints are "
        "lost with their pod, and each restart begins at step 0",
        path=groups[0].pod.main.path,
        remedy="Mount a ReadWriteMany claim and save checkpoints there, or save to a store such as s3://bucket/run. "
        "The patch mounts a claim named `checkpoints` at /checkpoints.",
        patch=patch,
        evidence=tuple(
            f"volumes of `{group.name}`: {', '.join(volume.kind for volume in group.pod.volumes) or 'none'}"
            for group in groups
        ),
    )


def _names_store(container: PodContainer) -> bool:
    values = " ".join(each.value for each in container.env if isinstance(each.value, str))
    return _STORE.search(f"{container.text} {values}") is not None


def _has_lasting_volume(workload: TrainingWorkload, group: NodeGroup) -> bool:
    mounts = [each for each in group.pod.main.mounts if not each.read_only]
    volumes = [group.pod.volume(each.volume) for each in mounts]
    if workload.target.kind == "StatefulSet" and None in volumes:
        return True  # one of its volumeClaimTemplates
    return any(each is not None and each.kind in _LASTING for each in volumes)


def env_not_text(workload: TrainingWorkload) -> Iterator[Mistake]:
    """The API server refuses names and values that are numbers or booleans; to kubectl `y` and `on` are booleans."""
    for container in workload.containers():
        for each in container.env:
            for field in ("name", "value"):
                value = workload.target.at((*each.path, field))
                if not isinstance(value, bool | int | float):
                    continue
                form = "boolean" if isinstance(value, bool) else "number"
                text = str(value).lower() if isinstance(value, bool) else str(value)
                named_as = f"`{printable(each.name)}`" if each.name else "a variable"
                yield Mistake(
                    code="manifest-env-not-text",
                    what=f"the {field} of {named_as} is a {form}, and the API server accepts only text",
                    path=(*each.path, field),
                    remedy=f"Put the {field} in quotes.",
                    patch=put(workload.target, (*each.path, "value"), text) if field == "value" else NO_PATCH,
                    severity=Severity.ERROR,
                    evidence=(f"name: {printable(each.name)}",) if field == "value" else None,
                )


def request_without_limit(workload: TrainingWorkload) -> Iterator[Mistake]:
    """Devices and huge pages cannot be overcommitted: the API server refuses a request that differs from the limit."""
    for container in workload.containers():
        for name, amount in container.requests.items():
            if (name in _OVERCOMMITTED) or ("/" not in name and not name.startswith("hugepages-")):
                continue
            if str(container.limits.get(name)) == str(amount):
                continue
            limited = name in container.limits
            limit = f"a limit of {printable(str(container.limits[name]))}" if limited else "no limit"
            yield Mistake(
                code="manifest-request-without-limit",
                what=f"container `{printable(container.name)}` requests {printable(str(amount))} of "
                f"`{printable(name)}` and has {limit}: the API server refuses that",
                path=(*container.resources_path, "requests", name),
                remedy="Write the amount under `limits`; the request defaults to it.",
                patch=put(workload.target, (*container.resources_path, "requests", name), container.limits[name])
                if limited
                else put(workload.target, (*container.resources_path, "limits", name), amount),
                severity=Severity.ERROR,
            )


def container_name(workload: TrainingWorkload) -> Iterator[Mistake]:
    """Training-operator gives variables only to a container named `pytorch`, and refuses a job without one."""
    if workload.target.kind != "PyTorchJob":
        return
    for group in workload.groups:
        if "pytorch" not in {each.name for each in group.pod.containers}:
            container = group.pod.main
            yield Mistake(
                code="manifest-container-name",
                what=f"no container of `{group.name}` is named `pytorch`: training-operator refuses the job",
                path=(*container.path, "name"),
                remedy="Name the container with the ranks `pytorch`.",
                patch=put(workload.target, (*container.path, "name"), "pytorch"),
                severity=Severity.ERROR,
            )


def reserved_variable(workload: TrainingWorkload) -> Iterator[Mistake]:
    """The operator sets the variables of the rendezvous itself."""
    operator = _SETS_RANKS.get(workload.target.kind)
    if operator is None:
        return
    refused = operator == "Trainer"
    for container in workload.containers():
        for each in container.env:
            # Trainer's webhook refuses PET_* only; training-operator appends its own values, and the last one counts.
            reserved = each.name.startswith("PET_") or (not refused and each.name in RESERVED_NAMES)
            if not reserved or not each.name.startswith((*RESERVED_PREFIXES, *RESERVED_NAMES)):
                continue
            effect = "refuses a job that sets it" if refused else "overrides it in every pod"
            yield Mistake(
                code="manifest-reserved-variable",
                what=f"`{printable(each.name)}` is set by {operator} for each pod, and it {effect}",
                path=each.path,
                remedy="Remove it.",
                patch=remove([each.path]),
                severity=Severity.ERROR if refused else Severity.WARNING,
                evidence=(f"name: {printable(each.name)}",),
            )


def host_network_dns(workload: TrainingWorkload) -> Iterator[Mistake]:
    """On the host network, pods resolve names as their machine does, unless `dnsPolicy` says otherwise."""
    for group in workload.groups:
        pod = group.pod
        if pod.host_network and pod.spec.get("dnsPolicy") not in {"ClusterFirstWithHostNet", "None"}:
            yield Mistake(
                code="manifest-host-network-dns",
                what=f"the pods of `{group.name}` are on the host network and resolve names as their machine does: the "
                "names of Services and pods, such as MASTER_ADDR, are unknown there",
                path=(*pod.spec_path, "hostNetwork"),
                remedy="Write `dnsPolicy: ClusterFirstWithHostNet`.",
                patch=put(workload.target, (*pod.spec_path, "dnsPolicy"), "ClusterFirstWithHostNet"),
                severity=Severity.ERROR if workload.is_distributed else Severity.WARNING,
            )
