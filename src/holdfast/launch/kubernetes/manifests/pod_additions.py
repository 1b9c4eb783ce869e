"""Renders what a target's `pod` adds to the pods of a run: volumes, variables, labels and annotations."""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.job.pod_settings import EnvFrom, PodVolume
from holdfast.launch.kubernetes.manifests.quantities import format_quantity
from holdfast.launch.kubernetes.manifests.render_context import RenderContext
from holdfast.launch.kubernetes.manifests.yaml_writer import YamlValue

NOTHING: Mapping[str, YamlValue] = {}


def pod_metadata(
    ctx: RenderContext,
    part: str,
    *,
    labels: Mapping[str, YamlValue] = NOTHING,
    annotations: Mapping[str, YamlValue] = NOTHING,
) -> Mapping[str, YamlValue]:
    """The metadata of a pod of the run: the target's, and holdfast's own."""
    own = ctx.target.pod
    return {
        "labels": {**own.labels, **ctx.names.labels(part), **labels},
        "annotations": {**own.annotations, **annotations} or None,
    }


def volumes(added: tuple[PodVolume, ...]) -> list[YamlValue]:
    """The target's volumes."""
    return [{"name": each.name, **_source(each)} for each in added]


def volume_mounts(added: tuple[PodVolume, ...]) -> list[YamlValue]:
    """Their mounts in the ranks' container."""
    return [{"name": each.name, "mountPath": each.mount, "readOnly": each.read_only or None} for each in added]


def env_from(sources: EnvFrom) -> YamlValue:
    """References to the objects whose keys become variables; None if there are none."""
    return [
        *({"configMapRef": {"name": name}} for name in sources.config_maps),
        *({"secretRef": {"name": name}} for name in sources.secrets),
    ] or None


def _source(volume: PodVolume) -> Mapping[str, YamlValue]:
    """The source of a volume, as Kubernetes names it."""
    if volume.claim is not None:
        return {"persistentVolumeClaim": {"claimName": volume.claim, "readOnly": volume.read_only or None}}
    if volume.secret is not None:
        return {"secret": {"secretName": volume.secret}}
    if volume.config_map is not None:
        return {"configMap": {"name": volume.config_map}}
    if volume.host_path is not None:
        return {"hostPath": {"path": volume.host_path}}
    if volume.ephemeral is not None:
        spec: YamlValue = {
            "accessModes": ["ReadWriteOnce"],
            "storageClassName": volume.ephemeral.storage_class,
            "resources": {"requests": {"storage": format_quantity(volume.ephemeral.size)}},
        }
        return {"ephemeral": {"volumeClaimTemplate": {"spec": spec}}}
    return {"image": {"reference": volume.image}}
