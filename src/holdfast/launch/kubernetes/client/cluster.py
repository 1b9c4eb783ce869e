"""Client of the Kubernetes API server; no other module imports a Kubernetes library.

kr8s handles kubeconfigs, contexts and a pod's service account; requests use API paths. Every failure is raised as an
error of api_errors.py, and every request has a timeout.
"""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Any, cast

import anyio
import httpx
import httpx_ws
import kr8s
from kr8s import ServerError

from holdfast.launch.kubernetes.client.api_errors import ApiError, ApiUnavailable, ClusterError, KubeconfigError
from holdfast.launch.kubernetes.client.api_paths import PODS_PATH
from holdfast.launch.kubernetes.client.pod_port import MESSAGE_BYTES, PROTOCOL, PodPort

REQUEST_TIMEOUT_S = 30.0
"""Longest time to wait for a response."""
WATCH_TIMEOUT_S = 60
"""Longest time of one watch; a full list follows. A watch whose server or network is silently gone would otherwise
block forever; any other is ended by the server."""

_NO_ANSWER = (
    httpx.HTTPError,
    httpx_ws.HTTPXWSException,
    kr8s.APITimeoutError,
    kr8s.ConnectionClosedError,
    OSError,
    TimeoutError,
)
_OWN_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_MAX_MESSAGE_CHARS = 2000
"""Characters kept of a response that is not a Status object."""


