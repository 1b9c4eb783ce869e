"""Tells a run's first controller pod from later ones, and scales the controller to zero at the end."""

from __future__ import annotations

import asyncio
import logging
import os
from http import HTTPStatus

from holdfast.launch.kubernetes.client.api_errors import ApiError, ApiUnavailable, ClusterError
from holdfast.launch.kubernetes.client.cluster import ClusterClient
from holdfast.launch.kubernetes.object_names import ObjectNames

log = logging.getLogger("holdfast.controller")

FIRST_POD_KEY = "first_pod"
"""Key of the first pod's name in the marker, a ConfigMap with the controller's name."""
RETRY_S = 1.0


async def had_earlier_controller(run: str) -> bool:
    """Whether an earlier pod was the run's controller; retries until the API server answers.

    The first pod records itself in the marker. It stays the first after a container restart, which keeps its folder.
    """
    cluster, own = ClusterClient(), os.environ["HOSTNAME"]
    path = f"/api/v1/namespaces/{{namespace}}/configmaps/{ObjectNames(run).controller}"
    while True:
        try:
            mark = await cluster.get(path)
            if first := mark.get("data", {}).get(FIRST_POD_KEY):
                return first != own
            version = {"resourceVersion": mark["metadata"]["resourceVersion"]}
            await cluster.patch(path, {"metadata": version, "data": {FIRST_POD_KEY: own}})
        except ApiUnavailable as error:
            log.warning("the API server does not say whether this is the first controller: %s", error)
            await asyncio.sleep(RETRY_S)
        except ApiError as refused:
            if refused.status != HTTPStatus.CONFLICT:  # a concurrent pod was first
                raise


async def scale_to_zero(run: str) -> None:
    """Scale the controller's ReplicaSet to zero, which deletes this pod; no-op if the run's objects are gone.

    Retries as long as this process runs: an API server that has just started forbids requests it cannot authorize yet.
    """
    cluster, last_error = ClusterClient(), ""
    path = f"/apis/apps/v1/namespaces/{{namespace}}/replicasets/{ObjectNames(run).controller}/scale"
    while True:
        try:
            await cluster.patch(path, {"spec": {"replicas": 0}})
            return
        except ClusterError as error:
            if isinstance(error, ApiError) and error.status == HTTPStatus.NOT_FOUND:
                return
            if str(error) != last_error:
                last_error = str(error)
                log.warning("the controller cannot be scaled to 0: %s", last_error)
        await asyncio.sleep(RETRY_S)
