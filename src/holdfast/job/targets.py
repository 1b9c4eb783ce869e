"""The model of a target file (where to run), and its validation.

fabric/catalog.py resolves the fabric `auto`; launch/target.py has the kinds of target.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from pydantic import BeforeValidator, Field

from holdfast.errors import ExitCode, HoldfastError, failure
from holdfast.findings import Finding
from holdfast.job.egress import EgressRule, Port
from holdfast.job.isolation import Isolation
from holdfast.job.loader import located_in, validate_model
from holdfast.job.notify import Notification
from holdfast.job.pod_settings import ObjectName, PodSettings, QualifiedName
from holdfast.job.spec import Bytes, Count, Model, NonEmpty, Number
from holdfast.job.target_files import HOST_NAME, LOCAL, known_targets, target_file
from holdfast.job.target_templates import read_target_source
from holdfast.job.validation_messages import finding_at, suggest
from holdfast.job.yaml_source import YamlSource, printable

FIELDS_OF_KIND: Mapping[str, str] = {"hosts": "hosts", "ssh": "hosts", "topology": "hosts", "slurm": "slurm"}
"""Fields that are refused on a target of another kind than this one, where they would have no effect."""


class CodeDelivery(StrEnum):
    """How ranks get the code."""

    IN_PLACE = "in-place"
    """Ranks run in the working directory itself."""
    SHIPPED = "shipped"
    """Ranks run in a copy, made when the run starts and sent to each node."""


class ManifestTemplate(StrEnum):
    """How much a rendered manifest assumes about the cluster."""

    DEMO = "demo"
    PRODUCTION = "production"


class Workload(StrEnum):
    """The kind of Kubernetes object from which an operator creates the nodes of a run."""

    JOBSET = "jobset"
    TRAINJOB = "trainjob"
    """Kubeflow Trainer's, with a runtime per run."""
    PYTORCHJOB = "pytorchjob"
    """Training-operator's."""
    MPIJOB = "mpijob"
    """MPI-operator's."""
    LEADERWORKERSET = "leaderworkerset"
    """LWS's; it never completes, so it requires holdfast's agents and controller."""


class Volume(Model):
    """A PersistentVolumeClaim mounted at /holdfast; the controller sees all of it.

    Ranks see the checkpoints, their logs, and `folders`.
    """

    claim: ObjectName
    """Name of a PersistentVolumeClaim with access mode ReadWriteMany."""
    size: Bytes | None = None
    """Size of the claim, in bytes or such as `10TiB`, if the run creates it; the claim outlives the run."""
    storage_class: ObjectName | None = None
    """Storage class of a created claim; none means the cluster's default."""
    folders: tuple[NonEmpty, ...] = ()
    """More folders of the claim that ranks see, such as `datasets` for /holdfast/datasets; created if missing."""


class Rail(Model):
    """One of several networks by which a node reaches the fabric."""

    resource: QualifiedName | None = None
    """Resource name of this network's devices, of which a node gets one; none means that of `fabric_device`."""
    network: NonEmpty | None = None
    """Multus network attachment, or GKE Network; none means that of `fabric_device`."""


class FabricDevice(Model):
    """This cluster's names for the fabric's devices; omitted fields default to the catalogue's."""

    resource: QualifiedName | None = None
    """Resource name of the device plugin, such as `rdma/hca_shared_devices_a`."""
    per_node: Count | None = Field(default=None, ge=1, le=64)
    """Number of devices per node."""
    network: NonEmpty | None = None
    """Multus network attachment for each device, such as `rdma/sriov-rail`."""
    rails: tuple[Rail, ...] = ()
    """The networks of a machine whose adapters are on several, in the order of its adapters; replaces `per_node`."""
    device_class: ObjectName | None = None
    """DeviceClass of the devices that a ResourceClaim requests (fabrics `dra` and `oke-dranet`)."""
    selector: NonEmpty | None = None
    """CEL expression about a device, in addition to its class."""
    sidecar_image: NonEmpty | None = None
    """Image of the container that serves the network plugin of `gke-tcpx` or `gke-tcpxo`; the versions must fit."""


class Toleration(Model):
    """A node taint that a run's pods tolerate."""

    key: QualifiedName
    """The taint's key."""
    value: str | None = None
    """The taint's value; none means any."""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """The taint's effect; none means any."""


