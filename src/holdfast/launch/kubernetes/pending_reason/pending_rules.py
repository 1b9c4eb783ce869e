"""Explains why a run is pending, from its objects, as one finding with evidence.

Pure. It checks messages in the order of the start (namespace, admission, queue, scheduling, image); the first one that
a rule matches is the reason. collect_pending.py reads the objects. A new reason is a row of PENDING_RULES, its
explanation in diagnose/knowledge/cluster_findings.py, and a case in tests/launch/kubernetes/test_pending_rules.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from msgspec import Struct, field

from holdfast.findings import Finding, Owner, Severity
from holdfast.launch.kubernetes.client.api_paths import KubeObject, object_name
from holdfast.launch.kubernetes.client.message_rules import ADMISSION_RULES, MessageRule, match_rule
from holdfast.launch.kubernetes.object_names import QUEUE_LABEL


class PendingRun(Struct, frozen=True, kw_only=True):
    """The objects of a pending run, in API form."""

    owner: KubeObject
    """The run's object, such as a JobSet."""
    namespace: KubeObject = field(default_factory=dict[str, Any])
    pods: Sequence[KubeObject] = ()
    events: Sequence[KubeObject] = ()
    """Events of the owner and of its dependents."""
    workload: KubeObject | None = None
    """Kueue's Workload for the owner, if there is one."""
    age_s: float = math.inf
    """How long the owner exists, by this machine's clock."""


class ClusterMessage(Struct, frozen=True, kw_only=True):
    """A message about the run, and the object it is from."""

    where: str
    text: str


