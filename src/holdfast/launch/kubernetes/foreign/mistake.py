"""A mistake that a rule finds in a workload, with the patch that fixes it."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

from holdfast.findings import Owner, Severity
from holdfast.job.yaml_source import Data, Path
from holdfast.launch.kubernetes.foreign.json_patch import NO_PATCH, Patch, append
from holdfast.launch.kubernetes.foreign.training_workload import NodeGroup, TrainingWorkload


class Mistake(Struct, frozen=True, kw_only=True):
    """What is wrong, where, and what fixes it."""

    code: str
    what: str
    path: Path
    """The field that it is about."""
    remedy: str
    patch: Patch = NO_PATCH
    severity: Severity = Severity.WARNING
    owner: Owner = Owner.USER
    evidence: tuple[str, ...] | None = None
    """None means the line of `path`; given where that line could hold a secret."""


def named(groups: Iterable[NodeGroup]) -> str:
    """The groups in words: `Master and Worker`."""
    *most, last = [f"`{group.name}`" for group in groups]
    return f"{', '.join(most)} and {last}" if most else last


def add_volume(workload: TrainingWorkload, group: NodeGroup, name: str, source: dict[str, Data], folder: str) -> Patch:
    """Add a volume to a group's pods and mount it in the container with ranks."""
    pod, taken = group.pod, {volume.name for volume in group.pod.volumes}
    while name in taken:
        name = f"{name}-2"
    return append(workload.target, (*pod.spec_path, "volumes"), [{"name": name, **source}]) + append(
        workload.target, (*pod.main.path, "volumeMounts"), [{"name": name, "mountPath": folder}]
    )
