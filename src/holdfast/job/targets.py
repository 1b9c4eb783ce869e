"""Owns where to run, apart from what to run: the target model and the folders that targets are looked up in.

Refuses to own what a back end does with it (launch/), and which fabric `auto` becomes (fabric/catalog.py).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from pydantic import Field

from holdfast.errors import ExitCode, HoldfastError, failure
from holdfast.findings import Finding
from holdfast.job.isolation import Isolation
from holdfast.job.loader import located_in, read_text, validate_model
from holdfast.job.spec import OBJECT_NAME_PATTERN, QUALIFIED_NAME_PATTERN, Bytes, Count, Model, NonEmpty, Number
from holdfast.job.validation_messages import finding_at, suggest
from holdfast.job.yaml_source import YamlSource, parse, printable

LOCAL = "local"
KUBERNETES = "kubernetes"
BACKENDS = (LOCAL, KUBERNETES)

_NAME = re.compile(r"[A-Za-z0-9][-._A-Za-z0-9]{0,63}")

ObjectName = Annotated[str, Field(pattern=OBJECT_NAME_PATTERN)]
QualifiedName = Annotated[str, Field(pattern=QUALIFIED_NAME_PATTERN)]


class CodeDelivery(StrEnum):
    """How ranks come by the code."""

    IN_PLACE = "in-place"
    """They run in the working directory itself."""
    SHIPPED = "shipped"
    """They run in a copy that is made when the run is started and sent to each node."""


class ManifestTemplate(StrEnum):
    """How much a rendered manifest assumes of the place it goes to."""

    DEMO = "demo"
    PRODUCTION = "production"


class Workload(StrEnum):
    """The kind of object that a cluster's operators turn into the nodes of a run."""

    JOBSET = "jobset"
    TRAINJOB = "trainjob"
    """Kubeflow Trainer's, with a runtime of the run's own."""
    PYTORCHJOB = "pytorchjob"
    """Training-operator's."""
    MPIJOB = "mpijob"
    """MPI-operator's; it has no place for holdfast's agents, so it goes with `agent: false`."""


class Volume(Model):
    """A claim that is mounted at /holdfast: the controller sees all of it, ranks see a few folders.

    Those are the checkpoints, their logs, and `folders`.
    """

    claim: ObjectName
    """Name of a PersistentVolumeClaim that many nodes may write to (ReadWriteMany)."""
    size: Bytes | None = None
    """Size of the claim, in bytes or such as `10TiB`, where the run is to make it; it outlives the run."""
    storage_class: ObjectName | None = None
    """Storage class of a claim that is made; none means the cluster's default."""
    folders: tuple[NonEmpty, ...] = ()
    """Further folders of the claim that ranks see, such as `datasets` for /holdfast/datasets; made where missing."""


class FabricDevice(Model):
    """What this cluster calls the devices by which a pod reaches the fabric; what is left out is the catalogue's."""

    resource: QualifiedName | None = None
    """Name under which a device plugin offers them, such as `rdma/hca_shared_devices_a`."""
    per_node: Count | None = Field(default=None, ge=1, le=64)
    """How many of them a node of the job gets."""
    network: NonEmpty | None = None
    """The attachment that Multus gives for each of them, such as `rdma/sriov-rail`."""


class Toleration(Model):
    """A taint of nodes that a run's pods put up with."""

    key: QualifiedName
    """The taint's key."""
    value: str | None = None
    """The taint's value; none means any."""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """The taint's effect; none means any."""


class ControllerPod(Model):
    """The pod of a run's controller: it needs no GPU, and is best kept off the machines that nodes need whole."""

    image: NonEmpty | None = None
    """Its image, with the same version of holdfast as the job's; none means the job's."""
    cpu: Annotated[Number, Field(gt=0)] = 0.25
    """CPU cores that it asks for."""
    cpu_limit: Annotated[Number, Field(gt=0)] | None = None
    """Most CPU cores that it may use; none means what its machine has to spare."""
    memory: Bytes = 256 << 20
    """Memory that it asks for, in bytes or such as `256MiB`."""
    memory_limit: Bytes = 1 << 30
    """Most memory that it may use; a run of 2,048 nodes takes 142 MiB."""
    node_selector: dict[QualifiedName, str] = {}
    """Labels that its machine must have; the target's own are for nodes alone."""
    tolerations: tuple[Toleration, ...] = ()
    """Taints that it puts up with; the target's own are for nodes alone."""