PENDING_RULES: tuple[MessageRule, ...] = (
    *ADMISSION_RULES,
    # The workload is deactivated
    MessageRule(
        pattern=r"workload is deactivated|set to inactive",
        code="workload-deactivated",
        message="it was taken out of its queue",
        remedy='`kubectl patch workload NAME --type=merge -p \'{"spec":{"active":true}}\'` puts it back.',
    ),
    # LocalQueue  doesn't exist
    MessageRule(
        pattern=r"LocalQueue +doesn't exist",
        code="queue-required",
        message="Kueue here holds back whatever is in no queue, and it is in none",
        remedy="Name a `queue` in the target: `kubectl get localqueues` lists those there are.",
        severity=Severity.ERROR,
        owner=Owner.USER,
    ),
    # LocalQueue nowhere doesn't exist; ClusterQueue nowhere doesn't exist
    MessageRule(
        pattern=r"(?P<kind>LocalQueue|ClusterQueue) (?P<name>\S+) doesn't exist",
        code="queue-missing",
        message="there is no {kind} {name}",
        remedy="Name another `queue`, or have it made: `kubectl get localqueues -A` lists those there are.",
        severity=Severity.ERROR,
        owner=Owner.USER,
    ),
    MessageRule(
        pattern=r"(?P<kind>LocalQueue|ClusterQueue) (?P<name>\S+) is (?P<state>inactive|stopped)",
        code="queue-closed",
        message="the {kind} {name} is {state}",
        remedy="`kubectl describe clusterqueue` says why; the cluster's administrator can open it.",
    ),
    # insufficient quota for cpu in flavor h100, previously considered podsets requests (0) + current podset
    # request (200) > maximum capacity (16)
    MessageRule(
        pattern=r"insufficient quota for (?P<what>\S+) in flavor (?P<flavor>[^,]+), previously considered .+? "
        r"\+ current podset request \((?P<asked>[^)]*)\) > maximum capacity \((?P<most>[^)]*)\)",
        code="quota-too-small",
        message="it can never fit: it asks for {asked} of {what}, and the queue has {most} in all in flavor {flavor}",
        remedy="Ask for less, or have the ClusterQueue's quota raised.",
        severity=Severity.ERROR,
    ),
    # insufficient unused quota for nvidia.com/gpu in flavor h100, 32 more needed
    MessageRule(
        pattern=r"insufficient unused quota for (?P<what>\S+) in flavor (?P<flavor>\S+), (?P<more>\S+) more needed",
        code="quota-in-use",
        message="others hold the quota: {more} more of {what} must be free in flavor {flavor}",
        remedy="It starts when they end; a higher `priority_class` goes before them where the queue preempts.",
        severity=Severity.INFO,
    ),
    # topology "fabric" allows to fit only 2 out of 3 pod(s). Total nodes: 8; excluded: resource "nvidia.com/gpu": 3
    MessageRule(
        pattern=r"topology \"(?P<name>[^\"]+)\" (?:allows to fit only|doesn't allow to fit)",
        code="topology-too-full",
        message="no place in topology {name} has room for all of its nodes together",
        remedy="It starts when there is; fewer nodes, or a wider placement, fit sooner.",
        severity=Severity.INFO,
    ),
    # Flavor "h100" does not support TopologyAwareScheduling
    MessageRule(
        pattern=r"[Ff]lavor \"(?P<flavor>[^\"]+)\" does not support TopologyAwareScheduling",
        code="placement-level-missing",
        message="the queue's flavor {flavor} has no topology, and the job has a `placement`",
        remedy="Leave `placement` out, or have the ResourceFlavor given a `topologyName`.",
        severity=Severity.ERROR,
    ),
    # failed to assign flavors to pod set node: no TAS flavor assigned
    MessageRule(
        pattern=r"no TAS flavor assigned",
        code="placement-needs-requests",
        message="the job has a `placement` and requests nothing that the queue has a quota for",
        remedy="Set `resources` (`cpu: 1` is enough), or `gpus_per_node`, or leave `placement` out.",
        severity=Severity.ERROR,
        owner=Owner.USER,
    ),
    # flavor h100 doesn't match node affinity; untolerated taint {...} in flavor h100; resource x unavailable in ...
    MessageRule(
        pattern=r"(?P<why>flavor \S+ doesn't match node affinity|untolerated taint .+? in flavor \S+"
        r"|resource \S+ unavailable in ClusterQueue)",
        code="no-such-flavor",
        message="the queue has no flavor for it: {why}",
        remedy="Compare `node_selector`, `tolerations`, `gpu_resource` with the ClusterQueue's flavors.",
        severity=Severity.ERROR,
        owner=Owner.USER,
    ),
    # Preempted to accommodate a workload (UID: ..., JobUID: ...) due to prioritization in the ClusterQueue; ...
    MessageRule(
        pattern=r"[Pp]reempted to accommodate (?P<whom>a workload \([^)]*\))",
        code="preempted",
        message="it was preempted by {whom}, and waits for room",
        remedy="It starts again from its last checkpoint when there is room.",
        severity=Severity.INFO,
    ),
    # Scheduling is blocked due to non-empty scheduling gates: kueue.x-k8s.io/admission
    MessageRule(
        pattern=r"blocked due to non-empty scheduling gates: (?P<gates>.+)",
        code="pods-gated",
        message="a pod of it may not be scheduled until {gates} is removed",
        remedy="Its owner knows what the gate waits for; Kueue gates pods that are in none of its queues.",
    ),
    # pod group is unschedulable, minCount (3) cannot be satisfied: 1 scheduled, 1 remaining, pod group preemption: ...
    MessageRule(
        pattern=r"minCount \((?P<all>\d+)\) cannot be satisfied: (?P<fit>\d+) scheduled",
        code="pod-group-waiting",
        message="its {all} nodes are placed together or not at all, and now {fit} of them would fit",
        remedy="Wait until other runs end, or ask for fewer nodes, or for less on each.",
    ),
    # 3/3 tasks in gang unschedulable: pod group is not ready, 3 Pending, 3 minAvailable; Pending: 1 Unschedulable, ...
    MessageRule(
        pattern=r"pod group is not ready, .*?(?P<all>\d+) minAvailable",
        code="pod-group-waiting",
        message="its {all} nodes are placed together or not at all, and there is no room for all of them",
        remedy="Wait until other runs end, or ask for fewer nodes, or for less on each.",
    ),
    # 0/4 nodes are available: persistentvolumeclaim "checkpoints" not found.
    MessageRule(
        pattern=r'persistentvolumeclaim "(?P<name>[^"]+)" (?P<state>not found|is being deleted)',
        code="claim-missing",
        message="the volume's claim {name} is {state}",
        remedy="Make it, name another `volume.claim` in the target, or give `volume.size` to have it made.",
        severity=Severity.ERROR,
    ),
    # 0/1 nodes are available: pod has unbound immediate PersistentVolumeClaims.
    MessageRule(
        pattern=r"unbound immediate PersistentVolumeClaims",
        code="claim-unbound",
        message="the volume's claim has no volume yet",
        remedy="`kubectl describe pvc` says what it waits for; most often its storage class is wrong.",
    ),
    # 0/9 nodes are available: 1 node(s) didn't match PersistentVolume's node affinity, 8 node(s) didn't match Pod's ...
    # Older versions: had volume node affinity conflict. With an `Insufficient` resource, room is what is missing.
    MessageRule(
        pattern=r"(?P<nodes>\d+/\d+) nodes are available: (?!.*Insufficient)"
        r".*(?:match PersistentVolume's node affinity|volume node affinity conflict)",
        code="volume-elsewhere",
        message="no machine that its pods may use can mount its volume, which is elsewhere",
        remedy="Select machines near the volume by `node_selector` in the target, or use another claim.",
        severity=Severity.ERROR,
    ),
    # 0/4 nodes are available: 1 node(s) had untolerated taint {nvidia.com/gpu: present}, 3 Insufficient nvidia.com/gpu.
    MessageRule(
        pattern=r"(?P<nodes>\d+/\d+) nodes are available: (?P<why>.+?)\.(?: |$)",
        code="unschedulable",
        message="{nodes} nodes can take its pods: {why}",
        remedy="Compare what it asks for, `node_selector` and `tolerations`, with `kubectl describe nodes`.",
    ),
    MessageRule(
        pattern=r"no nodes available to schedule pods",
        code="unschedulable",
        message="the cluster has no nodes",
        remedy="Wait for its autoscaler, or ask its administrator.",
    ),
    # ErrImagePull: failed to pull ...; ImagePullBackOff: Back-off pulling image "x"
    MessageRule(
        pattern=r"^(?:ErrImagePull|ImagePullBackOff|InvalidImageName|ErrImageNeverPull): (?P<why>.+)",
        code="image-pull-failed",
        message="its image cannot be pulled: {why}",
        remedy="Look at `image`, and at `image_pull_secrets` of the target.",
        severity=Severity.ERROR,
        owner=Owner.USER,
    ),
    # CreateContainerConfigError: secret "x" not found; container has runAsNonRoot and image will run as root
    MessageRule(
        pattern=r"^(?:CreateContainerConfigError|CreateContainerError|RunContainerError): (?P<why>.+)",
        code="container-create-failed",
        message="its container cannot be made: {why}",
        remedy="Fix what it names.",
        severity=Severity.ERROR,
    ),
    # StartError: failed to create containerd task: ... exec: "/usr/sbin/sshd": stat /usr/sbin/sshd: no such file or ...
    MessageRule(
        pattern=r"^(?:StartError|ContainerCannotRun): (?P<why>.*sshd.*)",
        code="image-without-sshd",
        message="its image has no sshd, by which `mpirun` reaches the nodes: {why}",
        remedy="Install openssh-server in the image and openssh-client with it, or take the `agent: false` out of the "
        "target and use `workload: jobset`, where `launch: mpi` needs no ssh.",
        severity=Severity.ERROR,
        owner=Owner.USER,
    ),
    MessageRule(
        pattern=r"^(?:StartError|ContainerCannotRun): (?P<why>.+)",
        code="container-start-failed",
        message="its container's command cannot be started: {why}",
        remedy="See that the image has what it names, and that it may be run.",
        severity=Severity.ERROR,
        owner=Owner.USER,
    ),
    # CrashLoopBackOff: the container ended with exit code 1 (Error), 4 times by now
    MessageRule(
        pattern=r"^CrashLoopBackOff: (?P<why>the container ended .+)",
        code="container-crash-looping",
        message="its container exits repeatedly: {why}",
        remedy="`kubectl logs POD --previous` shows its last output.",
        severity=Severity.ERROR,
        owner=Owner.USER,
    ),
    MessageRule(
        pattern=r"(?:FailedMount|FailedAttachVolume): (?P<why>.+)",
        code="volume-mount-failed",
        message="a volume cannot be mounted: {why}",
        remedy="Look at the claim and at what serves it.",
    ),
    MessageRule(
        pattern=r"^ContainerCreating: ",
        code="pods-starting",
        message="its pods are being made",
        remedy="Nothing: a large image takes minutes.",
        severity=Severity.INFO,
    ),
)
"""Messages of Kubernetes 1.37, Kueue 0.19 and the operators, most specific first."""

