"""Checks of a node's TCP ports: those free for ranks, and those of a mesh proxy that is in the way."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from msgspec import Struct

from holdfast.findings import Finding, Owner, Severity
from holdfast.preflight.node_view import NodeView, NotLookedAt

PORTS_PER_RANK = 256
"""Ephemeral ports per rank: NCCL, Gloo and data loaders listen on some dozens, and connect from as many again."""
_LISTENING = "0A"
"""TCP_LISTEN in /proc/net/tcp."""


def rendezvous_ports(view: NodeView) -> Iterator[Finding]:
    """The kernel has ephemeral ports to give: every socket of NCCL and Gloo takes one."""
    low, high = map(int, view.read("proc/sys/net/ipv4/ip_local_port_range").split())
    whole = range(low, high + 1)
    reserved = {port for port in _reserved_ports(view) if port in whole}
    needed = view.wanted.processes * PORTS_PER_RANK
    if len(whole) - len(reserved) - _tcp_sockets(view) >= needed:
        return
    listening = {port for port in listening_ports(view) if port in whole}
    free = len(whole) - len(reserved | listening)
    if free < needed:
        yield Finding(
            code="few-free-ports",
            severity=Severity.WARNING if free >= view.wanted.processes else Severity.ERROR,
            what=f"{free:,} ephemeral ports are free, and the ranks of this node open some {needed:,}",
            where="net.ipv4.ip_local_port_range",
            evidence=(
                f"net.ipv4.ip_local_port_range = {low} {high}",
                f"net.ipv4.ip_local_reserved_ports takes {len(reserved):,} of them",
                f"{len(listening):,} of them are listened on",
            ),
            remedy='`sysctl -w net.ipv4.ip_local_port_range="32768 60999"`, and reserve no more than what is used; on '
            "Kubernetes `securityContext.sysctls` of the pod.",
            owner=Owner.CLUSTER,
        )


def _tcp_sockets(view: NodeView) -> int:
    """The number of TCP sockets, listening or not: the kernel has it at hand, while a table of them takes 5 ms."""
    # TCP: inuse 98 orphan 0 tw 14 alloc 104 mem 2
    # TCP6: inuse 5
    lines = view.read("proc/net/sockstat").splitlines()
    with suppress(NotLookedAt):  # without IPv6
        lines += view.read("proc/net/sockstat6").splitlines()
    return sum(int(line.split()[2]) for line in lines if line.startswith(("TCP:", "TCP6:")))


def listening_ports(view: NodeView) -> set[int]:
    """The TCP ports on which a process of this network namespace listens."""
    tables = [view.read("proc/net/tcp")]
    with suppress(NotLookedAt):  # without IPv6
        tables.append(view.read("proc/net/tcp6"))
    return {port for table in tables for port in _listening(table)}


def _listening(table: str) -> Iterator[int]:
    #   sl  local_address rem_address   st tx_queue ...
    #    0: 0100007F:9F39 00000000:0000 0A 00000000:00000000 ...
    for line in table.splitlines()[1:]:
        _, local, _, state, *_ = line.split(maxsplit=4)
        if state == _LISTENING:
            yield int(local.rpartition(":")[2], 16)


def _reserved_ports(view: NodeView) -> set[int]:
    """The ports of `8080,30000-32767`; empty if the kernel has no such setting."""
    try:
        words = view.read("proc/sys/net/ipv4/ip_local_reserved_ports")
    except NotLookedAt:
        return set()
    ranges = [word.partition("-") for word in words.split(",") if word]
    return {port for low, _, high in ranges for port in range(int(low), int(high or low) + 1)}


class MeshProxy(Struct, frozen=True, kw_only=True):
    """A proxy that a service mesh puts before a pod's TCP connections."""

    name: str
    ports: frozenset[int]
    """It listens on all of them, in the pod's network namespace."""
    processes: frozenset[str]
    """Names in /proc/PID/comm, seen where the pod's containers share a process namespace."""
    variables: tuple[str, ...]
    """Prefixes of variables that only its pods have."""
    remedy: str


# https://istio.io/latest/docs/ops/deployment/application-requirements/#ports-used-by-istio
# https://linkerd.io/2/reference/proxy-configuration/
MESH_PROXIES = (
    MeshProxy(
        name="linkerd",
        ports=frozenset({4140, 4143}),
        processes=frozenset({"linkerd2-proxy"}),
        variables=("LINKERD2_PROXY_",),
        remedy="Annotate the pods with `linkerd.io/inject: disabled`.",
    ),
    MeshProxy(
        name="Istio or another mesh of Envoy",
        ports=frozenset({15001, 15006}),
        processes=frozenset({"envoy"}),
        variables=("ISTIO_META_",),
        remedy='Label and annotate the pods with `sidecar.istio.io/inject: "false"` (in ambient mode the label '
        "`istio.io/dataplane-mode: none`; with Kuma `kuma.io/sidecar-injection: disabled`).",
    ),
)


def sidecar(view: NodeView) -> Iterator[Finding]:
    """No mesh proxy stands between the ranks: it slows TCP, and may refuse what is neither HTTP nor mTLS."""
    if "KUBERNETES_SERVICE_HOST" not in view.environ:
        return
    listening, processes = listening_ports(view), _processes(view)
    for proxy in MESH_PROXIES:
        seen = (
            *(f"listening on port {port}" for port in sorted(proxy.ports) if proxy.ports <= listening),
            *(f"process {name}" for name in sorted(proxy.processes & processes)),
            *(f"variable {name}" for name in sorted(view.environ) if name.startswith(proxy.variables)),
        )
        if seen:
            yield Finding(
                code="mesh-proxy-in-pod",
                severity=Severity.WARNING,
                what=f"a proxy of {proxy.name} runs in this pod, through which all TCP connections of the ranks pass",
                where="pod",
                evidence=seen,
                remedy=proxy.remedy,
                owner=Owner.CLUSTER,
            )


def _processes(view: NodeView) -> set[str]:
    found: set[str] = set()
    for pid in view.list("proc"):
        if pid.isdecimal():
            with suppress(NotLookedAt):  # it has ended
                found.add(view.read(f"proc/{pid}/comm"))
    return found
