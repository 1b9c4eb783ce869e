"""Owns what a controller knows of the pods that it lives in: whether there was one before, and that none is to come."""

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
"""In the mark, a ConfigMap with the controller's name: which pod was the first."""
RETRY_S = 1.0


async def had_earlier_controller(run: str) -> bool:
    """Whether a pod before this one was the run's controller, where that is marked; asked until it is known.

    The first marks itself. It stays the first when its container is started again, which finds the folder as it was.
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
            if refused.status != HTTPStatus.CONFLICT:  # of two that begin, the other was first
                raise


async def scale_to_zero(run: str) -> None:
    """Have no pod follow this one, which is then taken away; nothing is done where the run's objects are gone.

    Asked for as long as this lives: an API server that has just started forbids what it cannot judge yet.
    """
    cluster, said = ClusterClient(), ""
    path = f"/apis/apps/v1/namespaces/{{namespace}}/replicasets/{ObjectNames(run).controller}/scale"
    while True:
        try:
            await cluster.patch(path, {"spec": {"replicas": 0}})
            return
        except ClusterError as error:
            if isinstance(error, ApiError) and error.status == HTTPStatus.NOT_FOUND:
                return
            if str(error) != said:
                said = str(error)
                log.warning("the API server does not take note that the run is over: %s", said)
        await asyncio.sleep(RETRY_S)