class ClusterClient:
    """Client of one namespace of a cluster, which replaces `{namespace}` in paths.

    Raises KubeconfigError, ApiUnavailable and ApiError.
    """

    def __init__(
        self, *, context: str | None = None, namespace: str | None = None, timeout_s: float = REQUEST_TIMEOUT_S
    ) -> None:
        """None stands for the kubeconfig's values, or inside a pod for those of its service account."""
        self._context, self._namespace, self._timeout_s = context, namespace or _own_namespace(), timeout_s
        self._api: Any = None
        self._opening = anyio.Lock()
        self._attempts = 0
        self._open_error: Exception | None = None
        """Error of the last failed connection attempt."""

    async def connect(self) -> None:
        """Connect ahead of the first request, which raises the error if this fails."""
        with contextlib.suppress(Exception):
            await self._connect()

    async def location(self) -> tuple[str | None, str]:
        """The kubeconfig context in use, None inside a pod, and the namespace that it names."""
        api = await self._connect()
        context = api.auth.active_context or None
        if self._namespace or context is None:
            return context, api.namespace
        return context, api.auth.kubeconfig.get_context(context).get("namespace") or "default"

    async def get(self, path: str, **params: str) -> dict[str, Any]:
        """The object at a path."""
        return await self._request("GET", path, params=params)

    async def create(self, path: str, manifest: Mapping[str, Any], **params: str) -> dict[str, Any]:
        """Create an object under a path; returns it as created."""
        return await self._request("POST", path, json=manifest, params=params)

    async def patch(self, path: str, patch: Mapping[str, Any]) -> None:
        """Apply a merge patch to an object."""
        headers = {"Content-Type": "application/merge-patch+json"}
        await self._request("PATCH", path, content=json.dumps(patch), headers=headers)

    async def exists(self, path: str) -> bool:
        """Whether the object exists."""
        try:
            await self.get(path)
        except ApiError as refusal:
            if refusal.status != HTTPStatus.NOT_FOUND:
                raise
            return False
        return True

    @asynccontextmanager
    async def connect_to_port(self, pod: str, port: int) -> AsyncGenerator[PodPort]:
        """Connect to a port of a pod; failures while the connection is open are raised inside the block."""
        asked = f"connect to port {port} of pod {pod}"
        try:
            api = await self._connect()
            async with api.open_websocket(
                base=f"/api/v1/namespaces/{api.namespace}/pods/{pod}",
                version="",
                url="portforward",
                params={"ports": str(port)},
                subprotocols=[PROTOCOL],
                max_message_size_bytes=MESSAGE_BYTES,
            ) as socket:
                yield PodPort(_PortSocket(socket, asked))
        except BaseExceptionGroup as several:  # wraps everything raised while the connection is open
            raise _port_error(_first_error(several), asked) from several
        except (ServerError, *_NO_ANSWER) as error:
            raise _port_error(error, asked) from error

    async def pod_logs(
        self, pod: str, container: str | None = None, *, timestamps: bool = False, since: str | None = None
    ) -> AsyncIterator[bytes]:
        """Follow the log of a pod's running container until it ends; `container` None stands for the only one.

        With `timestamps` each line begins with its time. `since` (RFC 3339, whole seconds) skips older lines.
        """
        path, params = f"{PODS_PATH}/{pod}/log", {"follow": "true"}
        chosen = {"container": container, "sinceTime": since, "timestamps": "true" if timestamps else None}
        params |= {name: value for name, value in chosen.items() if value}
        try:
            async with self._call("GET", path, params=params, stream=True, timeout=None) as response:
                async for data in response.aiter_bytes():
                    yield data
        except (ServerError, *_NO_ANSWER) as error:
            raise _unavailable(error, f"read {path}") from error

    async def delete(self, path: str, *, uid: str = "") -> None:
        """Delete an object and what it owns; no-op if it does not exist, or is another one than that with the uid."""
        options = {"propagationPolicy": "Background"} | ({"preconditions": {"uid": uid}} if uid else {})
        try:
            await self._request("DELETE", path, content=json.dumps(options))
        except ApiError as refusal:
            if refusal.status != HTTPStatus.NOT_FOUND and not (uid and refusal.status == HTTPStatus.CONFLICT):
                raise

    async def watch_pods(self, selector: str) -> AsyncIterator[Sequence[Mapping[str, Any]]]:
        """All pods of a selector, then each change, for WATCH_TIMEOUT_S; a deleted pod has the key `deleted`."""
        found = await self._request("GET", PODS_PATH, params={"labelSelector": selector})
        yield found["items"]
        params = {
            "labelSelector": selector,
            "watch": "true",
            "resourceVersion": found["metadata"]["resourceVersion"],
            "timeoutSeconds": str(WATCH_TIMEOUT_S),
        }
        patience = httpx.Timeout(self._timeout_s, read=WATCH_TIMEOUT_S + self._timeout_s)
        try:
            async with self._call("GET", PODS_PATH, params=params, stream=True, timeout=patience) as response:
                async for line in response.aiter_lines():
                    event = json.loads(line)
                    if event["type"] == "ERROR":
                        return  # resource version expired: the caller lists again
                    yield ({**event["object"], "deleted": event["type"] == "DELETED"},)
        except (ServerError, *_NO_ANSWER) as error:
            raise _unavailable(error, f"watch {PODS_PATH}") from error

    @asynccontextmanager
    async def _call(self, method: str, path: str, **more: Any) -> AsyncGenerator[Any]:
        api = await self._connect()
        folder, _, name = path.format(namespace=api.namespace).rpartition("/")
        where = {"base": folder, "version": "", "url": name}
        # At 401 and 403 kr8s closes the connections of all concurrent requests, so this hides a 403 from it.
        async with api.call_api(method, **where, raise_for_status=False, **more) as response:
            if response.status_code != HTTPStatus.UNAUTHORIZED:
                if response.is_error:
                    await response.aread()
                    raise _error_from_response(response, f"{method} {folder}/{name}")
                yield response
                return
        async with api.call_api(method, **where, **more) as response:
            yield response

    async def _connect(self) -> Any:
        tried = self._attempts
        async with self._opening:
            if self._api is None:
                if self._attempts > tried and self._open_error is not None:
                    raise self._open_error  # concurrent requests share one attempt, and wait only once
                self._attempts += 1
                try:
                    self._api = await self._open()
                except Exception as error:
                    self._open_error = error
                    raise
        return self._api

    async def _open(self) -> Any:
        """Open the client: load the configuration and credentials, and make a first request."""
        try:
            with warnings.catch_warnings(action="ignore"):  # kr8s warns of newer Kubernetes versions
                with anyio.fail_after(self._timeout_s):  # unlike asyncio, this also kills a credential program
                    api = await kr8s.asyncio.api(context=self._context, namespace=self._namespace)
        except (ServerError, httpx.HTTPError, kr8s.APITimeoutError, TimeoutError):
            raise
        except Exception as error:  # kubeconfigs and their programs fail in many ways
            raise KubeconfigError(str(error) if type(error) is ValueError else _describe(error)) from error
        api.timeout = self._timeout_s
        return api

    async def _request(self, method: str, path: str, **more: Any) -> dict[str, Any]:
        asked = f"{method} {path.replace('{namespace}', self._namespace or '{namespace}')}"
        try:
            async with self._call(method, path, **more) as response:
                return response.json()
        except ServerError as error:
            raise _unavailable(error, asked) from error
        except _NO_ANSWER as error:
            raise _unavailable(error, asked) from error
        except (ValueError, KeyError) as error:  # kr8s expects `message` in a 4xx response
            raise ApiUnavailable(_describe(error), request=asked) from error


