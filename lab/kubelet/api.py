"""The kubelet's client of the API server: requests, status patches, and endless watches."""

from __future__ import annotations

import asyncio
import json
import logging
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import httpx

KubeObject = dict[str, Any]
"""An object in the API server's JSON; only the module that owns a part of it reads that part."""

_T = TypeVar("_T")

RETRY_S = 0.5
"""Seconds before a request is repeated."""
_UID_DIFFERS = "Precondition failed"
_PATCH = {"Content-Type": "application/strategic-merge-patch+json"}
_MERGE = {"Content-Type": "application/merge-patch+json"}


class RequestRejected(Exception):
    """The API server rejected a request."""

    def __init__(self, response: httpx.Response) -> None:
        super().__init__(f"{response.request.method} {response.request.url.path}: {response.text[:500]}")
        self.status = response.status_code


REQUEST_ERRORS = (httpx.HTTPError, RequestRejected)
"""Errors of a request: the API server is unreachable or rejects it."""


def is_transient(error: Exception) -> bool:
    """Whether the same request may succeed later. A fresh API server rejects requests that it cannot authorize yet."""
    return not isinstance(error, RequestRejected) or error.status >= 500 or error.status in (401, 403, 409, 429)


async def retry_until_done(request: Callable[[], Awaitable[_T]], what: str) -> _T:
    """Repeat a request until it succeeds; raise permanent errors."""
    while True:
        try:
            return await request()
        except REQUEST_ERRORS as error:
            if not is_transient(error):
                raise
            logging.info("%s: retrying after %r", what, error)
        await asyncio.sleep(RETRY_S)


class KubeletApi:
    """The API server, reached over a Unix socket as the lab's administrator."""

    def __init__(self, socket: Path, pki: Path) -> None:
        trust = ssl.create_default_context(cafile=pki / "ca.crt")
        self._http = httpx.AsyncClient(
            base_url="https://localhost",
            transport=httpx.AsyncHTTPTransport(uds=str(socket), verify=trust, limits=httpx.Limits(max_connections=100)),
            headers={"Authorization": f"Bearer {(pki / 'token').read_text()}"},
            timeout=30,
        )

    async def request(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Any:
        """The parsed response; raises `RequestRejected` on an error status."""
        response = await self._http.request(method, path, json=body, headers=headers)
        if not response.is_success:
            raise RequestRejected(response)
        return response.json()

    async def get(self, path: str) -> Any:
        return await self.request("GET", path)

    async def get_or_none(self, path: str) -> Any | None:
        """The object at a path, or None."""
        try:
            return await self.get(path)
        except RequestRejected as refused:
            if refused.status == 404:
                return None
            raise

    async def create(self, path: str, body: KubeObject) -> None:
        """Create an object unless one of this name exists."""
        try:
            await self.request("POST", path, body)
        except RequestRejected as refused:
            if refused.status != 409:
                raise

    async def patch(self, path: str, body: KubeObject, *, merge: bool = False) -> Any | None:
        """Change an object; None if it is gone, or another has taken its name."""
        try:
            return await self.request("PATCH", path, body, _MERGE if merge else _PATCH)
        except RequestRejected as refused:
            if _is_other(refused):
                return None
            raise

    async def delete(self, path: str, uid: str) -> None:
        """Delete an object immediately, if its uid matches."""
        options = {"kind": "DeleteOptions", "apiVersion": "v1", "gracePeriodSeconds": 0, "preconditions": {"uid": uid}}
        try:
            await self.request("DELETE", path, options)
        except RequestRejected as refused:
            if not _is_other(refused):
                raise

    async def watch(self, path: str) -> AsyncIterator[tuple[bool, KubeObject]]:
        """Every change of an object at a path, with whether it still exists; reconnects broken watches."""
        known: dict[str, KubeObject] = {}
        while True:
            try:
                listed = await self.get(path)
                there = {one["metadata"]["uid"]: one for one in listed["items"]}
                for uid in known.keys() - there.keys():
                    yield False, known[uid]
                for one in there.values():
                    yield True, one
                known = there
                version = listed["metadata"]["resourceVersion"]
                async for kind, one in self._changes(path, version):
                    uid = one["metadata"]["uid"]
                    if kind == "DELETED":
                        known.pop(uid, None)
                    else:
                        known[uid] = one
                    yield kind != "DELETED", one
            except (*REQUEST_ERRORS, json.JSONDecodeError) as error:
                logging.info("watch of %s: %r", path, error)
                await asyncio.sleep(RETRY_S)

    async def _changes(self, path: str, version: str) -> AsyncIterator[tuple[str, KubeObject]]:
        query = {"watch": "1", "resourceVersion": version, "timeoutSeconds": "3000"}
        timeout = httpx.Timeout(30, read=None)
        async with self._http.stream("GET", path, params=query, timeout=timeout) as response:
            async for line in response.aiter_lines():
                event = json.loads(line)
                if event["type"] == "ERROR":
                    return
                yield event["type"], event["object"]


def _is_other(refused: RequestRejected) -> bool:
    """Whether an object is gone or another has its name. A conflict may also come from a concurrent change."""
    return refused.status == 404 or (refused.status == 409 and _UID_DIFFERS in str(refused))
