"""Installs the operators' manifests in a control plane: the common part of all labs, and each lab's webhooks.

A lab has no Services, so webhooks point to the lab's own ports, with its own certificate authority.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from holdfast.errors import ExitCode, failure
from lab.client import LabClient, path_of
from lab.manifests import COMPONENT
from lab.programs import LabPaths

_AT_ONCE = 8
_ESTABLISHED_WITHIN_S = 120
_POLL_S = 0.3

# For operators that renew certificates themselves: they find these and leave them alone.
_CERTIFICATES = (("kueue-system", "kueue-webhook-server-cert"), ("kubeflow", "training-operator-webhook-cert"))
_KINDS = ("Namespace", "CustomResourceDefinition")
_WEBHOOKS = ("ValidatingWebhookConfiguration", "MutatingWebhookConfiguration")


def install(client: LabClient, objects: Iterable[dict[str, Any]]) -> None:
    """Create the objects that are equal in all labs, CRDs first, and return when the API server serves every kind."""
    same = [_without_conversion(one) for one in objects if one["kind"] not in _WEBHOOKS]
    kinds = [one for one in same if one["kind"] in _KINDS]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        list(pool.map(client.create, kinds))
        list(pool.map(client.create, [one for one in same if one["kind"] not in _KINDS]))
    await_established(client, {one["metadata"]["name"] for one in kinds if one["kind"] == "CustomResourceDefinition"})


def install_for_lab(client: LabClient, paths: LabPaths, objects: Iterable[dict[str, Any]]) -> None:
    """Point webhooks and conversions to this lab's programs, and create the keys that those serve with."""
    here = list(objects)
    webhooks = [_for_lab(one, paths) for one in here if one["kind"] in _WEBHOOKS]
    converted = [_for_lab(one, paths) for one in here if _converts(one)]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        list(pool.map(client.create, [*webhooks, *_secrets(paths)]))
        list(pool.map(partial(_convert, client), converted))


def _without_conversion(one: dict[str, Any]) -> dict[str, Any]:
    if not _converts(one):
        return one
    return one | {"spec": {key: value for key, value in one["spec"].items() if key != "conversion"}}


def _convert(client: LabClient, one: dict[str, Any]) -> None:
    client.patch(f"{path_of(one)}/{one['metadata']['name']}", {"spec": {"conversion": one["spec"]["conversion"]}})


def _converts(one: dict[str, Any]) -> bool:
    return one.get("spec", {}).get("conversion", {}).get("strategy") == "Webhook"


def _for_lab(one: dict[str, Any], paths: LabPaths) -> dict[str, Any]:
    """The object with its webhooks at the lab's ports."""
    port = paths.ports[f"{one['metadata']['labels'][COMPONENT]}-webhook"]
    authority = base64.b64encode((paths.pki / "ca.crt").read_bytes()).decode()
    for target in _targets(one):
        path = target.pop("service").get("path", "/")
        target |= {"url": f"https://127.0.0.1:{port}{path}", "caBundle": authority}
    return one


def _targets(one: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for webhook in one.get("webhooks", ()):
        yield webhook["clientConfig"]
    if _converts(one):
        yield one["spec"]["conversion"]["webhook"]["clientConfig"]


def _secrets(paths: LabPaths) -> Iterator[dict[str, Any]]:
    files = ("ca.crt", "ca.key", "tls.crt", "tls.key")
    data = {file: base64.b64encode((paths.pki / file).read_bytes()).decode() for file in files}
    for namespace, name in _CERTIFICATES:
        metadata = {"namespace": namespace, "name": name}
        yield {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "data": data}


def await_established(client: LabClient, kinds: Iterable[str]) -> None:
    """Return when the API server serves these custom kinds, by the names of their definitions."""
    names = set(kinds)
    deadline = time.monotonic() + _ESTABLISHED_WITHIN_S
    while names:
        if time.monotonic() > deadline:
            raise failure(
                "lab-not-ready",
                "the API server does not serve some kinds",
                exit_code=ExitCode.INTERNAL,
                evidence=tuple(sorted(names)),
                remedy="start it again; it may need more memory, or a less busy machine",
            )
        for one in client.get("/apis/apiextensions.k8s.io/v1/customresourcedefinitions")["items"]:
            conditions = one.get("status", {}).get("conditions") or ()
            if any(each["type"] == "Established" and each["status"] == "True" for each in conditions):
                names.discard(one["metadata"]["name"])
        time.sleep(_POLL_S)
