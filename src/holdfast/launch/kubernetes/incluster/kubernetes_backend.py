"""Runs nodes as Kubernetes pods: operators create them, this backend watches them and replaces them on request.

The run's log records which pod is which generation of a node, for the next controller.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Any

from msgspec.structs import replace

from holdfast.events import Outcome
from holdfast.events.log import read_events
from holdfast.findings import Finding, Owner, Severity
from holdfast.job.backend import BackendNodeState, NodeId, NodeObservation
from holdfast.job.quarantine import Candidate, Certainty, Decision, MachineEvidence, Quarantine, judge
from holdfast.job.quarantine_text import avoided_finding, cordoned, decision_finding, describe, not_cordoned
from holdfast.job.run_spec import RunSpec
from holdfast.job.spec import Job
from holdfast.launch.kubernetes.client.api_errors import ApiError, ApiUnavailable, ClusterError
from holdfast.launch.kubernetes.client.api_paths import NODES_PATH, PODS_PATH
from holdfast.launch.kubernetes.client.cluster import ClusterClient
from holdfast.launch.kubernetes.incluster.event_poster import EventPoster
from holdfast.launch.kubernetes.incluster.machine_notices import announced_end, selectors
from holdfast.launch.kubernetes.incluster.pod_assignment import PodAssignments, PodStatus, assignments_from_log
from holdfast.launch.kubernetes.incluster.pod_reader import pod_status
from holdfast.launch.kubernetes.object_names import (
    CANCELLED_REASON,
    NODE,
    PART_LABEL,
    QUEUE_LABEL,
    RUN_LABEL,
    ObjectNames,
)
from holdfast.launch.kubernetes.quarantine_object import ANNOTATION, NAME, QuarantineObject
from holdfast.launch.kubernetes.workload_catalog import CATALOG, pod_owner
from holdfast.launch.rank_env import NodeResources
from holdfast.run_dir import RunDir

log = logging.getLogger("holdfast.controller")

IMAGE_PYTHON = "python"
"""The Python of the image."""
RETRY_S = 1.0
MAX_POLL_S = 10.0
"""Longest time between two polls of the gang's object while nothing changes."""
MIN_OWNER_POLL_S = 0.2
"""Least time between two requests for the gang's object; one response serves all pod changes in between."""
MACHINES_POLL_S = 5.0
"""Least time between two polls of the machines' taints; of many machines one request per second."""
KUBELET_ACCEPT_S = 3.0
"""Time for a kubelet to begin with a pod, on a machine that may have lost its power. A kubelet takes less than 1 s."""
POD_EXIT_TIMEOUT_S = 60.0
"""Longest time that pods may take to exit after their agents receive the shutdown order."""


def pod_resources(job: Job) -> tuple[NodeResources, ...]:
    """Resources of a node: its machine, or the part of it that its container sees."""
    return (NodeResources(cpus=job.resources.cpu or job.local_world_size, python=IMAGE_PYTHON),) * job.nodes.max


def controller_host(folder: RunDir, _host: str) -> str:
    """DNS name of the controller."""
    return ObjectNames(folder.run_id).controller