DomainName = Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$")]


class ControllerGateway(Model):
    """A Gateway (Gateway API) by which users reach the controllers of their runs, instead of a port-forward."""

    name: ObjectName
    """Name of the Gateway, which has a listener with `protocol: TLS` and `tls: {mode: Passthrough}`."""
    namespace: ObjectName | None = None
    """Its namespace; none means that of the runs."""
    host: DomainName
    """Domain whose names `RUN.HOST` lead to the Gateway, such as `runs.example`."""
    port: Port = 443
    """Port of the Gateway's listener, as users reach it."""
    address: NonEmpty | None = None
    """Host name or address at which users reach the Gateway; none means that they resolve `RUN.HOST`."""
    proxies: ObjectName | None = None
    """Namespace of the pods that carry the Gateway's traffic; none means that of the Gateway."""


class ControllerPod(Model):
    """The pod of a run's controller; it needs no GPU and should not run on machines that a node uses fully."""

    image: NonEmpty | None = None
    """Container image, with the same holdfast version as the job's image; none means the job's image."""
    cpu: Annotated[Number, Field(gt=0)] = 0.25
    """CPU request, in cores."""
    cpu_limit: Annotated[Number, Field(gt=0)] | None = None
    """CPU limit, in cores; none means no limit."""
    memory: Bytes = 256 << 20
    """Memory request, in bytes or such as `256MiB`."""
    memory_limit: Bytes = 1 << 30
    """Memory limit, in bytes or such as `1GiB`; a run of 2,048 nodes takes 142 MiB."""
    node_selector: dict[QualifiedName, str] = {}
    """Labels that its machine must have; the target's `node_selector` applies to nodes only."""
    tolerations: tuple[Toleration, ...] = ()
    """Taints that it tolerates; the target's `tolerations` apply to nodes only."""
    queue: ObjectName | None = None
    """Kueue LocalQueue that admits it in a tree of manifests, where Kueue does not see that it belongs to the run."""
    gateway: ControllerGateway | None = None
    """Gateway by which users reach it; none means a port-forward through the API server."""


HostName = Annotated[str, Field(pattern=HOST_NAME)]


AbsolutePath = Annotated[str, Field(pattern=r"^/[^\s]{0,200}$")]


class SshSettings(Model):
    """How holdfast reaches the hosts of a target, besides what OpenSSH's own configuration says."""

    python: NonEmpty = "python3"
    """Python of the job's environment on every host, such as `/opt/venv/bin/python`; it need not have holdfast."""
    folder: AbsolutePath | None = None
    """Absolute folder on every host for the files of runs; none means `/var/tmp/holdfast-USER`."""
    config: NonEmpty | None = None
    """Configuration file of OpenSSH; none means the user's own."""
    addresses: dict[HostName, NonEmpty] = {}
    """Addresses by which hosts reach one another; by default each host's own end of the ssh connection."""
    shared_connection: bool = False
    """Whether to use a connection that you have opened (`ControlMaster`), where logging in asks for a second factor."""


InterfaceName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9]{0,9}$")]
"""A network interface of a local node."""


SlurmWord = Annotated[str, Field(pattern=r"^[^\s\"'`$\\]{1,256}$")]
"""A value of an option of sbatch."""


class ControllerPlace(StrEnum):
    """Where the controller of a Slurm run is."""

    LOGIN = "login"
    """Where `holdfast run` is typed; that machine has to stay up."""
    ALLOCATION = "allocation"
    """On the first node of the allocation; the folder of runs has to be on a file system that nodes share."""


