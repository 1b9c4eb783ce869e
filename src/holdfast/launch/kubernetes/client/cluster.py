"""Owns speaking to the API server: the one place where a Kubernetes client is used.

kr8s knows kubeconfigs, contexts and the service account of a pod; what is asked is said in the API's own paths. What
goes wrong is one of the errors of api_errors.py, and every question has an end.
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
from holdfast.launch.kubernetes.client.pod_exec import MESSAGE_BYTES, PROTOCOL, PodExec

REQUEST_TIMEOUT_S = 30.0
"""Longest that an answer is waited for."""
WATCH_TIMEOUT_S = 60
"""How long a watch lasts before all is listed anew. One whose server or network has gone without a word is silent for
ever; of any other the server says that it is over."""

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
"""Characters kept of an answer that is no Status."""


class ClusterClient:
    """One namespace of a cluster, which `{namespace}` in paths stands for, as whoever asks.

    Raises Unconfigured, Unanswered and ApiError.
    """

    def __init__(
        self, *, context: str | None = None, namespace: str | None = None, timeout_s: float = REQUEST_TIMEOUT_S
    ) -> None:
        """None are those of the kubeconfig, or inside a pod those of its own account."""
        self._context, self._namespace, self._timeout_s = context, namespace or _own_namespace(), timeout_s
        self._api: Any = None
        self._opening = anyio.Lock()
        self._attempts = 0
        self._open_error: Exception | None = None
        """Why the last try to open it did not succeed."""

    async def connect(self) -> None:
        """Have whoever asks next wait less; what goes wrong is for them to hear."""
        with contextlib.suppress(Exception):
            await self._connect()

    async def get(self, path: str, **params: str) -> dict[str, Any]:
        """What lies at a path."""
        return await self._request("GET", path, params=params)

    async def create(self, path: str, manifest: Mapping[str, Any], **params: str) -> dict[str, Any]:
        """Have an object made among those at a path; what there is of it then."""
        return await self._request("POST", path, json=manifest, params=params)

    async def patch(self, path: str, patch: Mapping[str, Any]) -> None:
        """Change a part of an object."""
        headers = {"Content-Type": "application/merge-patch+json"}
        await self._request("PATCH", path, content=json.dumps(patch), headers=headers)

    async def exists(self, path: str) -> bool:
        """Whether there is such an object."""
        try:
            await self.get(path)
        except ApiError as refusal:
            if refusal.status != HTTPStatus.NOT_FOUND:
                raise
            return False
        return True

    @asynccontextmanager
    async def exec_in_pod(self, pod: str, *command: str) -> AsyncGenerator[PodExec]:
        """Run a command in a pod; what goes wrong while it runs is raised in here too."""
        asked = f"exec in pod {pod}"
        try:
            api = await self._connect()
            async with api.open_websocket(
                base=f"/api/v1/namespaces/{api.namespace}/pods/{pod}",
                version="",
                url="exec",
                params={"command": list(command), "stdin": "true", "stdout": "true", "stderr": "true"},
                subprotocols=[PROTOCOL],
                max_message_size_bytes=MESSAGE_BYTES,
            ) as socket:
                yield PodExec(_ExecSocket(socket, asked))
        except BaseExceptionGroup as several:  # as which comes whatever is raised while the connection is open
            raise _exec_error(_first_error(several), asked) from several
        except (ServerError, *_NO_ANSWER) as error:
            raise _exec_error(error, asked) from error

    async def pod_logs(
        self, pod: str, container: str | None = None, *, timestamps: bool = False, since: str | None = None
    ) -> AsyncIterator[bytes]:
        """What a pod's container has written in its present life, and writes until it ends; None is its only one.

        With `timestamps` each line begins with its time. `since` (RFC 3339, whole seconds) leaves out what is older.
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

    async def delete(self, path: str) -> None:
        """Remove an object and what it owns; nothing is done where there is none."""
        try:
            await self._request("DELETE", path, params={"propagationPolicy": "Background"})
        except ApiError as refusal:
            if refusal.status != HTTPStatus.NOT_FOUND:
                raise

    async def watch_pods(self, selector: str) -> AsyncIterator[Sequence[Mapping[str, Any]]]:
        """All pods of a selector, and then each as it changes, for a while; one that is deleted has `deleted`."""
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
                        return  # too long ago: all are listed anew
                    yield ({**event["object"], "deleted": event["type"] == "DELETED"},)
        except (ServerError, *_NO_ANSWER) as error:
            raise _unavailable(error, f"watch {PODS_PATH}") from error

    @asynccontextmanager
    async def _call(self, method: str, path: str, **more: Any) -> AsyncGenerator[Any]:
        api = await self._connect()
        folder, _, name = path.format(namespace=api.namespace).rpartition("/")
        where = {"base": folder, "version": "", "url": name}
        # At 401 and 403 kr8s closes the connections of all that is asked at the same time, so it is not told of 403.
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
                    raise self._open_error  # it was waited for: who asks many things at once waits no longer than for one
                self._attempts += 1
                try:
                    self._api = await self._open()
                except Exception as error:
                    self._open_error = error
                    raise
        return self._api

    async def _open(self) -> Any:
        """The client, once it knows whom to ask and as whom, and was answered."""
        try:
            with warnings.catch_warnings(action="ignore"):  # of versions of Kubernetes that are newer than it
                with anyio.fail_after(self._timeout_s):  # which, unlike asyncio, also ends a program for credentials
                    api = await kr8s.asyncio.api(context=self._context, namespace=self._namespace)
        except (ServerError, httpx.HTTPError, kr8s.APITimeoutError, TimeoutError):
            raise
        except Exception as error:  # whatever a kubeconfig, and programs that it names, can be wrong in
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
        except (ValueError, KeyError) as error:  # kr8s looks for `message` in an answer of 4xx
            raise ApiUnavailable(_describe(error), request=asked) from error