class KubernetesBackend:
    """Watches a run's pods, and replaces those that the controller gives up."""

    def __init__(self, *, folder: RunDir, accepted: RunSpec, cluster: ClusterClient | None = None) -> None:
        self._run = folder.run_id
        self._kind, self._owner = CATALOG[accepted.workload], pod_owner(accepted.workload)
        self._cluster = cluster or ClusterClient()
        self._pods = assignments_from_log(read_events(folder.events)) if folder.events.exists() else PodAssignments()
        self._observed: asyncio.Queue[NodeObservation] = asyncio.Queue()
        self._owner_polled_at = -MIN_OWNER_POLL_S
        """Monotonic time of the last request for the gang's object."""
        self._target, self._node_selector = accepted.target, accepted.node_selector
        self._from_tree = accepted.from_tree
        self._quarantine = QuarantineObject(self._cluster)
        self._poster = EventPoster(folder, self._cluster, f"{self._owner.path}/{self._run}")
        self._told_not_remembered = False
        self._leaving = frozenset[str]()
        """Machines whose end is announced, and from which the run's pods were taken."""
        self._pods_listed = asyncio.Event()
        self._refusals: Counter[int] = Counter()
        """How often in a row a node's pod was placed on an avoided machine, by node number."""
        self._refusing: set[asyncio.Task[None]] = set()
        self._awaited: set[str] = set()
        """Pods on machines that may have lost their power, by uid, whose kubelet has some time to begin with them."""
        self._no_pods_left = asyncio.Event()
        """Set while every node's pod is gone or terminating."""

    async def submit(self, node_ids: tuple[NodeId, ...]) -> None:
        """Bind each node to a pod as soon as one runs; the gang's object makes pods for all nodes."""
        for node_id in node_ids:
            self._update(self._pods.request(node_id))

    async def observe(self) -> AsyncIterator[NodeObservation]:
        """Yields an observation when a node's pod starts to run, cannot be scheduled, or is gone."""
        looking = asyncio.gather(self._watch_pods(), self._poll_owner(), self._poll_machines(), self._poster.run())
        try:
            while True:
                seeing = asyncio.ensure_future(self._observed.get())
                await asyncio.wait((looking, seeing), return_when=asyncio.FIRST_COMPLETED)
                if looking.done():
                    seeing.cancel()
                    looking.result()  # it ends only with an error; unraised, the run would hang
                yield seeing.result()
        finally:
            looking.cancel()

    def generation(self, node: int, address: str) -> int | None:
        """Generation of the node whose pod has this address; None while unknown, or for a retired pod."""
        return self._pods.generation(node, address)

    async def replace_node(self, node_id: NodeId, reason: str) -> None:
        """Replace the node's pod, immediately if it has its own Job: deleting the Job makes its operator recreate it.

        A replacement that Kubernetes makes by itself comes after a back-off that grows each time.
        """
        self._update(self._pods.request(node_id))
        if self._pods.has_pod(node_id) or self._pods.suspended:
            return  # a suspended gang gets all its pods when it is admitted
        log.info("replacing node%s: %s", node_id.node, reason)
        await self._delete_pods(node_id.node, self._pods.retired_pods(node_id))

    async def _delete_pods(self, node: int, pods: Iterable[PodStatus]) -> None:
        """Delete pods of a node, or the Job that it has for itself, so that its operator makes another one.

        Only the Jobs of known pods: one that was made meanwhile may stay without a pod if it is deleted too.
        """
        known = tuple(pods)
        if self._kind.job_per_node:
            job = f"/apis/batch/v1/namespaces/{{namespace}}/jobs/{self._run}-{NODE}-{node}"
            for owner in dict.fromkeys(pod.owner for pod in known) or ("",):
                await self._delete(job, uid=owner)
            return
        for pod in known:
            await self._delete(f"{PODS_PATH}/{pod.name}", uid=pod.uid)

    async def quarantined(self) -> tuple[Finding, ...]:
        """Bind no pod on a machine that other runs have quarantined: its affinity is of the time of its start."""
        try:
            known, findings = await self._quarantine.read()
        except ApiError as refused:
            log.warning("the quarantined machines cannot be read: %s", refused)
            return ()
        rows = tuple(row for row in known.active(time.time()) if row.run != self._run)
        for row in rows:
            self._update(self._pods.avoid(row.machine))
        return (*findings, *avoided_finding(rows, None, self._target))

    async def avoid_machine(
        self, node_id: NodeId, machine: str, evidence: MachineEvidence | None
    ) -> tuple[Finding, ...]:
        """Bind no further pod on the machine, quarantine it for later runs, and cordon it if a device surely failed.

        The template of a gang's pods cannot be changed while it runs, so the scheduler may choose the machine again.
        Such a pod is deleted as soon as it is placed, and another one made.
        """
        if not machine:
            return ()
        self._update(self._pods.avoid(machine))
        return await self._remember(machine, evidence) if evidence else ()

    async def _remember(self, machine: str, evidence: MachineEvidence) -> tuple[Finding, ...]:
        candidate, decisions = Candidate(machine=machine, run=self._run, evidence=evidence), list[Decision]()
        machines = len({*await self._machines(), machine})

        def decide(known: Quarantine) -> Quarantine:
            decisions.append(judge(known, candidate, machines=machines, now=time.time()))
            return decisions[-1].quarantine

        try:
            findings = await self._quarantine.change(decide)
        except ApiError as refused:
            told = () if self._told_not_remembered else (_not_remembered(machine, refused),)
            self._told_not_remembered = True
            return told
        decision = decisions[-1]
        told = decision_finding(decision, candidate, self._target)
        findings = (*findings, told) if told else findings
        if (row := decision.accepted) and evidence.certainty is Certainty.CERTAIN:
            findings = (*findings, await self._cordon(machine, describe(row)))
        return findings

    async def _machines(self) -> frozenset[str]:
        """The target's machines; where this account may not list them, those that this run's pods were on."""
        try:
            selector = ",".join(f"{key}={value}" for key, value in sorted(self._node_selector.items()))
            listed = await self._cluster.get(NODES_PATH, **({"labelSelector": selector} if selector else {}))
            return frozenset(each["metadata"]["name"] for each in listed["items"])
        except ApiError:
            return frozenset(pod.machine for pod in self._pods.pods.values() if pod.machine) | self._pods.avoided

    async def _cordon(self, machine: str, why: str) -> Finding:
        marked = {"metadata": {"annotations": {ANNOTATION: why}}, "spec": {"unschedulable": True}}
        try:
            await self._cluster.patch(f"{NODES_PATH}/{machine}", marked)
        except ApiError as refused:
            remedy = f"Cordon it (`kubectl cordon {machine}`) and have it repaired."
            return not_cordoned(machine, (str(refused),), remedy)
        return cordoned(machine, self._target)

    async def cordon(self, node_id: NodeId) -> None:
        """Nothing to do: the cluster chooses the machines."""

    async def uncordon(self, node_id: NodeId) -> None:
        """Nothing to do, as in `cordon`."""

    async def report_outcome(self, outcome: Outcome, exit_code: int, reason: str) -> None:
        """Mark the run's object as failed: agents exit with code 0, which operators count as success.

        A cancelled run is marked too if it is from a tree: its objects stay, and without the mark it would start again.
        An object that never completes is always marked: its operator knows no end.
        """
        by_operator = outcome is Outcome.SUCCEEDED or (outcome is Outcome.CANCELLED and not self._from_tree)
        if by_operator and not self._owner.never_completes:
            return
        why = f"{reason} (exit code {exit_code})"
        while True:
            try:
                await self._mark_ended(outcome, why)
                return
            except ApiUnavailable as error:
                log.warning("the end of the run cannot be written to its object yet: %s", error)
                await asyncio.sleep(RETRY_S)
            except ApiError as refused:
                if refused.status != HTTPStatus.CONFLICT:
                    log.warning("the end of the run is not written to its object: %s", refused)
                    return

    async def _mark_ended(self, outcome: Outcome, why: str) -> None:
        """Write how the run ended to the gang's object; after a failure its operator creates no more pods.

        Raises ClusterError.
        """
        path = f"{self._owner.path}/{self._run}"
        known = await self._cluster.get(path)
        at = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        condition, reason = _END_CONDITIONS[outcome]
        ended = {"type": condition, "status": "True", "reason": reason, "message": why, "lastTransitionTime": at}
        others = [each for each in known.get("status", {}).get("conditions", ()) if each["type"] != condition]
        more = {name: value.format(at=at) for name, value in self._owner.failed_status.items()}
        version = {"resourceVersion": known["metadata"]["resourceVersion"]}
        await self._cluster.patch(
            f"{path}/status", {"metadata": version, "status": {"conditions": [*others, ended]} | more}
        )

    async def cancel(self) -> None:
        """Wait until the agents' pods exit, and delete those that do not."""
        if self._kind.never_completes:
            await self._scale_to_zero()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(POD_EXIT_TIMEOUT_S):
                await self._no_pods_left.wait()
        for pod in tuple(self._pods.pods.values()):
            await self._delete(f"{PODS_PATH}/{pod.name}")
        await self._poster.flush()

    async def _watch_pods(self) -> None:
        """Watch the pods, and reconnect to the API server after every failure."""
        selector = f"{RUN_LABEL}={self._run},{PART_LABEL}={NODE}"
        while True:
            all_of_them = True
            try:
                async for known in batches(self._cluster.watch_pods(selector)):
                    pods = [pod for each in known if (pod := pod_status(each, self._kind.node_labels))]
                    if all_of_them or self._pods.suspension_outdated(pods):
                        await self._read_owner()
                    assignments = replace(self._pods, pods={}) if all_of_them else self._pods
                    for pod in pods:
                        assignments = assignments.update_pod(pod)
                    self._pods_listed.set()
                    self._update(assignments)
                    all_of_them = False
            except ApiUnavailable as error:
                log.warning("the watch of pods failed: %s", error)
            await asyncio.sleep(RETRY_S)

    async def _poll_owner(self) -> None:
        """Poll whether the gang is suspended while nodes are missing or terminating."""
        pause_s, before = RETRY_S, self._pods
        while True:
            await asyncio.sleep(pause_s)
            assignments = self._pods
            pause_s = min(MAX_POLL_S, 2 * pause_s) if assignments == before else RETRY_S
            if (
                assignments.pending
                or assignments.suspended
                or any(pod.terminating for pod in assignments.pods.values())
            ):
                await self._read_owner()
            else:
                pause_s = RETRY_S
            before = assignments

    async def _poll_machines(self) -> None:
        """Take nodes from machines whose end is announced: their ranks save in time, whatever grace they will get.

        Without the permission to list machines, they save when their pods are taken.
        """
        while True:
            machines = {pod.machine for uid in self._pods.bound.values() if (pod := self._pods.pods.get(uid))} - {""}
            chosen = tuple(selectors(machines))
            try:
                for selector in chosen:
                    listed = await self._cluster.get(NODES_PATH, labelSelector=selector, resourceVersion="0")
                    for machine in listed["items"]:
                        await self._leave(machine["metadata"]["name"], announced_end(machine))
            except ApiUnavailable as error:
                log.warning("the machines' taints cannot be read: %s", error)
            except ApiError as refused:
                log.info("no taints of machines are read: %s", refused)
                return
            await asyncio.sleep(max(MACHINES_POLL_S, float(len(chosen))))

    async def _leave(self, machine: str, taint: str) -> None:
        """Delete the nodes' pods on a machine with a taint that announces its end, once while it has the taint."""
        if not taint:
            self._leaving -= {machine}
            return
        if machine in self._leaving:
            return
        self._leaving |= {machine}
        for pod in [pod for uid, pod in self._pods.pods.items() if uid in self._pods.bound.values()]:
            if pod.machine == machine and not pod.terminating:
                self._update(self._pods.disrupt(pod.uid, f"the end of {machine} is announced (taint {taint})"))
                await self._delete(f"{PODS_PATH}/{pod.name}")

    async def _read_owner(self) -> None:
        """Read whether the gang is suspended now. That changes before its pods do, so an older response is useless."""
        await asyncio.sleep(self._owner_polled_at + MIN_OWNER_POLL_S - time.monotonic())
        self._owner_polled_at = time.monotonic()
        try:
            gang = await self._cluster.get(f"{self._owner.path}/{self._run}")
        except ClusterError:
            return  # keep the last known state; the pod watch logs the outage
        self._update(self._pods.suspend(_suspended_reason(gang)))

    def _update(self, assignments: PodAssignments) -> None:
        """Apply a new state and emit the resulting observations."""
        observed = tuple[NodeObservation, ...]()
        if self._pods_listed.is_set():
            assignments, observed = assignments.reconcile()
        self._pods = assignments
        stays = any(not pod.terminating for pod in assignments.pods.values())
        (self._no_pods_left.clear if stays or not self._pods_listed.is_set() else self._no_pods_left.set)()
        for seen in observed:
            self._observed.put_nowait(seen)
            if seen.state is BackendNodeState.CREATED:
                del self._refusals[seen.node_id.node]
        for pod in assignments.misplaced_pods():
            self._pods = self._pods.retire((pod,))
            self._do(self._refuse(pod))
        for pod in assignments.unaccepted_pods():
            if pod.uid not in self._awaited:
                self._awaited.add(pod.uid)
                self._do(self._await_kubelet(pod.uid))

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._refusing.add(task)
        task.add_done_callback(self._refusing.discard)

    async def _await_kubelet(self, uid: str) -> None:
        """Delete a pod that was placed on a machine without power, which Kubernetes does not know about yet."""
        await asyncio.sleep(KUBELET_ACCEPT_S)
        for pod in self._pods.unaccepted_pods():
            if pod.uid == uid:
                log.info("no kubelet on %s begins with %s: it is made again", pod.machine, pod.name)
                self._pods = self._pods.retire((pod,))
                await self._delete_pods(pod.node, (pod,))

    async def _refuse(self, pod: PodStatus) -> None:
        """Delete a pod on an avoided machine; the first time immediately, while it still takes up that machine."""
        tries = self._refusals[pod.node]
        self._refusals[pod.node] += 1
        log.info("%s is on %s, which this run avoids: it is made again", pod.name, pod.machine)
        await asyncio.sleep(min(MAX_POLL_S, RETRY_S * (2**tries - 1)))
        await self._use_released()
        if pod.uid in self._pods.pods:  # else its Job may have another pod by now
            await self._delete_pods(pod.node, (pod,))

    async def _use_released(self) -> None:
        """Bind pods again on avoided machines whose quarantine has ended: no other machine may be free."""
        try:
            known, _ = await self._quarantine.read()
        except ClusterError as error:
            log.warning("the quarantined machines cannot be read: %s", error)
            return
        if released := known.over(time.time()) & self._pods.avoided:
            log.info("no longer avoids %s, whose quarantine is over", ", ".join(sorted(released)))
            self._update(self._pods.use_again(released))

    async def _scale_to_zero(self) -> None:
        """Have the operator delete all pods and create no more; retries while the API server is unavailable."""
        while True:
            try:
                await self._cluster.patch(f"{self._owner.path}/{self._run}/scale", {"spec": {"replicas": 0}})
                return
            except ApiUnavailable as error:
                log.warning("the run's object cannot be scaled to 0 yet: %s", error)
                await asyncio.sleep(RETRY_S)
            except ApiError as refused:
                if refused.status != HTTPStatus.NOT_FOUND:
                    raise
                return

    async def _delete(self, path: str, *, uid: str = "") -> None:
        """Delete an object; retries while the API server is unavailable."""
        while True:
            try:
                await self._cluster.delete(path, uid=uid)
                return
            except ApiUnavailable as error:
                log.warning("%s cannot be removed yet: %s", path, error)
                await asyncio.sleep(RETRY_S)


