"""Owns what is seen of a cluster by whoever would start a run there; nothing is made, and every question has an end.

Refuses to own what follows from it (check.py). Of what this user may not see it is said so.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from holdfast.job.profile import Workload
from holdfast.launch.kubernetes.access import GROUPS
from holdfast.launch.kubernetes.check import KUEUE, UNSEEN, Inventory, Right, needed
from holdfast.launch.kubernetes.cluster import Cluster
from holdfast.launch.kubernetes.manifest import plain
from holdfast.launch.kubernetes.paths import folder_of, judged_alone
from holdfast.launch.kubernetes.pending import Thing
from holdfast.launch.kubernetes.refusals import RefusedBy, Unanswered
from holdfast.launch.kubernetes.rehearsal import pods
from holdfast.launch.kubernetes.render import Rendering, render
from holdfast.launch.kubernetes.submission import Submission
from holdfast.launch.kubernetes.waiting import LOOK_S, perhaps

OPERATORS: Mapping[Workload, str] = {
    Workload.JOBSET: "jobset-controller-manager",
    Workload.TRAINJOB: "kubeflow-trainer-controller-manager",
    Workload.PYTORCHJOB: "training-operator",
    Workload.MPIJOB: "mpi-operator",
}
"""What each operator calls its Deployment, as it is published."""

_HERE = "/api/v1/namespaces/{namespace}"
_REVIEW = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"


def inventory(asked: Submission) -> Inventory:
    """What a cluster has of what a run needs; raises ClusterError where nobody answers, or knows this user."""
    cluster = Cluster(context=asked.profile.context, namespace=asked.profile.namespace, answer_s=LOOK_S)
    return asyncio.run(_Look(cluster, asked).all_of_it())


class _Look:
    """One look at a cluster."""

    def __init__(self, cluster: Cluster, asked: Submission) -> None:
        self._cluster, self._asked = cluster, asked
        self._unseen: list[str] = []

    async def all_of_it(self) -> Inventory:
        asked, profile = self._asked, self._asked.profile
        served = await self._served()
        namespace = await self._one(_HERE)
        rendering = render(asked)
        whole = namespace is not None and bool(served.get(GROUPS[asked.workload]))
        owner, rest, of_pods, denied = await asyncio.gather(
            self._rehearsed_owner(rendering) if whole else _nothing(),
            self._rehearsed(rendering) if namespace is not None else _none(),
            self._rehearsed_pods(rendering) if namespace is not None else _none(),
            self._denied(),
        )
        queue = f"/apis/{KUEUE}/v1beta2/namespaces/{{namespace}}/localqueues/{asked.queue}"
        local_queue = await self._one(queue) if asked.queue else None
        return Inventory(
            served=served,
            namespace=namespace,
            local_queue=local_queue,
            cluster_queue=await self._cluster_queue(local_queue),
            resource_quotas=(await perhaps(self._cluster, f"{_HERE}/resourcequotas")).get("items", ()),
            claim=await self._one(f"{_HERE}/persistentvolumeclaims/{profile.volume.claim}") if profile.volume else None,
            nodes=await self._all("/api/v1/nodes"),
            operators=await self._operators(),
            storage_classes=_names(await self._all("/apis/storage.k8s.io/v1/storageclasses"))
            if profile.volume and profile.volume.size
            else None,
            priority_classes=_names(await self._all("/apis/scheduling.k8s.io/v1/priorityclasses"))
            if profile.priority_class
            else None,
            no_secrets=[
                name for name in profile.image_pull_secrets if await self._one(f"{_HERE}/secrets/{name}") is None
            ],
            held_back=owner[0],
            denied=denied,
            refusals=(*owner[1], *rest),
            pod_refusals=of_pods,
            unseen=tuple(dict.fromkeys(self._unseen)),
        )

    async def _cluster_queue(self, local_queue: Thing | None) -> Thing:
        name = (local_queue or {}).get("spec", {}).get("clusterQueue")
        return await perhaps(self._cluster, f"/apis/{KUEUE}/v1beta2/clusterqueues/{name}") if name else {}

    async def _one(self, path: str) -> Thing | None:
        """An object: None where there is none, and UNSEEN where it may not be seen."""
        try:
            return await self._cluster.read(path)
        except RefusedBy as refused:
            if refused.status == HTTPStatus.NOT_FOUND:
                return None
            if refused.status != HTTPStatus.FORBIDDEN:
                raise
            self._unseen.append(path.rpartition("}/")[2] if "}/" in path else "namespace")
            return UNSEEN

    async def _all(self, path: str) -> Sequence[Thing] | None:
        """All objects of a kind that belongs to no namespace; None where they may not be seen."""
        try:
            return (await self._cluster.read(path))["items"]
        except RefusedBy as refused:
            if refused.status != HTTPStatus.FORBIDDEN:
                raise
            self._unseen.append(path.rpartition("/")[2])
            return None

    async def _served(self) -> dict[tuple[str, str], frozenset[str]]:
        """Versions by kind, of those that the run would be made of and the queue's."""
        wanted = (GROUPS[self._asked.workload], *([(KUEUE, "localqueues")] if self._asked.queue else ()))
        return {each: await self._versions(*each) for each in wanted}

    async def _versions(self, group: str, resource: str) -> frozenset[str]:
        known = await perhaps(self._cluster, f"/apis/{group}")
        versions = [each["version"] for each in known.get("versions", ())]
        kinds = await asyncio.gather(*(perhaps(self._cluster, f"/apis/{group}/{version}") for version in versions))
        return frozenset(
            version
            for version, found in zip(versions, kinds, strict=True)
            if any(each["name"] == resource for each in found.get("resources", ()))
        )

    async def _operators(self) -> list[Thing]:
        names = [OPERATORS[self._asked.workload], *(["kueue-controller-manager"] if self._asked.queue else [])]
        path = "/apis/apps/v1/deployments"
        found = [await perhaps(self._cluster, path, fieldSelector=f"metadata.name={name}") for name in names]
        return [each for answer in found for each in answer.get("items", ())]

    async def _denied(self) -> list[str]:
        rights = needed(self._asked)
        allowed = await asyncio.gather(*(self._allowed(each) for each in rights))
        return [str(right) for right, yes in zip(rights, allowed, strict=True) if not yes]

    async def _allowed(self, right: Right) -> bool:
        attributes = {
            "namespace": self._asked.profile.namespace,
            "verb": right.verb,
            "group": right.group,
            "resource": right.resource,
            "subresource": right.subresource,
        }
        review = {"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview"}
        answer = await self._cluster.make(_REVIEW, review | {"spec": {"resourceAttributes": attributes}})
        return answer["status"]["allowed"]

    async def _rehearsed_owner(self, rendering: Rendering) -> tuple[bool | None, Sequence[str]]:
        """Whether Kueue holds back a run that nobody has suspended, and what is said against it."""
        owner = copy.deepcopy(plain(rendering.owner))
        held_by = owner["spec"].get("runPolicy", owner["spec"])
        if self._asked.queue:
            held_by["suspend"] = False
        made = await self._rehearse(owner)
        if made is None:
            return None, ()  # this user may not make it, which says nothing of Kueue
        if isinstance(made, str):
            before = [each["metadata"]["name"] for each in map(plain, rendering.before)]
            # A TrainJob's runtime is made just before it, so here it is not there yet.
            return None, [] if any(name in made for name in before) else [made]
        spec = made.get("spec", {})
        held = spec.get("runPolicy", spec).get("suspend", False)
        return held, ()

    async def _rehearsed(self, rendering: Rendering) -> list[str]:
        others = filter(judged_alone, (*rendering.before, *rendering.owned))
        made = await asyncio.gather(*(self._rehearse(plain(each)) for each in others))
        return [each for each in made if isinstance(each, str)]

    async def _rehearsed_pods(self, rendering: Rendering) -> list[str]:
        """What is said against the pods that the objects will have made."""
        made = await asyncio.gather(*(self._rehearse(each) for each in pods(self._asked, rendering.objects)))
        if None in made:
            self._unseen.append("whether the run's pods would be let in (create pods)")
        return [each for each in made if isinstance(each, str)]

    async def _rehearse(self, one: Mapping[str, Any]) -> Mapping[str, Any] | str | None:
        """What an object would come to be, or what is said against it by all who have a say.

        None where this user may not make it, of which `denied` tells, or where it is there already.
        """
        try:
            return await self._cluster.make(folder_of(one), one, dryRun="All", fieldValidation="Strict")
        except RefusedBy as refused:
            told_elsewhere = "cannot create resource" in refused.said or "already exists" in refused.said
            return None if told_elsewhere else str(refused)
        except Unanswered as error:
            if "webhook" not in error.said:
                raise
            return error.said


async def _nothing() -> tuple[bool | None, Sequence[str]]:
    return None, ()


async def _none() -> list[str]:
    return []


def _names(things: Sequence[Thing] | None) -> frozenset[str] | None:
    return None if things is None else frozenset(each["metadata"]["name"] for each in things)
