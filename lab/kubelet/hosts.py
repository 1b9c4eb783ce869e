"""The /etc/hosts file of a pod: its own names, those of pods with a subdomain, and those of Services. Pure.

The lab has no DNS server; /etc/hosts contains what a cluster's DNS would return.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from lab.kubelet.api import KubeObject

_DOMAIN = "svc.cluster.local"


@dataclass(frozen=True, kw_only=True)
class PodDnsEntry:
    """A pod as other pods resolve it."""

    namespace: str
    hostname: str
    subdomain: str
    labels: dict[str, str]
    address: str
    ready: bool


def hosts_file(own: PodDnsEntry, pods: Iterable[PodDnsEntry], services: Iterable[KubeObject], apiserver: str) -> str:
    """The text of a pod's /etc/hosts."""
    lines = [
        "127.0.0.1 localhost",
        "::1 localhost ip6-localhost ip6-loopback",
        f"{own.address} {own.hostname}",
        f"{apiserver} {' '.join(_dns_names('kubernetes', 'default', own.namespace))}",
    ]
    listed = list(pods)
    for service in services:
        lines += _records(service, listed, own.namespace)
    return "".join(f"{line}\n" for line in lines)


def _records(service: KubeObject, pods: list[PodDnsEntry], seen_from: str) -> Iterator[str]:
    name, namespace = service["metadata"]["name"], service["metadata"]["namespace"]
    spec = service["spec"]
    if not (selector := spec.get("selector")):
        return
    chosen = [
        pod
        for pod in pods
        if pod.namespace == namespace
        and selector.items() <= pod.labels.items()
        and (pod.ready or spec.get("publishNotReadyAddresses"))
    ]
    headless = spec.get("clusterIP") == "None"
    for pod in chosen if headless else chosen[:1]:
        yield f"{pod.address} {' '.join(_dns_names(name, namespace, seen_from))}"
    for pod in chosen if headless else ():
        if pod.subdomain == name:
            yield f"{pod.address} {' '.join(_dns_names(f'{pod.hostname}.{name}', namespace, seen_from))}"


def _dns_names(name: str, namespace: str, seen_from: str) -> tuple[str, ...]:
    """All forms of a name; the shortest is for the reader's own namespace."""
    whole = f"{name}.{namespace}.{_DOMAIN}"
    forms = (whole, f"{name}.{namespace}.svc", f"{name}.{namespace}")
    return (*forms, name) if namespace == seen_from else forms