START_FAILURES = ("StartError", "ContainerCannotRun")
"""A kubelet's reasons for a container whose command cannot be executed."""

NAMESPACE_TERMINATING = MessageRule(
    pattern="",
    code="namespace-terminating",
    message="its namespace is being deleted",
    remedy="Use another `namespace`.",
    severity=Severity.ERROR,
)
SUSPENDED = MessageRule(
    pattern="",
    code="run-suspended",
    message="it is suspended, and in no queue that would start it",
    remedy="The user who suspended it can set `suspend: false`.",
)
NOT_MANAGED = MessageRule(
    pattern="",
    code="kueue-integration-disabled",
    message="Kueue has made nothing of it for queue {queue}: its integration with {kind} may be off",
    remedy="Turn it on in Kueue's configuration (integrations.frameworks), and see that Kueue runs.",
)
TAKEN_UP_WITHIN_S = 5.0
"""Seconds in which Kueue takes up a new object; later, its integration may be off."""
NOT_TAKEN_UP = MessageRule(
    pattern="",
    code="run-queued",
    message="it is new, and queue {queue} has not taken it up yet",
    remedy="Nothing: that takes Kueue a few seconds.",
    severity=Severity.INFO,
)
QUEUED = MessageRule(
    pattern="",
    code="run-queued",
    message="it stands in queue {queue}, behind others",
    remedy="Nothing: it starts when it is its turn.",
    severity=Severity.INFO,
)
"""Rules for a run without messages."""


