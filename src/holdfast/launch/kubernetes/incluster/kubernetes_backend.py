"""Owns nodes on Kubernetes: pods that the cluster's own controllers make, seen through a watch and replaced on demand.

Which pod is which generation of a node is in the run's log, for the controller that comes after this one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import Any

from holdfast.events import Outcome
from holdfast.events.log import read_events
from holdfast.job.backend import NodeId, NodeObservation
from holdfast.job.run_spec import RunSpec
from holdfast.job.spec import Job
from holdfast.job.targets import Workload
from holdfast.launch.kubernetes.client.api_errors import ApiError, ApiUnavailable, ClusterError
from holdfast.launch.kubernetes.client.api_paths import PODS_PATH
from holdfast.launch.kubernetes.client.cluster import ClusterClient
from holdfast.launch.kubernetes.incluster.owner_status import POD_OWNERS, mark_failed
from holdfast.launch.kubernetes.incluster.pod_assignment import PodAssignments, PodStatus, assignments_from_log
from holdfast.launch.kubernetes.object_names import NODE, PART_LABEL, QUEUE_LABEL, RUN_LABEL, ObjectNames
from holdfast.launch.rank_env import NodeResources
from holdfast.run_dir import RunDir

log = logging.getLogger("holdfast.controller")


_NUMBER = re.compile(r"[0-9]{1,9}")


@dataclass(frozen=True, kw_only=True)
class NodeLabels:
    """How the pods of a kind of object say which node they are."""

    label: str
    offset_label: tuple[str, str] | None = None
    """A label, and its value in pods that are numbered from 1: one group comes after another of one pod."""
    own_job: bool = False
    """Whether each node has a Job of its own, which is made again at once where it is removed."""

    def node(self, labels: Mapping[str, str]) -> int | None:
        """The node's number; None where the pod is no node's, as one that somebody else labelled may be."""
        number = labels.get(self.label, "")
        if not _NUMBER.fullmatch(number):
            return None
        return int(number) + (
            self.offset_label is not None and labels.get(self.offset_label[0]) == self.offset_label[1]
        )


NODE_LABELS: Mapping[Workload, NodeLabels] = {
    Workload.JOBSET: NodeLabels(label="jobset.sigs.k8s.io/job-index", own_job=True),
    Workload.TRAINJOB: NodeLabels(label="batch.kubernetes.io/job-completion-index"),
    Workload.PYTORCHJOB: NodeLabels(
        label="training.kubeflow.org/replica-index", offset_label=("training.kubeflow.org/replica-type", "worker")
    ),
}
"""Of each kind that has room for an agent."""

IMAGE_PYTHON = "python"
"""The image's own."""
RETRY_S = 1.0
MAX_POLL_S = 10.0
"""Longest time between two looks at the gang's object while nothing changes."""
MIN_OWNER_POLL_S = 0.2
"""Least time between two requests for the gang's object: what happens to pods meanwhile is judged by one answer."""
POD_EXIT_TIMEOUT_S = 60.0
"""Longest that pods whose agents were told to leave may take."""


def pod_resources(job: Job, _environ: Mapping[str, str]) -> tuple[NodeResources, ...]:
    """Every node has a machine, or a part of one, that its agent alone sees."""
    return (NodeResources(cpus=job.resources.cpu or job.local_world_size, python=IMAGE_PYTHON),) * job.nodes.max


def controller_host(folder: RunDir, _host: str) -> str:
    """The name by which pods reach the controller's."""
    return ObjectNames(folder.run_id).controller