class SlurmSettings(Model):
    """What a run asks Slurm for, and where Python is on its nodes."""

    partition: SlurmWord | None = None
    """Partition, or several with commas; none means the cluster's default."""
    account: SlurmWord | None = None
    """Account that is charged; none means the user's default."""
    qos: SlurmWord | None = None
    """Quality of service; none means the account's default."""
    time: SlurmWord | None = None
    """Time limit of an allocation, such as `24:00:00`; a run that reaches it continues in the next one."""
    constraint: SlurmWord | None = None
    """Features that nodes must have."""
    gres: SlurmWord | None = None
    """Generic resources of each node; none means `gpu:N` for a job with N GPUs on a node."""
    reservation: SlurmWord | None = None
    """Reservation to use."""
    spares: Annotated[Count, Field(ge=0, le=1024)] = 0
    """Nodes to allocate in addition to the job's, which replace lost ones immediately."""
    options: tuple[Annotated[str, Field(pattern=r"^--[a-z][a-z-]*(=[^\s\"'`$\\]{1,256})?$")], ...] = ()
    """Further options of sbatch, such as `--exclusive`."""
    controller: ControllerPlace = ControllerPlace.LOGIN
    """Where the controller is: `login`, the machine that starts the run, or `allocation`, the first of its nodes."""
    python: NonEmpty | None = None
    """Python with holdfast on the nodes; none means the path of the Python that starts the run."""
    folder: AbsolutePath | None = None
    """Absolute folder on each node for the files of runs; none means `/var/tmp/holdfast-USER`."""
    address: NonEmpty | None = None
    """With `controller: login`: address by which nodes reach that machine; none means that of its host name."""

    @property
    def in_allocation(self) -> bool:
        """Whether the controller is on a node of the allocation."""
        return self.controller is ControllerPlace.ALLOCATION


class GangScheduler(StrEnum):
    """What places all nodes of a run on Kubernetes or none, by a PodGroup."""

    KUBERNETES = "kubernetes"
    VOLCANO = "volcano"


def _gang_scheduler(value: object) -> object:
    return {True: GangScheduler.KUBERNETES, False: None}.get(value, value) if isinstance(value, bool) else value


class Evictions(StrEnum):
    """How many of a run's nodes the cluster may evict at a time, as a drain does."""

    ANY = "any"
    REPLICA = "replica"
    """As many as one replica has: of a run with one replica, any."""
    NONE = "none"


