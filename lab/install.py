"""Owns how a fresh control plane gets what the operators publish, with webhooks led to the lab's own ports."""

from __future__ import annotations

import base64
import copy
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from holdfast.errors import ExitCode, failure
from lab.client import Client
from lab.manifests import COMPONENT
from lab.programs import Place

_AT_ONCE = 8
_ESTABLISHED_WITHIN_S = 120
_LOOK_S = 0.05

# Where certificates are renewed by an operator itself: it finds these, and nothing to do.
_CERTIFICATES = (("kueue-system", "kueue-webhook-server-cert"), ("kubeflow", "training-operator-webhook-cert"))


def install(client: Client, place: Place, objects: Iterable[dict[str, Any]]) -> None:
    """Create them all, kinds first, and return when every kind is served."""
    ready = [_led_here(one, place) for one in objects]
    kinds = [one for one in ready if one["kind"] in ("Namespace", "CustomResourceDefinition")]
    others = [one for one in ready if one["kind"] not in ("Namespace", "CustomResourceDefinition")]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        list(pool.map(client.create, kinds))
        list(pool.map(client.create, [*others, *_secrets(place)]))
    _await_established(client, {one["metadata"]["name"] for one in kinds if one["kind"] == "CustomResourceDefinition"})


def _led_here(one: dict[str, Any], place: Place) -> dict[str, Any]:
    """The object with its webhooks at the lab's ports, since a lab has no services."""
    one = copy.deepcopy(one)
    port = place.ports.get(f"{one['metadata']['labels'][COMPONENT]}-webhook")
    authority = base64.b64encode((place.pki / "ca.crt").read_bytes()).decode()
    for target in _targets(one):
        path = target.pop("service").get("path", "/")
        target |= {"url": f"https://127.0.0.1:{port}{path}", "caBundle": authority}
    return one


def _targets(one: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for webhook in one.get("webhooks", ()):
        yield webhook["clientConfig"]
    if one["kind"] == "CustomResourceDefinition":
        conversion = one["spec"].get("conversion", {})
        if conversion.get("strategy") == "Webhook":
            yield conversion["webhook"]["clientConfig"]


def _secrets(place: Place) -> Iterator[dict[str, Any]]:
    files = ("ca.crt", "ca.key", "tls.crt", "tls.key")
    data = {file: base64.b64encode((place.pki / file).read_bytes()).decode() for file in files}
    for namespace, name in _CERTIFICATES:
        metadata = {"namespace": namespace, "name": name}
        yield {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "data": data}


def _await_established(client: Client, names: set[str]) -> None:
    deadline = time.monotonic() + _ESTABLISHED_WITHIN_S
    while names:
        if time.monotonic() > deadline:
            raise failure(
                "lab-not-ready",
                "the API server does not serve some kinds",
                exit_code=ExitCode.INTERNAL,
                evidence=tuple(sorted(names)),
            )
        for one in client.get("/apis/apiextensions.k8s.io/v1/customresourcedefinitions")["items"]:
            conditions = one.get("status", {}).get("conditions") or ()
            if any(each["type"] == "Established" and each["status"] == "True" for each in conditions):
                names.discard(one["metadata"]["name"])
        time.sleep(_LOOK_S)