def _error_from_response(answer: httpx.Response, asked: str) -> ClusterError:
    said = _message(answer)
    return (
        ApiUnavailable(said, request=asked)
        if answer.is_server_error or answer.status_code == HTTPStatus.TOO_MANY_REQUESTS
        else ApiError(answer.status_code, said, request=asked)
    )


def _unavailable(error: Exception, asked: str) -> ClusterError:
    if isinstance(error, ServerError) and error.response is not None:
        return _error_from_response(error.response, asked)
    late = isinstance(error, TimeoutError | httpx.TimeoutException | kr8s.APITimeoutError)
    said = "timed out" if late else str(error) or type(error).__name__
    return ApiUnavailable(f"{said}{_at(error)}", request=asked)


def _at(error: Exception) -> str:
    """Which server it was that did not answer, where that is known."""
    try:
        url = error.request.url if isinstance(error, httpx.RequestError) else None
    except RuntimeError:  # httpx's word for none
        url = None
    return f" ({url.scheme}://{url.netloc.decode()})" if url else ""


def _message(answer: httpx.Response) -> str:
    """The message of a Status, and any other answer as it is."""
    try:
        return str(answer.json()["message"])
    except (ValueError, KeyError, TypeError):
        return answer.text.strip()[:_MAX_MESSAGE_CHARS] or answer.reason_phrase


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _own_namespace() -> str | None:
    """Of the pod that this runs in; kr8s would say `default`."""
    try:
        return _OWN_NAMESPACE.read_text().strip()
    except OSError:
        return None


class _ExecSocket:
    """A WebSocket whose end before its time is an answer that did not come."""

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


def _exec_error(error: BaseException, asked: str) -> BaseException:
    """What an error of a command in a pod means to us."""
    match error:
        case httpx_ws.WebSocketUpgradeError(response=answer) if not answer.is_server_error:
            return ApiError(answer.status_code, answer.reason_phrase, request=asked)
        case ServerError() | OSError() | TimeoutError() | httpx.HTTPError() | httpx_ws.HTTPXWSException():
            return _unavailable(error, asked)
        case anyio.EndOfStream() | anyio.BrokenResourceError() | anyio.ClosedResourceError():
            return _unavailable(error, asked)  # of a connection that was cut, which httpx-ws does not expect
        case _:
            return error


def _first_error(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """One of several errors that came together; they have one cause."""
    unanswered, _ = errors.split(ApiUnavailable)
    found: BaseException = unanswered or errors
    while isinstance(found, BaseExceptionGroup):
        found = cast(BaseExceptionGroup[BaseException], found).exceptions[0]
    return found