class TargetSpec(Model):
    """Where jobs run, as its file says."""

    extends: NonEmpty | None = None
    """Template whose fields this file overrides: `configmap://NAMESPACE/NAME:VERSION`, or the path of a file."""
    kind: NonEmpty = LOCAL
    """Kind of target: `local`, `hosts`, `slurm` or `kubernetes`."""
    isolation: Isolation = Isolation.PROCESS
    """Local target: `process`, or `netns` for a network namespace per node."""
    interfaces: dict[InterfaceName, Annotated[Count, Field(gt=0)]] = {}
    """Local target, `netns`: network interfaces of each node and their Mbit/s; the first one reaches the controller.

    None means one interface, `eth0`, without a limit.
    """
    code: CodeDelivery = CodeDelivery.IN_PLACE
    """Local target: `in-place`, or `shipped` to run a copy of the code that later edits do not affect."""
    capacity: Count | None = Field(default=None, ge=1)
    """Local target: number of simulated machines.

    None means as many as a job requests. Extra machines are spares; with fewer, an elastic job starts smaller.
    """
    hosts: tuple[HostName, ...] = ()
    """Hosts reached over ssh, one node each; those that a job does not need are spares."""
    topology: NonEmpty | None = None
    """Hosts: JSON file with labels of each host, as for `holdfast plan --topology`; ranks are laid out by it.

    None means that nodes have the order of `hosts`.
    """
    ssh: SshSettings = SshSettings()
    """Hosts: how to reach them, and where Python is."""
    slurm: SlurmSettings = SlurmSettings()
    """Slurm: what a run asks for, and where Python is on its nodes."""
    context: NonEmpty | None = None
    """Cluster targets: the kubeconfig context; none means the current one."""
    namespace: ObjectName = "default"
    """Cluster targets: the namespace of the jobs."""
    queue: ObjectName | None = None
    """Cluster targets: the default queue of jobs; on Kubernetes a Kueue LocalQueue."""
    multikueue: dict[ObjectName, NonEmpty] = {}
    """Kubernetes: the kubeconfig context of each MultiKueueCluster to which the queue may send a run; none means that
    runs stay in this cluster."""
    workload: Workload = Workload.JOBSET
    """Kubernetes: kind of object of a run: `jobset`, `trainjob`, `pytorchjob`, `mpijob` or `leaderworkerset`."""
    agent: bool = True
    """Kubernetes: whether holdfast supervises the run; otherwise the command starts unmodified, once per node."""
    volume: Volume | None = None
    """Kubernetes: the shared volume; without one, checkpoints and logs are lost with their pod."""
    topology_levels: dict[NonEmpty, QualifiedName] = {}
    """Kubernetes: names that jobs use as `placement.level`, such as `rack`, and the machine label of each."""
    fabric_device: FabricDevice = FabricDevice()
    """Kubernetes: this cluster's names for the fabric's devices."""
    machine: NonEmpty | None = None
    """Kind of machine for `holdfast plan`, such as `h100-ndr`; none means that it must be given there."""
    price_per_gpu_hour: Annotated[Number, Field(gt=0)] | None = None
    """Price of one GPU for one hour, in any currency, for `holdfast plan`; none means that no cost is predicted."""
    fabric_verified: NonEmpty | None = None
    """When and how this fabric was verified to carry collectives here; `template: production` requires it."""
    user: Annotated[Count, Field(ge=0, le=2**31 - 1)] = 1000
    """Kubernetes: user and group id that containers run as, and that owns the volume's files; 0 is root."""
    priority_class: ObjectName | None = None
    """Kubernetes: the PriorityClass of the run's pods."""
    image_pull_secrets: tuple[ObjectName, ...] = ()
    """Kubernetes: secrets with the credentials of the image registry."""
    node_selector: dict[QualifiedName, str] = {}
    """Kubernetes: labels that a machine must have."""
    tolerations: tuple[Toleration, ...] = ()
    """Kubernetes: node taints that the pods tolerate."""
    pod: PodSettings = PodSettings()
    """Kubernetes: what the run's pods have in addition, such as labels, volumes, or a patch."""
    controller: ControllerPod = ControllerPod()
    """Kubernetes: the controller's pod: image, resources, and scheduling."""
    notify: tuple[Notification, ...] = ()
    """Whom to tell when a run fails, ends, recovers, continues with fewer nodes, or hangs."""
    pod_monitor: bool = False
    """Kubernetes: whether each run gets a PodMonitor, by which the Prometheus operator scrapes its controller."""
    egress: tuple[EgressRule, ...] | None = None
    """Kubernetes: to what a run's pods may connect besides one another and DNS; none means everything."""
    service_account: ObjectName | None = None
    """Kubernetes: an existing ServiceAccount for controllers; none means that each run creates one, with its Role."""
    pod_group: Annotated[
        GangScheduler | None, BeforeValidator(_gang_scheduler, json_schema_input_type=bool | GangScheduler | None)
    ] = None
    """Kubernetes: the scheduler that places all nodes of a run or none, by a PodGroup; none means one node at a time.

    `kubernetes`, or `true`, is that of Kubernetes 1.37 or later with the feature gate GenericWorkload, on the API
    server and the scheduler. `volcano` is Volcano's.
    """
    volcano_queue: ObjectName | None = None
    """Kubernetes: Volcano's queue of a run, with `pod_group: volcano`; none means Volcano's `default`."""
    evictions: Evictions = Evictions.REPLICA
    """Kubernetes: nodes of a run that drains may evict at a time: `any`, `replica` for those of one replica, `none`."""
    ttl_s: Annotated[Count, Field(ge=60, le=2**31 - 1)] = 86_400
    """Kubernetes: seconds for which a finished run's objects stay, for inspection; TrainJobs stay until deleted."""
    fabric: NonEmpty | None = None
    """What `fabric: auto` means on this target; none means the default of its kind, `tcp` locally."""
    checkpoint_root: NonEmpty | None = None
    """Local target: folder for checkpoints of jobs without `checkpoint.path`, with one subfolder per run."""
    gpu_resource: QualifiedName = "nvidia.com/gpu"
    """Cluster targets: the resource name of a GPU."""
    template: ManifestTemplate = ManifestTemplate.DEMO
    """Cluster targets: `demo` for a small test cluster, `production` for a shared one."""


