"""The common form of all kinds of training workload: groups of nodes with their pods and containers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import PurePath

from msgspec import Struct

from holdfast.job.yaml_source import Data, Path
from holdfast.launch.kubernetes.foreign.manifest_source import (
    ManifestObject,
    as_count,
    as_list,
    as_mapping,
    as_text,
)

SHM = "/dev/shm"
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"

_GPU = re.compile(
    r"nvidia\.com/(gpu|mig-).*|amd\.com/gpu|gpu\.intel\.com/.*|habana\.ai/gaudi|huawei\.com/(Ascend\w+|npu)"
)
_LAUNCHER = re.compile(
    r"(?<![\w.-])(torchrun|torch\.distributed\.(run|launch)|accelerate|deepspeed|mpirun|mpiexec|horovodrun)(?![\w-])"
)
_MPIRUN = re.compile(r"(?<![\w.-])(mpirun|mpiexec|orterun)(?![\w.-])")
_BENCHMARK = re.compile(r"(?<!\w)(\w+_perf|osu_\w+|ib_(write|read|send)_\w+)(?![\w.])")
"""Programs such as `all_reduce_perf`, which have nothing to save."""


class Word(Struct, frozen=True, kw_only=True):
    """A word of a container's `command` or `args`, which may be a whole shell script."""

    text: str
    path: Path


class EnvVariable(Struct, frozen=True, kw_only=True):
    """An environment variable of a container."""

    name: str
    value: Data
    """None if it comes from elsewhere."""
    secret: str = ""
    """`NAME/KEY` of the Secret that it comes from."""
    path: Path


class PodVolume(Struct, frozen=True, kw_only=True):
    """A volume of a pod."""

    name: str
    kind: str
    """Such as `emptyDir` or `persistentVolumeClaim`."""
    settings: Mapping[str, Data]
    path: Path


class VolumeMount(Struct, frozen=True, kw_only=True):
    """Where a container sees a volume."""

    folder: str
    volume: str
    read_only: bool


class PodContainer(Struct, frozen=True, kw_only=True):
    """A container, with the paths at which patches change it."""

    path: Path
    resources_path: Path
    name: str
    image: str
    working_dir: str
    words: tuple[Word, ...]
    """`command`, then `args`."""
    has_command: bool
    env: tuple[EnvVariable, ...]
    limits: Mapping[str, Data]
    requests: Mapping[str, Data]
    mounts: tuple[VolumeMount, ...]
    capabilities: frozenset[str]
    privileged: bool

    @property
    def text(self) -> str:
        """All words, to search in."""
        return " ".join(word.text for word in self.words)

    @property
    def amounts(self) -> Mapping[str, Data]:
        """Limits, and requests without a limit."""
        return {**self.requests, **self.limits}

    @property
    def gpu_resource(self) -> str | None:
        """Name of the GPU resource that it requests."""
        return next((name for name in self.amounts if _GPU.fullmatch(name)), None)

    @property
    def gpus(self) -> int | None:
        """Number of GPUs; None if it is a placeholder."""
        return as_count(self.amounts[self.gpu_resource]) if self.gpu_resource else 0

    @property
    def runs_mpirun(self) -> bool:
        return _MPIRUN.search(self.text) is not None

    def mount_of(self, folder: str) -> VolumeMount | None:
        """The mount at a folder."""
        return next((each for each in self.mounts if str(PurePath(each.folder)) == folder), None)


class PodForm(Struct, frozen=True, kw_only=True):
    """A pod template."""

    path: Path
    spec: Mapping[str, Data]
    labels: Mapping[str, Data]
    annotations: Mapping[str, Data]
    containers: tuple[PodContainer, ...]
    volumes: tuple[PodVolume, ...]
    complete: bool = True
    """Whether the manifest has the whole template; that of a TrainJob is in its runtime."""

    @property
    def spec_path(self) -> Path:
        return (*self.path, "spec")

    @property
    def host_network(self) -> bool:
        return self.spec.get("hostNetwork") is True

    @property
    def main(self) -> PodContainer:
        """The container with GPUs, else the first."""
        return next((each for each in self.containers if each.gpu_resource), self.containers[0])

    def volume(self, name: str) -> PodVolume | None:
        """The volume of this name."""
        return next((each for each in self.volumes if each.name == name), None)


class NodeGroup(Struct, frozen=True, kw_only=True):
    """Pods from one template."""

    name: str
    replicas: int | None
    """None if it is a placeholder."""
    pod: PodForm
    path: Path
    launches: bool = False
    """Whether its pod only starts ranks on other pods, as an MPIJob's launcher does."""