def _error_from_response(answer: httpx.Response, asked: str) -> ClusterError:
    message = _message(answer)
    return (
        ApiUnavailable(message, request=asked)
        if answer.is_server_error or answer.status_code == HTTPStatus.TOO_MANY_REQUESTS
        else ApiError(answer.status_code, message, request=asked)
    )


def _unavailable(error: Exception, asked: str) -> ClusterError:
    if isinstance(error, ServerError) and error.response is not None:
        return _error_from_response(error.response, asked)
    late = isinstance(error, TimeoutError | httpx.TimeoutException | kr8s.APITimeoutError)
    message = "timed out" if late else str(error) or type(error).__name__
    return ApiUnavailable(f"{message}{_at(error)}", request=asked)


def _at(error: Exception) -> str:
    """The server that did not answer, if known."""
    try:
        url = error.request.url if isinstance(error, httpx.RequestError) else None
    except RuntimeError:  # httpx raises it if there is none
        url = None
    return f" ({url.scheme}://{url.netloc.decode()})" if url else ""


def _message(answer: httpx.Response) -> str:
    """The message of a Status object, or the raw response text."""
    try:
        return str(answer.json()["message"])
    except (ValueError, KeyError, TypeError):
        return answer.text.strip()[:_MAX_MESSAGE_CHARS] or answer.reason_phrase


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _own_namespace() -> str | None:
    """Namespace of the pod that this runs in; kr8s would use `default`."""
    try:
        return _OWN_NAMESPACE.read_text().strip()
    except OSError:
        return None


class _PortSocket:
    """A WebSocket that raises ApiUnavailable if the connection ends early."""

    def __init__(self, socket: Any, request: str) -> None:
        self._socket, self._request = socket, request

    async def send_bytes(self, data: bytes) -> None:
        try:
            await self._socket.send_bytes(data)
        except _NO_ANSWER as error:
            raise _unavailable(error, self._request) from error

    async def receive_bytes(self) -> bytes:
        try:
            return await self._socket.receive_bytes()
        except _NO_ANSWER as error:
            raise _unavailable(error, self._request) from error


def _port_error(error: BaseException, asked: str) -> BaseException:
    """Convert an error of a connection to a pod."""
    match error:
        case httpx_ws.WebSocketUpgradeError(response=answer) if not answer.is_server_error:
            return ApiError(answer.status_code, answer.reason_phrase, request=asked)
        case ServerError() | OSError() | TimeoutError() | httpx.HTTPError() | httpx_ws.HTTPXWSException():
            return _unavailable(error, asked)
        case anyio.EndOfStream() | anyio.BrokenResourceError() | anyio.ClosedResourceError():
            return _unavailable(error, asked)  # a cut connection, which httpx-ws does not handle
        case _:
            return error


def _first_error(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first error of a group; all have one cause."""
    unanswered, _ = errors.split(ApiUnavailable)
    found: BaseException = unanswered or errors
    while isinstance(found, BaseExceptionGroup):
        found = cast(BaseExceptionGroup[BaseException], found).exceptions[0]
    return found