def find_pending_reason(seen: PendingRun) -> Finding | None:
    """Why a run is pending; None if no object shows that it is."""
    if ends := seen.namespace.get("metadata", {}).get("deletionTimestamp"):
        return NAMESPACE_TERMINATING.finding("namespace", f"deletionTimestamp: {ends}")
    for clue in _messages(seen):
        if finding := match_rule(PENDING_RULES, clue.where, clue.text):
            return finding
    return _suspended_reason(seen)


def _messages(seen: PendingRun) -> Iterator[ClusterMessage]:
    """Messages about the run, in the order of the start."""
    yield from _event_messages(seen, "FailedCreate")
    if seen.workload is not None:
        conditions = {one["type"]: one for one in seen.workload.get("status", {}).get("conditions", ())}
        waits = conditions.get("QuotaReserved", {}).get("status") != "True"
        for kind in ("QuotaReserved", "Evicted") if waits else ():
            if message := conditions.get(kind, {}).get("message"):
                yield ClusterMessage(where=f"workload {object_name(seen.workload)}, {kind}", text=message)
    if grouped := _group_messages(seen.pods):
        yield ClusterMessage(where=f"podgroup {object_name(seen.owner)}", text="; ".join(grouped))
    for pod in seen.pods:
        yield from _pod_messages(pod)
    yield from _event_messages(seen, "FailedMount", "FailedAttachVolume")


