"""The lab's client of its API server: HTTPS with the administrator's token."""

from __future__ import annotations

import ssl
from http import HTTPStatus
from pathlib import Path
from typing import Any

import httpx

from holdfast.errors import ExitCode, failure
from holdfast.findings import Owner

_TIMEOUT_S = 60.0
_CONNECTIONS = 16


class LabClient:
    """The API server of a lab, accessed as administrator; thread-safe."""

    def __init__(self, server: str, pki: Path) -> None:
        self._http = httpx.Client(
            base_url=server,
            verify=ssl.create_default_context(cafile=pki / "ca.crt"),
            headers={"Authorization": f"Bearer {(pki / 'token').read_text()}"},
            timeout=_TIMEOUT_S,
            limits=httpx.Limits(max_connections=_CONNECTIONS),
        )

    def get(self, path: str) -> Any:
        """The object or list at a path, such as /api/v1/nodes."""
        return self._answer(self._http.get(path))

    def create(self, one: dict[str, Any], *, dry_run: bool = False) -> Any:
        """Create an object; with `dry_run` only admit it."""
        return self._answer(self._http.post(path_of(one), json=one, params={"dryRun": "All"} if dry_run else {}))

    def delete(self, path: str) -> None:
        """Delete an object, if there is one, and return before it is gone."""
        response = self._http.delete(path)
        if response.status_code != HTTPStatus.NOT_FOUND:
            self._answer(response)

    def patch(self, path: str, change: dict[str, Any]) -> Any:
        """Change an object with a JSON merge patch."""
        kind = {"Content-Type": "application/merge-patch+json"}
        return self._answer(self._http.patch(path, json=change, headers=kind))

    def close(self) -> None:
        self._http.close()

    def _answer(self, response: httpx.Response) -> Any:
        if response.is_success:
            return response.json()
        raise failure(
            "lab-refused",
            f"the lab's API server answered {response.status_code} to {response.request.method}",
            exit_code=ExitCode.INTERNAL,
            where=response.request.url.path,
            evidence=(response.text[:2000],),
            remedy="see `python -m lab status`, and `log/kube-apiserver.log` in the lab's folder",
            owner=Owner.HOLDFAST,
        )


def path_of(one: dict[str, Any]) -> str:
    """The path at which objects of this one's kind are created."""
    version, kind = one["apiVersion"], one["kind"]
    base = f"/apis/{version}" if "/" in version else f"/api/{version}"
    namespace = one["metadata"].get("namespace")
    within = f"/namespaces/{namespace}" if namespace else ""
    return f"{base}{within}/{kind.lower()}s"
