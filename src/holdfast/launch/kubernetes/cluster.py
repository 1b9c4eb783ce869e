"""Owns speaking to the API server: the one place where a Kubernetes client is used.

kr8s knows kubeconfigs, contexts and the service account of a pod; what is asked is said in the API's own paths.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
import kr8s
from kr8s import ServerError

_NO_ANSWER = (httpx.HTTPError, kr8s.APITimeoutError, kr8s.ConnectionClosedError, OSError)


NOT_FOUND, UNABLE = 404, 500


class Unanswered(Exception):
    """The API server was not reached, or was not able to answer: it may be, later."""


class RefusedBy(Exception):
    """The API server has answered, and will not do it; `status` is its answer's code, `said` its own words."""

    def __init__(self, status: int, said: str) -> None:
        super().__init__(f"{status} {said}")
        self.status, self.said = status, said


class Cluster:
    """One namespace of a cluster, which `{namespace}` in paths stands for, as whoever asks."""

    def __init__(self, *, context: str | None = None, namespace: str | None = None) -> None:
        """None are those of the kubeconfig, or inside a pod those of its own account."""
        self._context, self._namespace = context, namespace
        self._api: Any = None

    async def remove(self, path: str) -> None:
        """Remove an object and what it owns; nothing is done where there is none."""
        try:
            await self._ask("DELETE", path, params={"propagationPolicy": "Background"})
        except RefusedBy as refusal:
            if refusal.status != NOT_FOUND:
                raise

    async def pods(self, selector: str) -> AsyncIterator[Sequence[Mapping[str, Any]]]:
        """All pods of a selector, and then each as it changes; one that is deleted has `deleted`. Raises Unanswered."""
        path = "/api/v1/namespaces/{namespace}/pods"
        found = await self._ask("GET", path, params={"labelSelector": selector})
        yield found["items"]
        params = {
            "labelSelector": selector,
            "watch": "true",
            "resourceVersion": found["metadata"]["resourceVersion"],
        }
        try:
            async with self._call("GET", path, params=params, stream=True, timeout=None) as response:
                async for line in response.aiter_lines():
                    event = json.loads(line)
                    if event["type"] == "ERROR":
                        return  # too long ago: all are listed anew
                    yield ({**event["object"], "deleted": event["type"] == "DELETED"},)
        except (ServerError, *_NO_ANSWER) as error:
            raise Unanswered(str(error)) from error

    @asynccontextmanager
    async def _call(self, method: str, path: str, **more: Any) -> AsyncGenerator[Any]:
        if self._api is None:
            with warnings.catch_warnings(action="ignore"):  # of versions of Kubernetes that are newer than it
                self._api = await kr8s.asyncio.api(context=self._context, namespace=self._namespace)
        folder, _, name = path.format(namespace=self._api.namespace).rpartition("/")
        async with self._api.call_api(method, base=folder, version="", url=name, **more) as response:
            yield response

    async def _ask(self, method: str, path: str, **more: Any) -> dict[str, Any]:
        try:
            async with self._call(method, path, **more) as response:
                return response.json()
        except ServerError as error:
            answer = error.response
            if answer is None or answer.status_code >= UNABLE:
                raise Unanswered(str(error)) from error
            raise RefusedBy(answer.status_code, str(error)) from error
        except _NO_ANSWER as error:
            raise Unanswered(str(error) or type(error).__name__) from error