class TrainingWorkload(Struct, frozen=True, kw_only=True):
    """An object of a manifest that creates the pods of a training job."""

    target: ManifestObject
    groups: tuple[NodeGroup, ...]
    queue: str
    of_training_kind: bool
    """Whether its kind is for training only."""

    @property
    def title(self) -> str:
        """Such as `PyTorchJob llama`."""
        return f"{self.target.kind} {self.target.name}".strip()

    @property
    def trainers(self) -> tuple[NodeGroup, ...]:
        """The groups whose pods run ranks: those with GPUs if there are GPUs."""
        ranks = [group for group in self.groups if not group.launches]
        return tuple([group for group in ranks if group.pod.main.gpu_resource] or ranks)

    @property
    def nodes(self) -> int | None:
        """Number of pods that run ranks; None if unknown."""
        counts = [group.replicas for group in self.trainers]
        return None if None in counts else sum(count for count in counts if count is not None)

    @property
    def is_distributed(self) -> bool:
        return self.nodes != 1

    @property
    def has_gpus(self) -> bool:
        return any(group.pod.main.gpu_resource for group in self.trainers)

    @property
    def is_training(self) -> bool:
        """Whether its kind is for training, or it requests GPUs or starts a launcher."""
        return self.of_training_kind or self.has_gpus or any(_LAUNCHER.search(each.text) for each in self.containers())

    @property
    def is_benchmark(self) -> bool:
        return any(_BENCHMARK.search(each.text) for each in self.containers())

    @property
    def mpirun(self) -> PodContainer | None:
        """The container that runs `mpirun` for several pods."""
        launchers = [group.pod for group in self.groups if group.launches]
        return next((each for pod in launchers for each in pod.containers if each.runs_mpirun), None)

    def containers(self) -> Iterator[PodContainer]:
        """The containers of all groups."""
        for group in self.groups:
            yield from group.pod.containers

    def variable(self, name: str) -> str | None:
        """The value of a variable in any container, from `env` or its command; empty if it comes from elsewhere."""
        for container in self.containers():
            for each in container.env:
                if each.name == name:
                    return as_text(each.value)
            assigned = re.search(rf"(?<![\w]){name}=[\"']?([^\s\"';]+)", container.text)
            if assigned:
                return assigned[1]
        return None


def read_pod(target: ManifestObject, path: Path) -> PodForm | None:
    """The pod template at a path; None if it has no container."""
    template = as_mapping(target.at(path))
    spec = as_mapping(template.get("spec"))
    metadata = as_mapping(template.get("metadata"))
    at: Path = (*path, "spec", "containers")
    containers = tuple(
        read_container(target, (*at, number))
        for number, each in enumerate(as_list(spec.get("containers")))
        if isinstance(each, dict)
    )
    if not containers:
        return None
    volumes = as_list(spec.get("volumes"))
    return PodForm(
        path=path,
        spec=spec,
        labels=as_mapping(metadata.get("labels")),
        annotations=as_mapping(metadata.get("annotations")),
        containers=containers,
        volumes=tuple(
            _volume(as_mapping(each), (*path, "spec", "volumes", number)) for number, each in enumerate(volumes)
        ),
    )


def read_container(target: ManifestObject, path: Path, *, resources: str = "resources") -> PodContainer:
    """The container at a path; `resources` is the field with its requests and limits."""
    data = as_mapping(target.at(path))
    amounts = as_mapping(data.get(resources))
    security = as_mapping(data.get("securityContext"))
    words = tuple(
        Word(text=str(word), path=(*path, field, number))
        for field in ("command", "args")
        for number, word in enumerate(as_list(data.get(field)))
        if isinstance(word, str | int | float)
    )
    return PodContainer(
        path=path,
        resources_path=(*path, resources),
        name=as_text(data.get("name")),
        image=as_text(data.get("image")),
        working_dir=as_text(data.get("workingDir")),
        words=words,
        has_command=bool(as_list(data.get("command"))),
        env=tuple(
            _variable(as_mapping(each), (*path, "env", number)) for number, each in enumerate(as_list(data.get("env")))
        ),
        limits=as_mapping(amounts.get("limits")),
        requests=as_mapping(amounts.get("requests")),
        mounts=tuple(
            VolumeMount(
                folder=as_text(each.get("mountPath")),
                volume=as_text(each.get("name")),
                read_only=each.get("readOnly") is True,
            )
            for each in map(as_mapping, as_list(data.get("volumeMounts")))
        ),
        capabilities=frozenset(map(as_text, as_list(as_mapping(security.get("capabilities")).get("add")))),
        privileged=security.get("privileged") is True,
    )


def _variable(data: dict[str, Data], path: Path) -> EnvVariable:
    reference = as_mapping(as_mapping(data.get("valueFrom")).get("secretKeyRef"))
    secret = f"{as_text(reference.get('name'))}/{as_text(reference.get('key'))}" if reference else ""
    return EnvVariable(name=as_text(data.get("name")), value=data.get("value"), secret=secret, path=path)


def _volume(data: dict[str, Data], path: Path) -> PodVolume:
    kind = next((key for key in data if key != "name"), "emptyDir")
    return PodVolume(name=as_text(data.get("name")), kind=kind, settings=as_mapping(data.get(kind)), path=path)
