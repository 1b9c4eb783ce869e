"""Assigns pods to generations of node slots, from the observed pods and the controller's requests.

Pure: the state is an immutable value, which a restarted backend rebuilds from the run's log.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from msgspec import Struct, field
from msgspec.structs import replace

from holdfast.events import AnyEvent, NodeCreated, NodeRequested
from holdfast.job.backend import BackendNodeState, NodeId, NodeObservation


class PodStatus(Struct, frozen=True, kw_only=True):
    """Observed status of a node's pod."""

    uid: str
    name: str
    node: int
    owner: str = ""
    """Uid of the object that made it, such as its Job."""
    address: str = ""
    machine: str = ""
    """The machine that it was placed on; empty before that."""
    accepted: bool = False
    """Whether its machine's kubelet has begun with it."""
    running: bool = False
    terminating: bool = False
    """Whether it is being deleted while it runs: its agent reports that itself, and its ranks save first."""
    ended: bool = False
    """Whether it has ended or has been deleted."""
    reason: str = ""
    """Why it ended or does not run yet."""
    evicted: str = ""
    """Why the cluster takes it from its machine; empty if it does not."""


class PodAssignments(Struct, frozen=True, kw_only=True):
    """The pods of a run's nodes, and the generations they are bound to."""

    pods: Mapping[str, PodStatus] = field(default_factory=dict[str, PodStatus])
    """Pods that have not ended, by uid."""
    bound: Mapping[NodeId, str] = field(default_factory=dict[NodeId, str])
    """Uid of the pod of each generation; only the newest generation of each node."""
    pending: Mapping[int, NodeId] = field(default_factory=dict[int, NodeId])
    """Generations that wait for a pod, by node."""
    retired: frozenset[str] = frozenset()
    """Pods that must not be bound again."""
    avoided: frozenset[str] = frozenset()
    """Machines on which no further pod is bound."""
    suspended: str = ""
    """Why no pods are created: the queue has not admitted the run, or has evicted it. Empty while admitted."""
    disrupted: Mapping[str, str] = field(default_factory=dict[str, str])
    """Why the cluster takes a bound pod from its machine, by the pod's uid."""
    ended: Mapping[str, PodStatus] = field(default_factory=dict[str, PodStatus])
    """Bound pods that have ended, by uid, until that is reported."""
    evicted: frozenset[NodeId] = frozenset()
    """Generations reported as evicted."""
    silent: frozenset[str] = frozenset()
    """Machines of nodes that were given up while their pods seemed to run: a machine without power is one."""
    reported: Mapping[int, str] = field(default_factory=dict[int, str])
    """The last reported reason why a node does not run yet."""

    def request(self, node_id: NodeId) -> PodAssignments:
        """Wait for a pod for a node; pods of its earlier generations are retired."""
        if node_id in self.bound:
            return self
        former = {uid for held, uid in self.bound.items() if held.node == node_id.node}
        held = {held: uid for held, uid in self.bound.items() if held.node != node_id.node}
        reported = {node: why for node, why in self.reported.items() if node != node_id.node}
        seeming = (pod for uid in former if (pod := self.pods.get(uid)) and pod.running and not pod.terminating)
        return replace(
            self,
            silent=self.silent | {pod.machine for pod in seeming if pod.machine},
            disrupted={uid: why for uid, why in self.disrupted.items() if uid not in former},
            bound=held,
            retired=self.retired | former,
            pending={**self.pending, node_id.node: node_id},
            reported=reported,
        )

    def avoid(self, machine: str) -> PodAssignments:
        """Bind no further pod on a machine."""
        return replace(self, avoided=self.avoided | {machine})

    def use_again(self, machines: Iterable[str]) -> PodAssignments:
        """Bind pods on machines that were avoided."""
        return replace(self, avoided=self.avoided.difference(machines))

    def misplaced_pods(self) -> tuple[PodStatus, ...]:
        """Pods on avoided machines for which a node waits: they are to be deleted, so that others are made."""
        return tuple(
            pod
            for pod in self.pods.values()
            if pod.machine in self.avoided
            and pod.node in self.pending
            and not pod.terminating
            and pod.uid not in self.retired
        )

    def unaccepted_pods(self) -> tuple[PodStatus, ...]:
        """Pods for which a node waits on a silent machine, whose kubelet has yet to begin with them."""
        return tuple(
            pod
            for pod in self.pods.values()
            if pod.machine in self.silent - self.avoided
            and pod.node in self.pending
            and not (pod.accepted or pod.terminating or pod.uid in self.retired)
        )

    def retire(self, pods: Iterable[PodStatus]) -> PodAssignments:
        """Never bind these pods."""
        return replace(self, retired=self.retired | {pod.uid for pod in pods})

    def update_pod(self, pod: PodStatus) -> PodAssignments:
        """Record a pod's status."""
        pods = {uid: known for uid, known in self.pods.items() if uid != pod.uid}
        result = replace(self, pods=pods if pod.ended else {**pods, pod.uid: pod})
        if pod.ended and pod.uid in self.bound.values():
            result = replace(result, ended={**self.ended, pod.uid: pod})
        return result.disrupt(pod.uid, pod.evicted) if pod.evicted else result

    def disrupt(self, uid: str, why: str) -> PodAssignments:
        """Record why the cluster takes a bound pod from its machine; the first reason stays."""
        if uid in self.disrupted or uid not in self.bound.values():
            return self
        return replace(self, disrupted={**self.disrupted, uid: why})

    def suspend(self, why: str) -> PodAssignments:
        """Record why the gang is suspended; an empty reason if it runs."""
        return self if why == self.suspended else replace(self, suspended=why, evicted=frozenset())

    def suspension_outdated(self, pods: Iterable[PodStatus]) -> bool:
        """Whether these pods show that the gang may have been suspended or admitted since the last poll."""
        return any(
            pod.running and not pod.terminating if self.suspended else pod.terminating or pod.ended for pod in pods
        )

    def reconcile(self) -> tuple[PodAssignments, tuple[NodeObservation, ...]]:
        """Bind waiting generations to running pods, unbind ended pods, and return the observations."""
        result, seen = self, tuple[NodeObservation, ...]()
        if self.suspended:
            seen = tuple(
                NodeObservation(node_id=node_id, state=BackendNodeState.EVICTED, reason=self.suspended)
                for node_id in self.bound
                if node_id not in self.evicted
            )
            result = replace(result, evicted=frozenset(self.bound))
        for node_id, uid in self.bound.items():
            if uid in self.disrupted and node_id not in result.evicted:
                why = self.disrupted[uid]
                seen = (*seen, NodeObservation(node_id=node_id, state=BackendNodeState.EVICTED, reason=why))
                result = replace(result, evicted=result.evicted | {node_id})
        for node_id, uid in self.bound.items():
            if uid not in result.pods:
                result = replace(result, bound={held: of for held, of in result.bound.items() if held != node_id})
                why = _end_of(result.ended.get(uid))
                seen = (*seen, NodeObservation(node_id=node_id, state=BackendNodeState.TERMINATED, reason=why))
        result = replace(result, ended={}) if result.ended else result
        for node_id in self.pending.values():
            result, observed = result._bind(node_id)
            seen = (*seen, *observed)
        return result, seen

    def generation(self, node: int, address: str) -> int | None:
        """Generation of the node whose pod has this address; None if it has none yet."""
        for node_id, uid in self.bound.items():
            pod = self.pods.get(uid)
            if node_id.node == node and pod is not None and pod.address == address:
                return node_id.generation
        return None

    def has_pod(self, node_id: NodeId) -> bool:
        """Whether the node has a bound or candidate pod."""
        return node_id in self.bound or any(self._candidates(node_id))

    def retired_pods(self, node_id: NodeId) -> Iterator[PodStatus]:
        """Pods of the node that must not be bound again."""
        return (pod for pod in self.pods.values() if pod.node == node_id.node and pod.uid in self.retired)

    def _candidates(self, node_id: NodeId) -> list[PodStatus]:
        there = (pod for pod in self.pods.values() if pod.node == node_id.node and not pod.terminating)
        return [pod for pod in there if pod.uid not in self.retired and pod.machine not in self.avoided]

    def _bind(self, node_id: NodeId) -> tuple[PodAssignments, tuple[NodeObservation, ...]]:
        candidates = self._candidates(node_id)
        for pod in candidates:
            if pod.running and pod.address:
                wanted = {node: other for node, other in self.pending.items() if node != node_id.node}
                result = replace(self, bound={**self.bound, node_id: pod.uid}, pending=wanted)
                created = NodeObservation(
                    node_id=node_id, state=BackendNodeState.CREATED, backend_id=pod.uid, machine=pod.machine
                )
                return result, (created,)
        misplaced = (pod for pod in self.misplaced_pods() if pod.node == node_id.node)
        avoids = next((f"its pod was placed on {pod.machine}, which this run avoids" for pod in misplaced), "")
        why = next((pod.reason for pod in candidates if pod.reason), self.suspended or avoids)
        if why and why != self.reported.get(node_id.node):
            result = replace(self, reported={**self.reported, node_id.node: why})
            return result, (NodeObservation(node_id=node_id, state=BackendNodeState.UNAVAILABLE, reason=why),)
        return self, ()


def _end_of(pod: PodStatus | None) -> str:
    """What is known of the end of a node's pod, in one clause."""
    if pod is None:
        return "its pod is gone"
    on = f" on {pod.machine}" if pod.machine else ""
    return f"its pod{on} is gone{': ' if pod.reason else ''}{pod.reason}"


def assignments_from_log(events: Iterable[AnyEvent]) -> PodAssignments:
    """Assignments from a run's log: the newest created generation of each node, unless it was given up."""
    held: dict[NodeId, str] = {}
    spent: set[str] = set()
    for event in events:
        if isinstance(event, NodeRequested | NodeCreated):
            node_id = NodeId(node=event.node, generation=event.generation)
            former = {uid for other, uid in held.items() if other.node == node_id.node and other != node_id}
            held = {other: uid for other, uid in held.items() if uid not in former}
            spent |= former
        if isinstance(event, NodeCreated) and event.backend_id:
            held[NodeId(node=event.node, generation=event.generation)] = event.backend_id
    return PodAssignments(bound=held, retired=frozenset(spent))
