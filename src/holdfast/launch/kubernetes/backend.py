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
from holdfast.folder import RunFolder
from holdfast.job.accepted import Accepted
from holdfast.job.backend import NodeObservation, NodePlace
from holdfast.job.profile import Workload
from holdfast.job.spec import Job
from holdfast.launch.environment import Share
from holdfast.launch.kubernetes.cluster import Cluster
from holdfast.launch.kubernetes.failing import GANGS, declare_failed
from holdfast.launch.kubernetes.lives import Lives, Pod, known
from holdfast.launch.kubernetes.names import NODE, PART_LABEL, QUEUE_LABEL, RUN_LABEL, Names
from holdfast.launch.kubernetes.paths import PODS
from holdfast.launch.kubernetes.refusals import ClusterError, RefusedBy, Unanswered

log = logging.getLogger("holdfast.controller")


_NUMBER = re.compile(r"[0-9]{1,9}")


@dataclass(frozen=True, kw_only=True)
class Numbering:
    """How the pods of a kind of object say which node they are."""

    label: str
    after: tuple[str, str] | None = None
    """A label, and its value in pods that are numbered from 1: one group comes after another of one pod."""
    own_job: bool = False
    """Whether each node has a Job of its own, which is made again at once where it is removed."""

    def node(self, labels: Mapping[str, str]) -> int | None:
        """The node's number; None where the pod is no node's, as one that somebody else labelled may be."""
        number = labels.get(self.label, "")
        if not _NUMBER.fullmatch(number):
            return None
        return int(number) + (self.after is not None and labels.get(self.after[0]) == self.after[1])


NUMBERINGS: Mapping[Workload, Numbering] = {
    Workload.JOBSET: Numbering(label="jobset.sigs.k8s.io/job-index", own_job=True),
    Workload.TRAINJOB: Numbering(label="batch.kubernetes.io/job-completion-index"),
    Workload.PYTORCHJOB: Numbering(
        label="training.kubeflow.org/replica-index", after=("training.kubeflow.org/replica-type", "worker")
    ),
}
"""Of each kind that has a place for agents."""

PYTHON = "python"
"""The image's own."""
LOOK_AGAIN_S = 1.0
LOOK_SELDOM_S = 10.0
"""Longest time between two looks at the gang's object while nothing changes."""
ASK_PAUSE_S = 0.2
"""Least time between two requests for the gang's object: what happens to pods meanwhile is judged by one answer."""
END_S = 60.0
"""Longest that pods whose agents were told to leave may take."""


def own_machines(job: Job, _environ: Mapping[str, str]) -> tuple[Share, ...]:
    """Every node has a machine, or a part of one, that its agent alone sees."""
    return (Share(cpus=job.resources.cpu or job.local_world_size, python=PYTHON),) * job.nodes.max


def known_as(folder: RunFolder, _host: str) -> str:
    """The name by which pods reach the controller's."""
    return Names(folder.run).controller