class Target(Model):
    """A place to run jobs."""

    backend: NonEmpty = LOCAL
    """What starts the nodes: `local` or `kubernetes`."""
    isolation: Isolation = Isolation.PROCESS
    """Local back end: `process`, or `netns` for a network namespace per node."""
    code: CodeDelivery = CodeDelivery.IN_PLACE
    """Local back end: `in-place`, or `shipped` to run a copy of the code that later edits leave alone."""
    capacity: Count | None = Field(default=None, ge=1)
    """Local back end: how many nodes it pretends to have machines for.

    None means as many as a job asks for; more than that are spares, with fewer a job with a range starts smaller.
    """
    context: NonEmpty | None = None
    """Cluster back ends: the kubeconfig context; none means the current one."""
    namespace: ObjectName = "default"
    """Cluster back ends: the namespace that jobs go to."""
    queue: ObjectName | None = None
    """Cluster back ends: the queue of jobs that name none; on Kubernetes a LocalQueue of Kueue's."""
    workload: Workload = Workload.JOBSET
    """Kubernetes: the kind of object that a run becomes: `jobset`, `trainjob`, `pytorchjob` or `mpijob`."""
    agent: bool = True
    """Kubernetes: whether holdfast supervises the run; without, the command is started as it is, once on every node."""
    volume: Volume | None = None
    """Kubernetes: the shared volume; without one, checkpoints and log are lost with their pod."""
    fabric_device: FabricDevice = FabricDevice()
    """Kubernetes: what this cluster calls the fabric's devices."""
    fabric_verified: NonEmpty | None = None
    """When and how it was seen that this fabric carries collectives here; `template: production` asks for it."""
    user: Annotated[Count, Field(ge=0, le=2**31 - 1)] = 1000
    """Kubernetes: user and group id that containers run as, and that owns the volume's files; 0 is root."""
    priority_class: ObjectName | None = None
    """Kubernetes: the PriorityClass of the run's pods."""
    image_pull_secrets: tuple[ObjectName, ...] = ()
    """Kubernetes: secrets that hold what the image's registry asks for."""
    node_selector: dict[QualifiedName, str] = {}
    """Kubernetes: labels that a node must have."""
    tolerations: tuple[Toleration, ...] = ()
    """Kubernetes: taints of nodes that are put up with."""
    controller: ControllerPod = ControllerPod()
    """Kubernetes: the pod of the run's controller: image, size, and the machines that it may run on."""
    service_account: ObjectName | None = None
    """Kubernetes: a ready-made ServiceAccount for controllers; none means that each run makes one, with its Role."""
    fabric: NonEmpty | None = None
    """What `fabric: auto` means here; none means the back end's own choice, which is `tcp` locally."""
    checkpoint_root: NonEmpty | None = None
    """Local back end: folder for the checkpoints of jobs that name no `checkpoint.path`, each in one of its own."""
    gpu_resource: QualifiedName = "nvidia.com/gpu"
    """Cluster back ends: the resource by which a GPU is asked for."""
    template: ManifestTemplate = ManifestTemplate.DEMO
    """Cluster back ends: `demo` for a small test cluster, `production` for a shared one."""


def find_target(name: str, *, start: Path, environ: Mapping[str, str], fabrics: Collection[str] = ()) -> Target:
    """The target of this name: from the nearest project above `start` or the current folder, else the user's or ours.

    Raises HoldfastError when there is none, or when its file is wrong; `fabrics` are the catalogue's names.
    """
    if not _NAME.fullmatch(name):
        raise _not_found(name, start, environ)
    path = _file(name, start, environ)
    if path is not None:
        return read_target(path, fabrics)
    if name == LOCAL:
        return Target()
    raise _not_found(name, start, environ)


def read_target(path: Path, fabrics: Collection[str] = ()) -> Target:
    """The target that a file describes; raises HoldfastError with every problem."""
    source = parse(read_text(path), printable(str(path)))
    target = validate_model(source, Target, reserved={})
    if target is not None:
        source.findings.extend((*_backend_problems(target.backend, source), *_fabric_problems(target, source, fabrics)))
    if target is None or source.findings:
        raise HoldfastError(source.all_findings(), ExitCode.INVALID_JOB)
    return target


def located_in_target(finding: Finding, name: str, *, start: Path, environ: Mapping[str, str]) -> Finding:
    """A finding about a field of a target, with the line that it was written on, or else the target's file."""
    path = _file(name, start, environ)
    if path is None:
        return finding
    source = parse(read_text(path), printable(str(path)))
    placed = located_in(finding, source)
    return msgspec.structs.replace(finding, where=source.name) if placed is finding else placed


def known_targets(start: Path, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Names of every target that can be used from `start`, sorted."""
    return tuple(sorted({LOCAL, *_names(start, environ)}))


def target_folders(start: Path, environ: Mapping[str, str]) -> Iterator[Path]:
    """Where targets are looked for, nearest first."""
    projects = [folder for here in (start.absolute(), Path.cwd()) for folder in (here, *here.parents)]
    for folder in dict.fromkeys(projects):
        yield folder / ".holdfast" / "targets"
    home = environ.get("XDG_CONFIG_HOME") or Path(environ.get("HOME", "~")).expanduser() / ".config"
    yield Path(home) / "holdfast" / "targets"


def _file(name: str, start: Path, environ: Mapping[str, str]) -> Path | None:
    """The nearest target file of this name."""
    files = (folder / f"{name}.yaml" for folder in target_folders(start, environ))
    return next((path for path in files if path.is_file()), None)


def _names(start: Path, environ: Mapping[str, str]) -> Iterator[str]:
    for folder in target_folders(start, environ):
        for path in folder.glob("*.yaml"):
            if _NAME.fullmatch(path.stem):
                yield path.stem


def _not_found(name: str, start: Path, environ: Mapping[str, str]) -> HoldfastError:
    known = known_targets(start, environ)
    return failure(
        "unknown-target",
        f"there is no target `{printable(name)}`",
        exit_code=ExitCode.NOT_FOUND,
        evidence=(f"known targets: {', '.join(known)}",),
        remedy=suggest(name, known) or f"Write .holdfast/targets/{printable(name, 64)}.yaml, or use `local`.",
    )


def _backend_problems(backend: str, source: YamlSource) -> Iterator[Finding]:
    if backend not in BACKENDS:
        yield _unknown("unknown-backend", source, "backend", backend, BACKENDS)


def _fabric_problems(target: Target, source: YamlSource, fabrics: Collection[str]) -> Iterator[Finding]:
    if fabrics and target.fabric is not None and target.fabric not in fabrics:
        yield _unknown("unknown-fabric", source, "fabric", target.fabric, fabrics)


def _unknown(code: str, source: YamlSource, field: str, name: str, known: Collection[str]) -> Finding:
    remedy = suggest(name, known) or f"Use one of {', '.join(sorted(known))}."
    what = f"there is no {field} `{printable(name)}`"
    return finding_at(source.location((field,)), (field,), code=code, what=what, remedy=remedy)
