"""Creates the objects that a run's object owns, in the order in which they need one another."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from holdfast.launch.kubernetes.client.api_errors import ApiError
from holdfast.launch.kubernetes.client.api_paths import collection_path

if TYPE_CHECKING:
    from holdfast.launch.kubernetes.client.cluster import ClusterClient

CREATE_FIRST = ("Secret", "ConfigMap", "ServiceAccount", "Role", "ResourceClaimTemplate")
"""Kinds that others depend on: pods mount or name them, or use their account; a binding needs its Role."""


def owner_metadata(owner: Mapping[str, Any], one: Mapping[str, Any]) -> dict[str, Any]:
    """Metadata that makes Kubernetes delete an object with its owner.

    Kueue follows only `controller: true`: with it the controller's pods belong to the admitted run, and are not gated
    as pods without a queue (manageJobsWithoutQueueName, or a LocalQueue named `default`).
    """
    meta = owner["metadata"]
    kind = {key: owner[key] for key in ("apiVersion", "kind")}
    reference = {**kind, "name": meta["name"], "uid": meta["uid"], "controller": one["kind"] == "ReplicaSet"}
    return {"ownerReferences": [reference]}


async def create_owned(
    cluster: ClusterClient, owner: Mapping[str, Any], objects: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Create objects that their owner owns; returns them with their owner. Raises ClusterError."""
    ready = [{**each, "metadata": {**each["metadata"], **owner_metadata(owner, each)}} for each in objects]
    for wave in (True, False):
        await gather_all(
            cluster.create(collection_path(each), each) for each in ready if (each["kind"] in CREATE_FIRST) == wave
        )
    return ready


async def create_if_absent(cluster: ClusterClient, thing: Mapping[str, Any]) -> bool:
    """Create an object; False if it exists."""
    try:
        await cluster.create(collection_path(thing), thing)
    except ApiError as refusal:
        if refusal.status != HTTPStatus.CONFLICT:
            raise
        return False
    return True


async def gather_all(asked: Iterable[Coroutine[None, None, object]]) -> None:
    """Run several requests concurrently; raises the first error once all have ended."""
    for answer in await asyncio.gather(*asked, return_exceptions=True):
        if isinstance(answer, BaseException):
            raise answer