class KubernetesBackend:
    """Sees a run's pods come and go, and has those replaced that the controller gives up."""

    def __init__(self, *, folder: RunFolder, accepted: Accepted, cluster: Cluster | None = None) -> None:
        self._run = folder.run
        self._workload = accepted.workload
        self._numbering = NUMBERINGS[self._workload]
        self._cluster = cluster or Cluster()
        self._lives = known(read_events(folder.events)) if folder.events.exists() else Lives()
        self._seen: asyncio.Queue[NodeObservation] = asyncio.Queue()
        self._asked_at = -ASK_PAUSE_S
        """Monotonic seconds at which the gang's object was last asked for."""
        self._looked = asyncio.Event()
        self._empty = asyncio.Event()
        """Whether no pod of a node is left that does not leave."""

    async def submit(self, places: tuple[NodePlace, ...]) -> None:
        """The gang's own object makes pods for all nodes; each place takes one as soon as it runs."""
        for place in places:
            self._change(self._lives.want(place))

    async def observe(self) -> AsyncIterator[NodeObservation]:
        """Nodes as their pods begin to run, cannot be placed, or are gone."""
        looking = asyncio.gather(self._look(), self._look_at_gang())
        try:
            while True:
                seeing = asyncio.ensure_future(self._seen.get())
                await asyncio.wait((looking, seeing), return_when=asyncio.FIRST_COMPLETED)
                if looking.done():
                    seeing.cancel()
                    looking.result()  # it never ends but by an error, without which the run would stand still
                yield seeing.result()
        finally:
            looking.cancel()

    def generation(self, node: int, address: str) -> int | None:
        """Which generation of a node the pod at an address is; None while that is not known, or for one given up."""
        return self._lives.generation(node, address)

    async def replace_node(self, place: NodePlace, reason: str) -> None:
        """Have the node's pod made anew, at once where it has a Job of its own: that is removed, and made again.

        What comes without being asked for comes after a pause, which is longer each time.
        """
        self._change(self._lives.want(place))
        if self._lives.coming(place) or self._lives.suspended:
            return  # a gang that is suspended gets all of its pods when it is admitted
        log.info("node%s is made anew: %s", place.node, reason)
        if self._numbering.own_job:
            await self._insist(f"/apis/batch/v1/namespaces/{{namespace}}/jobs/{self._run}-{NODE}-{place.node}")
            return
        for pod in tuple(self._lives.former(place)):
            await self._insist(f"{PODS}/{pod.name}")

    async def cordon(self, place: NodePlace) -> None:
        """Whether a machine is used again is the cluster's to say; the run may not change machines."""

    async def uncordon(self, place: NodePlace) -> None:
        """As `cordon`."""

    async def conclude(self, outcome: Outcome, exit_code: int, reason: str) -> None:
        """Have the run's object say that it failed: agents leave without an error, which operators call a success."""
        if outcome is not Outcome.FAILED:
            return
        why = f"{reason} (exit code {exit_code})"
        while True:
            try:
                await declare_failed(self._cluster, self._workload, self._run, why)
                return
            except Unanswered as error:
                log.warning("the run's object cannot say yet that it failed: %s", error)
                await asyncio.sleep(LOOK_AGAIN_S)
            except RefusedBy as refused:
                if refused.status != HTTPStatus.CONFLICT:
                    log.warning("the run's object does not say that it failed: %s", refused)
                    return

    async def cancel(self) -> None:
        """Wait for the pods of agents that were told to leave; those that stay are removed."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_S):
                await self._empty.wait()
        for pod in tuple(self._lives.pods.values()):
            await self._insist(f"{PODS}/{pod.name}")

    async def _look(self) -> None:
        """Keep up with the pods, whatever becomes of the connection to the API server."""
        selector = f"{RUN_LABEL}={self._run},{PART_LABEL}={NODE}"
        while True:
            all_of_them = True
            try:
                async for known in batches(self._cluster.pods(selector)):
                    pods = [pod for each in known if (pod := as_pod(each, self._numbering))]
                    if all_of_them or self._lives.belied(pods):
                        await self._ask_gang()
                    lives = replace(self._lives, pods={}) if all_of_them else self._lives
                    for pod in pods:
                        lives = lives.see(pod)
                    self._looked.set()
                    self._change(lives)
                    all_of_them = False
            except Unanswered as error:
                log.warning("the API server does not say what becomes of pods: %s", error)
            await asyncio.sleep(LOOK_AGAIN_S)

    async def _look_at_gang(self) -> None:
        """Keep up with whether the gang is suspended, as long as nodes are missing or leave."""
        pause_s, before = LOOK_AGAIN_S, self._lives
        while True:
            await asyncio.sleep(pause_s)
            lives = self._lives
            pause_s = min(LOOK_SELDOM_S, 2 * pause_s) if lives == before else LOOK_AGAIN_S
            if lives.wanted or lives.suspended or any(pod.leaving for pod in lives.pods.values()):
                await self._ask_gang()
            else:
                pause_s = LOOK_AGAIN_S
            before = lives

    async def _ask_gang(self) -> None:
        """Ask whether the gang is suspended now. It changes before its pods do, so no older answer will do."""
        await asyncio.sleep(self._asked_at + ASK_PAUSE_S - time.monotonic())
        self._asked_at = time.monotonic()
        try:
            gang = await self._cluster.read(f"{GANGS[self._workload].path}/{self._run}")
        except ClusterError:
            return  # what was known stands; that nobody answers is said of the pods
        self._change(self._lives.suspend(_suspended(gang)))

    def _change(self, lives: Lives) -> None:
        """Take new knowledge in, with what follows from it."""
        observed = tuple[NodeObservation, ...]()
        if self._looked.is_set():
            lives, observed = lives.settle()
        self._lives = lives
        stays = any(not pod.leaving for pod in lives.pods.values())
        (self._empty.clear if stays or not self._looked.is_set() else self._empty.set)()
        for seen in observed:
            self._seen.put_nowait(seen)

    async def _insist(self, path: str) -> None:
        """Remove an object; an API server that is away is asked again."""
        while True:
            try:
                await self._cluster.remove(path)
                return
            except Unanswered as error:
                log.warning("%s cannot be removed yet: %s", path, error)
                await asyncio.sleep(LOOK_AGAIN_S)


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


def _suspended(gang: Mapping[str, Any]) -> str:
    """Why a gang has no pods, where its object says so; empty where it is to run."""
    spec, meta = gang["spec"], gang["metadata"]
    if not (spec.get("suspend") or spec.get("runPolicy", {}).get("suspend")):
        return ""
    queue = meta.get("labels", {}).get(QUEUE_LABEL)
    return f"{gang['kind']} {meta['name']} is suspended{f' until queue {queue} admits it' if queue else ''}"


def as_pod(said: Mapping[str, Any], numbering: Numbering) -> Pod | None:
    """What a pod's object says of a node's life; None for one that is no node's."""
    meta, status = said["metadata"], said.get("status", {})
    node = numbering.node(meta.get("labels", {}))
    if node is None:
        return None
    phase = status.get("phase", "Pending")
    leaving = "deletionTimestamp" in meta and phase == "Running"
    ended = "deletionTimestamp" in meta or phase in ("Succeeded", "Failed")
    over = said.get("deleted", False) or (ended and not leaving)
    return Pod(
        uid=meta["uid"],
        name=meta["name"],
        node=node,
        address=status.get("podIP", ""),
        running=phase == "Running",
        leaving=leaving,
        over=over,
        why="" if phase == "Running" else _why_pending(status),
    )


def _why_pending(status: Mapping[str, Any]) -> str:
    for condition in status.get("conditions", ()):
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return f"{condition.get('reason', '')}: {condition.get('message', '')}".strip(": ")
    for container in (*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ())):
        waiting = container.get("state", {}).get("waiting")
        if waiting and waiting.get("reason") not in ("ContainerCreating", "PodInitializing"):
            return f"{waiting.get('reason', '')}: {waiting.get('message', '')}".strip(": ")
    return ""
