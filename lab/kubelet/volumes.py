"""A pod's volumes: each becomes a folder of this machine before its containers start."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from lab.kubelet.api import KubeletApi, KubeObject, RequestRejected
from lab.kubelet.container_env import MissingReference, decoded, field, parse_quantity

_TOKEN_S = 24 * 3600
"""Lifetime of tokens, which are not renewed: longer than a lab's."""

Fill = Callable[[Path, Any], Awaitable[None]]


class PodVolumes:
    """The volumes of one pod."""

    def __init__(self, api: KubeletApi, pod: KubeObject, folder: Path, addresses: Mapping[str, str]) -> None:
        self._api = api
        self._pod = pod
        self._folder = folder
        self._addresses = addresses
        self._in_memory: list[Path] = []

    async def prepare(self) -> dict[str, Path]:
        """The path of each volume by name; raises `MissingReference` if an object it needs is missing."""
        return {one["name"]: await self._prepare(one) for one in self._pod["spec"].get("volumes", ())}

    def release(self) -> None:
        """Release what is not merely a file."""
        for folder in self._in_memory:
            subprocess.run(["umount", "--lazy", folder], check=False, capture_output=True)

    async def _prepare(self, volume: KubeObject) -> Path:
        folder = self._folder / volume["name"]
        match volume:
            case {"hostPath": {"path": path}}:
                return self._on_host(Path(path), volume["hostPath"].get("type", ""))
            case {"persistentVolumeClaim": {"claimName": claim}}:
                return await self._claimed(claim)
            case {"emptyDir": {"medium": "Memory", **rest}} if not folder.exists():
                folder.mkdir(parents=True)
                size = rest.get("sizeLimit")
                options = f"size={parse_quantity(size)}" if size else "size=50%"
                await asyncio.to_thread(
                    subprocess.run, ["mount", "-t", "tmpfs", "-o", options, "lab", folder], check=True
                )
                self._in_memory.append(folder)
            case _:
                folder.mkdir(parents=True, exist_ok=True)
                await self._fill(folder, volume)
        return folder

    async def _fill(self, folder: Path, source: KubeObject) -> None:
        """Fill a folder with the content of a volume, or of one source of a projected volume."""
        match source:
            case {"configMap": one}:
                await self._keyed(folder, "configmaps", one.get("name"), one)
            case {"secret": one}:
                await self._keyed(folder, "secrets", one.get("secretName") or one.get("name"), one)
            case {"downwardAPI": one}:
                for item in one.get("items", ()):
                    if reference := item.get("fieldRef"):
                        text = field(reference["fieldPath"], self._pod, self._addresses)
                        _write(folder / item["path"], text.encode())
            case {"serviceAccountToken": one}:
                _write(folder / one["path"], (await self._token(one)).encode())
            case {"projected": one}:
                for part in one.get("sources", ()):
                    await self._fill(folder, part)
            case {"emptyDir": _} | {"name": _}:
                pass
            case _:
                raise MissingReference(f"the lab does not support this volume: {source}")

    async def _keyed(self, folder: Path, kind: str, name: str | None, source: KubeObject) -> None:
        entries = await read_object(self._api, self._namespace, kind, str(name), source.get("optional", False))
        items: list[KubeObject] = source.get("items") or [{"key": key, "path": key} for key in entries]
        for item in items:
            if item["key"] in entries:
                mode = item.get("mode", source.get("defaultMode", 0o644))
                _write(folder / item["path"], entries[item["key"]], mode)
            elif not source.get("optional"):
                raise MissingReference(f"references non-existent config key: {item['key']} of {kind} {name}")

    async def _token(self, source: KubeObject) -> str:
        metadata = self._pod["metadata"]
        account = self._pod["spec"].get("serviceAccountName", "default")
        reference = {"apiVersion": "v1", "kind": "Pod", "name": metadata["name"], "uid": metadata["uid"]}
        spec: KubeObject = {"expirationSeconds": _TOKEN_S, "boundObjectRef": reference}
        if audience := source.get("audience"):
            spec["audiences"] = [audience]
        body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec}
        path = f"/api/v1/namespaces/{self._namespace}/serviceaccounts/{account}/token"
        try:
            return (await self._api.request("POST", path, body))["status"]["token"]
        except RequestRejected as refused:
            raise MissingReference(str(refused)) from refused

    async def _claimed(self, claim: str) -> Path:
        found = await self._api.get_or_none(f"/api/v1/namespaces/{self._namespace}/persistentvolumeclaims/{claim}")
        if found is None or found.get("status", {}).get("phase") != "Bound":
            raise MissingReference(f'persistentvolumeclaim "{claim}" is not bound')
        volume = await self._api.get(f"/api/v1/persistentvolumes/{found['spec']['volumeName']}")
        source = volume["spec"].get("hostPath") or volume["spec"].get("local")
        if source is None:
            raise MissingReference(f"the lab does not support this volume: {volume['spec']}")
        return self._on_host(Path(source["path"]), "DirectoryOrCreate")

    def _on_host(self, path: Path, kind: str) -> Path:
        if kind == "DirectoryOrCreate":
            path.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            raise MissingReference(f"hostPath type check failed: {path} is not there")
        return path

    @property
    def _namespace(self) -> str:
        return self._pod["metadata"]["namespace"]


async def read_object(api: KubeletApi, namespace: str, kind: str, name: str, optional: bool) -> dict[str, bytes]:
    """The entries of a config map or a secret; raises `MissingReference` if it is missing and not optional."""
    one = await api.get_or_none(f"/api/v1/namespaces/{namespace}/{kind}/{name}")
    if one is None:
        if optional:
            return {}
        raise MissingReference(f'{kind.removesuffix("s")} "{name}" not found')
    return decoded({"kind": {"secrets": "Secret"}.get(kind), **one})


def _write(path: Path, content: bytes, mode: int = 0o644) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    path.chmod(mode)


def remove_volumes(folder: Path) -> None:
    """Remove the files of a pod's volumes."""
    shutil.rmtree(folder, ignore_errors=True)