class KubernetesBackend:
    """Sees a run's pods come and go, and has those replaced that the controller gives up."""

    def __init__(self, *, folder: RunDir, accepted: RunSpec, cluster: ClusterClient | None = None) -> None:
        self._run = folder.run_id
        self._workload = accepted.workload
        self._node_labels = NODE_LABELS[self._workload]
        self._cluster = cluster or ClusterClient()
        self._pods = assignments_from_log(read_events(folder.events)) if folder.events.exists() else PodAssignments()
        self._observed: asyncio.Queue[NodeObservation] = asyncio.Queue()
        self._owner_polled_at = -MIN_OWNER_POLL_S
        """Monotonic seconds at which the gang's object was last asked for."""
        self._pods_listed = asyncio.Event()
        self._no_pods_left = asyncio.Event()
        """Whether no pod of a node is left that does not leave."""

    async def submit(self, node_ids: tuple[NodeId, ...]) -> None:
        """The gang's own object makes pods for all nodes; each node_id takes one as soon as it runs."""
        for node_id in node_ids:
            self._update(self._pods.request(node_id))

    async def observe(self) -> AsyncIterator[NodeObservation]:
        """Nodes as their pods begin to run, cannot be placed, or are gone."""
        looking = asyncio.gather(self._watch_pods(), self._poll_owner())
        try:
            while True:
                seeing = asyncio.ensure_future(self._observed.get())
                await asyncio.wait((looking, seeing), return_when=asyncio.FIRST_COMPLETED)
                if looking.done():
                    seeing.cancel()
                    looking.result()  # it never ends but by an error, without which the run would stand still
                yield seeing.result()
        finally:
            looking.cancel()

    def generation(self, node: int, address: str) -> int | None:
        """Which generation of a node the pod at an address is; None while that is not known, or for one given up."""
        return self._pods.generation(node, address)

    async def replace_node(self, node_id: NodeId, reason: str) -> None:
        """Have the node's pod made anew, at once where it has a Job of its own: that is removed, and made again.

        What comes without being asked for comes after a pause, which is longer each time.
        """
        self._update(self._pods.request(node_id))
        if self._pods.has_pod(node_id) or self._pods.suspended:
            return  # a gang that is suspended gets all of its pods when it is admitted
        log.info("node%s is made anew: %s", node_id.node, reason)
        if self._node_labels.own_job:
            await self._delete(f"/apis/batch/v1/namespaces/{{namespace}}/jobs/{self._run}-{NODE}-{node_id.node}")
            return
        for pod in tuple(self._pods.retired_pods(node_id)):
            await self._delete(f"{PODS_PATH}/{pod.name}")

    async def cordon(self, node_id: NodeId) -> None:
        """Whether a machine is used again is the cluster's to say; the run may not change machines."""

    async def uncordon(self, node_id: NodeId) -> None:
        """As `cordon`."""

    async def report_outcome(self, outcome: Outcome, exit_code: int, reason: str) -> None:
        """Have the run's object say that it failed: agents leave without an error, which operators call a success."""
        if outcome is not Outcome.FAILED:
            return
        why = f"{reason} (exit code {exit_code})"
        while True:
            try:
                await mark_failed(self._cluster, self._workload, self._run, why)
                return
            except ApiUnavailable as error:
                log.warning("the run's object cannot say yet that it failed: %s", error)
                await asyncio.sleep(RETRY_S)
            except ApiError as refused:
                if refused.status != HTTPStatus.CONFLICT:
                    log.warning("the run's object does not say that it failed: %s", refused)
                    return

    async def cancel(self) -> None:
        """Wait for the pods of agents that were told to leave; those that stay are removed."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(POD_EXIT_TIMEOUT_S):
                await self._no_pods_left.wait()
        for pod in tuple(self._pods.pods.values()):
            await self._delete(f"{PODS_PATH}/{pod.name}")

    async def _watch_pods(self) -> None:
        """Keep up with the pods, whatever becomes of the connection to the API server."""
        selector = f"{RUN_LABEL}={self._run},{PART_LABEL}={NODE}"
        while True:
            all_of_them = True
            try:
                async for known in batches(self._cluster.watch_pods(selector)):
                    pods = [pod for each in known if (pod := pod_status(each, self._node_labels))]
                    if all_of_them or self._pods.suspension_outdated(pods):
                        await self._read_owner()
                    lives = replace(self._pods, pods={}) if all_of_them else self._pods
                    for pod in pods:
                        lives = lives.update_pod(pod)
                    self._pods_listed.set()
                    self._update(lives)
                    all_of_them = False
            except ApiUnavailable as error:
                log.warning("the API server does not say what becomes of pods: %s", error)
            await asyncio.sleep(RETRY_S)

    async def _poll_owner(self) -> None:
        """Keep up with whether the gang is suspended, as long as nodes are missing or leave."""
        pause_s, before = RETRY_S, self._pods
        while True:
            await asyncio.sleep(pause_s)
            lives = self._pods
            pause_s = min(MAX_POLL_S, 2 * pause_s) if lives == before else RETRY_S
            if lives.pending or lives.suspended or any(pod.terminating for pod in lives.pods.values()):
                await self._read_owner()
            else:
                pause_s = RETRY_S
            before = lives

    async def _read_owner(self) -> None:
        """Ask whether the gang is suspended now. It changes before its pods do, so no older answer will do."""
        await asyncio.sleep(self._owner_polled_at + MIN_OWNER_POLL_S - time.monotonic())
        self._owner_polled_at = time.monotonic()
        try:
            gang = await self._cluster.get(f"{POD_OWNERS[self._workload].path}/{self._run}")
        except ClusterError:
            return  # what was known stands; that nobody answers is said of the pods
        self._update(self._pods.suspend(_suspended_reason(gang)))

    def _update(self, lives: PodAssignments) -> None:
        """Take new knowledge in, with what follows from it."""
        observed = tuple[NodeObservation, ...]()
        if self._pods_listed.is_set():
            lives, observed = lives.reconcile()
        self._pods = lives
        stays = any(not pod.terminating for pod in lives.pods.values())
        (self._no_pods_left.clear if stays or not self._pods_listed.is_set() else self._no_pods_left.set)()
        for seen in observed:
            self._observed.put_nowait(seen)

    async def _delete(self, path: str) -> None:
        """Remove an object; an API server that is away is asked again."""
        while True:
            try:
                await self._cluster.delete(path)
                return
            except ApiUnavailable as error:
                log.warning("%s cannot be removed yet: %s", path, error)
                await asyncio.sleep(RETRY_S)


async def batches(
    source: AsyncIterator[Sequence[Mapping[str, Any]]],
) -> AsyncGenerator[Sequence[Mapping[str, Any]]]:
    """What a source has yielded while the batch before was worked on, in its order."""
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


def _suspended_reason(gang: Mapping[str, Any]) -> str:
    """Why a gang has no pods, where its object says so; empty where it is to run."""
    spec, meta = gang["spec"], gang["metadata"]
    if not (spec.get("suspend") or spec.get("runPolicy", {}).get("suspend")):
        return ""
    queue = meta.get("labels", {}).get(QUEUE_LABEL)
    return f"{gang['kind']} {meta['name']} is suspended{f' until queue {queue} admits it' if queue else ''}"


def pod_status(said: Mapping[str, Any], numbering: NodeLabels) -> PodStatus | None:
    """What a pod's object says of a node's life; None for one that is no node's."""
    meta, status = said["metadata"], said.get("status", {})
    node = numbering.node(meta.get("labels", {}))
    if node is None:
        return None
    phase = status.get("phase", "Pending")
    leaving = "deletionTimestamp" in meta and phase == "Running"
    ended = "deletionTimestamp" in meta or phase in ("Succeeded", "Failed")
    over = said.get("deleted", False) or (ended and not leaving)
    return PodStatus(
        uid=meta["uid"],
        name=meta["name"],
        node=node,
        address=status.get("podIP", ""),
        running=phase == "Running",
        terminating=leaving,
        ended=over,
        reason="" if phase == "Running" else _pending_reason(status),
    )


def _pending_reason(status: Mapping[str, Any]) -> str:
    for condition in status.get("conditions", ()):
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return f"{condition.get('reason', '')}: {condition.get('message', '')}".strip(": ")
    for container in (*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ())):
        waiting = container.get("state", {}).get("waiting")
        if waiting and waiting.get("reason") not in ("ContainerCreating", "PodInitializing"):
            return f"{waiting.get('reason', '')}: {waiting.get('message', '')}".strip(": ")
    return ""