NAMES_IN_KUBERNETES: Mapping[str, str] = {
    "labels": "pod.labels",
    "annotations": "pod.annotations",
    "imagePullPolicy": "pod.pull_policy",
    "serviceAccountName": "pod.service_account",
    "runtimeClassName": "pod.runtime_class",
    "schedulerName": "pod.scheduler",
    "resourceClaims": "pod.resource_claims",
    "volumes": "pod.volumes",
    "volumeMounts": "pod.volumes",
    "envFrom": "pod.env_from",
    "ephemeralStorage": "pod.ephemeral_storage",
    "patch": "pod.patch",
    "affinity": "pod.patch.spec.affinity",
    "topologySpreadConstraints": "pod.patch.spec.topologySpreadConstraints",
    "containers": "pod.patch.spec.containers",
    "initContainers": "pod.patch.spec.initContainers",
    "init_containers": "pod.patch.spec.initContainers",
    "sidecars": "pod.patch.spec.initContainers",
    "hostIPC": "pod.patch.spec.hostIPC",
    "host_ipc": "pod.patch.spec.hostIPC",
    "dnsConfig": "pod.patch.spec.dnsConfig",
    "securityContext": "pod.patch.spec.securityContext",
    "nodeSelector": "node_selector",
    "priorityClassName": "priority_class",
    "imagePullSecrets": "image_pull_secrets",
    "runAsUser": "user",
    "ttlSecondsAfterFinished": "ttl_s",
    "persistentVolumeClaim": "volume.claim",
    "storageClassName": "volume.storage_class",
}
"""Names of Kubernetes' fields, or close to them, and the field of a target that sets each."""


def find_target(
    name: str,
    *,
    start: Path,
    environ: Mapping[str, str],
    fabrics: Collection[str] = (),
    kinds: Collection[str] = (),
) -> TargetSpec:
    """Find a target: in the nearest project above `start` or the current folder, else the user's, else built in.

    Raises HoldfastError if there is none, or if its file is invalid; `fabrics` and `kinds` are the names that exist.
    """
    path = target_file(name, start, environ)
    if path is not None:
        return read_target(path, fabrics=fabrics, kinds=kinds)
    if name == LOCAL:
        return TargetSpec()
    raise _not_found(name, start, environ)


def read_target(
    path: Path, *, fabrics: Collection[str] = (), kinds: Collection[str] = (), published: str | None = None
) -> TargetSpec:
    """The target that a file and its template describe; raises HoldfastError with every problem.

    `published` is the text of a published template that is not stored yet.
    """
    source = read_target_source(path, published=published)
    target = validate_model(source, TargetSpec, hints=NAMES_IN_KUBERNETES)
    if target is not None:
        if kinds and target.kind not in kinds:
            source.findings.append(
                _unknown("unknown-target-kind", source, "kind", target.kind, kinds, noun="kind of target")
            )
        for name, kind in FIELDS_OF_KIND.items():
            if name in target.model_fields_set and target.kind != kind:
                source.findings.append(
                    finding_at(
                        source.location((name,)),
                        (name,),
                        code="unknown-field",
                        what=f"`{name}` is not a field of a target with `kind: {printable(target.kind)}`",
                        remedy=f"Remove it; targets with `kind: {kind}` have it.",
                    )
                )
        if fabrics and target.fabric is not None and target.fabric not in fabrics:
            source.findings.append(_unknown("unknown-fabric", source, "fabric", target.fabric, fabrics, noun="fabric"))
    if target is None or source.findings:
        raise HoldfastError(source.all_findings(), ExitCode.INVALID_JOB)
    return target


def located_in_target(finding: Finding, name: str, *, start: Path, environ: Mapping[str, str]) -> Finding:
    """The finding, with the line of the target's or its template's field it is about, or else the target's file."""
    path = target_file(name, start, environ)
    if path is None:
        return finding
    source = read_target_source(path)
    placed = located_in(finding, source)
    return msgspec.structs.replace(finding, where=source.name) if placed is finding else placed


def _not_found(name: str, start: Path, environ: Mapping[str, str]) -> HoldfastError:
    known = known_targets(start, environ)
    return failure(
        "unknown-target",
        f"there is no target `{printable(name)}`",
        exit_code=ExitCode.NOT_FOUND,
        evidence=(f"known targets: {', '.join(known)}",),
        remedy=suggest(name, known) or f"Write .holdfast/targets/{printable(name, 64)}.yaml, or use `local`.",
    )


def _unknown(code: str, source: YamlSource, field: str, name: str, known: Collection[str], *, noun: str) -> Finding:
    remedy = suggest(name, known) or f"Use one of {', '.join(sorted(known))}."
    what = f"there is no {noun} `{printable(name)}`"
    return finding_at(source.location((field,)), (field,), code=code, what=what, remedy=remedy)