def _group_messages(pods: Sequence[KubeObject]) -> list[str]:
    """What the scheduler says of the pods of a PodGroup; each of them may name another part of the reason."""
    grouped = [pod for pod in pods if "schedulingGroup" in pod.get("spec", {})]
    conditions = (one for pod in grouped for one in pod.get("status", {}).get("conditions", ()))
    waits = (one for one in conditions if one["type"] == "PodScheduled" and one["status"] == "False")
    return sorted({message for one in waits if (message := one.get("message"))})


def _pod_messages(pod: KubeObject) -> Iterator[ClusterMessage]:
    status = pod.get("status", {})
    for condition in status.get("conditions", ()):
        if condition["type"] == "PodScheduled" and condition["status"] == "False" and condition.get("message"):
            gates = ", ".join(gate["name"] for gate in pod.get("spec", {}).get("schedulingGates", ()))
            yield ClusterMessage(
                where=f"pod {object_name(pod)}", text=f"{condition['message']}{f': {gates}' if gates else ''}"
            )
    for container in (*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ())):
        if text := _container_message(container):
            yield ClusterMessage(where=f"pod {object_name(pod)}", text=text)


def _container_message(container: KubeObject) -> str:
    """Why a container does not run; empty if it does."""
    state: KubeObject = container.get("state", {})
    waiting: KubeObject = state.get("waiting", {})
    ended: KubeObject = (
        state.get("terminated") or (container.get("lastState", {}).get("terminated") if waiting else None) or {}
    )
    if ended.get("reason") in START_FAILURES:
        return f"{ended['reason']}: {ended.get('message', '')}"
    if waiting.get("reason") == "CrashLoopBackOff" and ended:
        how = f"exit code {ended.get('exitCode')} ({ended.get('reason', '')})"
        return f"CrashLoopBackOff: the container ended with {how}, {container.get('restartCount', 0)} times by now"
    return f"{waiting.get('reason', '')}: {waiting.get('message', '')}" if waiting else ""


def _event_messages(seen: PendingRun, *reasons: str) -> Iterator[ClusterMessage]:
    """Warnings with these reasons, newest first, without those from before their object created a pod."""
    warnings = [one for one in seen.events if one.get("type") == "Warning" and one.get("reason") in reasons]
    for event in sorted((one for one in warnings if _at(one) > _last_pod_created(seen, one)), key=_at, reverse=True):
        about = event.get("involvedObject", {})
        where = f"{about.get('kind', '')} {about.get('name', '')}".lower()
        mount = event["reason"] in ("FailedMount", "FailedAttachVolume")
        yield ClusterMessage(where=where, text=f"{event['reason']}: {event['message']}" if mount else event["message"])


def _at(event: KubeObject) -> str:
    return str(event.get("lastTimestamp") or event.get("eventTime"))


def _last_pod_created(seen: PendingRun, event: KubeObject) -> str:
    """When the event's object created its last pod; for the owner object, the run's last pod."""
    name = event.get("involvedObject", {}).get("name")
    pods = seen.pods if name == object_name(seen.owner) else [pod for pod in seen.pods if name in _owner_names(pod)]
    return max((pod["metadata"].get("creationTimestamp", "") for pod in pods), default="")


def _owner_names(pod: KubeObject) -> list[str]:
    return [each["name"] for each in pod["metadata"].get("ownerReferences", ())]


def _suspended_reason(seen: PendingRun) -> Finding | None:
    """The reason of a run that is suspended without any message."""
    spec = seen.owner["spec"]
    suspended = bool(spec.get("suspend") or spec.get("runPolicy", {}).get("suspend"))
    if not suspended:
        return None
    clue = (f"{seen.owner['kind']} {object_name(seen.owner)}", "suspend: true")
    queue = seen.owner["metadata"].get("labels", {}).get(QUEUE_LABEL)
    if queue is None:
        return SUSPENDED.finding(*clue)
    found = {"queue": queue, "kind": seen.owner["kind"]}
    if seen.workload is not None:
        return QUEUED.finding(*clue, found)
    return (NOT_TAKEN_UP if seen.age_s < TAKEN_UP_WITHIN_S else NOT_MANAGED).finding(*clue, found)
