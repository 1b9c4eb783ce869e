"""The model of a target's `pod`: what a platform team sets on the pods of a run on Kubernetes."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from holdfast.job.spec import (
    LABEL_VALUE_PATTERN,
    OBJECT_NAME_PATTERN,
    PART_NAME_PATTERN,
    QUALIFIED_NAME_PATTERN,
    Bytes,
    Model,
    NonEmpty,
    Text,
)

ObjectName = Annotated[str, Field(pattern=OBJECT_NAME_PATTERN)]
PartName = Annotated[str, Field(pattern=PART_NAME_PATTERN)]
QualifiedName = Annotated[str, Field(pattern=QUALIFIED_NAME_PATTERN)]
LabelValue = Annotated[str, Field(pattern=LABEL_VALUE_PATTERN)]


def _check_absolute(path: str) -> str:
    """Reject a path that Kubernetes cannot mount at, and the root folder itself."""
    if not path.startswith("/") or ":" in path or not path.strip("/") or ".." in path.split("/"):
        raise PydanticCustomError("bad-path", "must be an absolute path below `/`, without colons and `..`")
    return path.rstrip("/")


AbsolutePath = Annotated[Text, AfterValidator(_check_absolute)]


class EphemeralVolume(Model):
    """A volume that is created with a pod and deleted with it."""

    size: Bytes
    """Its size, in bytes or such as `1TiB`."""
    storage_class: ObjectName | None = None
    """Its storage class; none means the cluster's default."""


class PodVolume(Model):
    """A volume mounted in the ranks' container; it has exactly one source."""

    name: PartName
    """Name of the volume in the pod."""
    mount: AbsolutePath
    """Path at which ranks see it."""
    read_only: bool = False
    """Whether ranks may only read it."""
    claim: ObjectName | None = None
    """Source: an existing PersistentVolumeClaim."""
    secret: ObjectName | None = None
    """Source: an existing Secret, with one file per key."""
    config_map: ObjectName | None = None
    """Source: an existing ConfigMap, with one file per key."""
    host_path: AbsolutePath | None = None
    """Source: a folder of the machine; Pod Security allows it only in privileged namespaces."""
    ephemeral: EphemeralVolume | None = None
    """Source: a new volume for each pod, such as one on local disks."""
    image: NonEmpty | None = None
    """Source: the files of a container image or OCI artifact, always read-only."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        given = [name for name in VOLUME_SOURCES if getattr(self, name) is not None]
        if len(given) != 1:
            found = f"not {' and '.join(given)}" if given else "and has none"
            raise PydanticCustomError(
                "bad-volume", "must have one source: {known}; {found}", {"known": _KNOWN_SOURCES, "found": found}
            )
        return self


VOLUME_SOURCES = ("claim", "secret", "config_map", "host_path", "ephemeral", "image")
_KNOWN_SOURCES = f"{', '.join(VOLUME_SOURCES[:-1])} or {VOLUME_SOURCES[-1]}"


class ResourceClaim(Model):
    """Devices that dynamic resource allocation (DRA) gives to each node's pod."""

    name: PartName
    """Name of the claim in the pod."""
    template: ObjectName
    """An existing ResourceClaimTemplate, from which each pod gets its claim."""


class EnvFrom(Model):
    """Objects whose keys become variables of the ranks; the job's variables override them."""

    config_maps: tuple[ObjectName, ...] = ()
    """Existing ConfigMaps."""
    secrets: tuple[ObjectName, ...] = ()
    """Existing Secrets; they override the ConfigMaps."""


class PodSettings(Model):
    """What the pods of a run have in addition to what holdfast renders."""

    labels: dict[QualifiedName, LabelValue] = {}
    """Labels of all pods of the run, the controller's included."""
    annotations: dict[QualifiedName, Text] = {}
    """Annotations of all pods of the run, the controller's included."""
    pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = None
    """When images are pulled, in all pods of the run; none means Kubernetes' default."""
    service_account: ObjectName | None = None
    """An existing ServiceAccount for the nodes' pods; its token is not mounted."""
    runtime_class: ObjectName | None = None
    """RuntimeClass of the nodes' pods, such as `nvidia`."""
    scheduler: ObjectName | None = None
    """Scheduler of the nodes' pods; none means the cluster's default."""
    resource_claims: tuple[ResourceClaim, ...] = ()
    """Devices from dynamic resource allocation, for the ranks' container."""
    volumes: tuple[PodVolume, ...] = ()
    """More volumes of the nodes' pods, mounted in the ranks' container."""
    env_from: EnvFrom = EnvFrom()
    """Variables of the ranks from existing objects."""
    ephemeral_storage: Bytes | None = None
    """Disk that a node's containers may fill, in bytes or such as `200GiB`; the kubelet evicts a pod that uses more."""
    patch: dict[str, Any] = {}
    """A strategic merge patch of the nodes' pod template, for everything else."""