async def batches(
    source: AsyncIterator[Sequence[Mapping[str, Any]]],
) -> AsyncGenerator[Sequence[Mapping[str, Any]]]:
    """Batches of what a source yields while the consumer handles the previous batch, in order."""
    came, news = list[Sequence[Mapping[str, Any]]](), asyncio.Event()

    async def read() -> None:
        try:
            async for each in source:
                came.append(each)
                news.set()
        finally:
            news.set()

    reading = asyncio.ensure_future(read())
    try:
        while True:
            await news.wait()
            news.clear()
            while came:
                batch = [one for each in came for one in each]
                came.clear()
                yield batch
            if reading.done():
                reading.result()
                return
    finally:
        reading.cancel()


_END_CONDITIONS: Mapping[Outcome, tuple[str, str]] = {
    Outcome.SUCCEEDED: ("Succeeded", "RunSucceeded"),
    Outcome.FAILED: ("Failed", "RunFailed"),
    Outcome.CANCELLED: ("Failed", CANCELLED_REASON),
}
"""The type and reason of the condition by which the gang's object shows how its run ended."""


def _not_remembered(machine: str, refused: ApiError) -> Finding:
    return Finding(
        code="machine-not-remembered",
        severity=Severity.WARNING,
        what=f"this run avoids the machine {machine}, and later runs do not: the run may not quarantine it",
        where=machine,
        evidence=(str(refused),),
        remedy=f"Allow its account `get` and `patch` of the ConfigMap {NAME}, or run `kubectl cordon {machine}`.",
        owner=Owner.CLUSTER,
    )


def _suspended_reason(gang: Mapping[str, Any]) -> str:
    """Why the gang's object is suspended; empty if it is not."""
    spec, meta = gang["spec"], gang["metadata"]
    if not (spec.get("suspend") or spec.get("runPolicy", {}).get("suspend")):
        return ""
    queue = meta.get("labels", {}).get(QUEUE_LABEL)
    return f"{gang['kind']} {meta['name']} is suspended{f' until queue {queue} admits it' if queue else ''}"
