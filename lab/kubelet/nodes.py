"""The simulated nodes of a kubelet: registration, heartbeats, and states such as `off`."""

from __future__ import annotations

import asyncio
import contextlib
import platform
from collections.abc import Iterable
from datetime import UTC, datetime
from enum import StrEnum
from functools import partial

import msgspec

from lab.kubelet.api import REQUEST_ERRORS, KubeletApi, KubeObject, retry_until_done
from lab.kubelet.status import moment

STATE = "lab.holdfast/state"
"""The annotation with a node's state; without it, the node is on."""


class NodeState(StrEnum):
    """What a node does; all but `on` imitate a fault."""

    ON = "on"
    OFF = "off"
    """Power failure: its pods end immediately, without a message."""
    SHUT_DOWN = "shut-down"
    """Graceful shutdown: its pods get SIGTERM, and the node is off once they have ended."""
    KUBELET_DOWN = "kubelet-down"
    """Its pods run on, and no kubelet reports them or stops them."""
    DISK_FULL = "disk-full"
    """The kubelet evicts its pods and accepts no more."""


_HEARTBEAT_S = 2.0
_LEASE_S = 40
_LEASES = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"
_CONDITIONS = {
    "Ready": ("True", "KubeletReady", "kubelet is posting ready status"),
    "MemoryPressure": ("False", "KubeletHasSufficientMemory", "kubelet has sufficient memory available"),
    "DiskPressure": ("False", "KubeletHasNoDiskPressure", "kubelet has no disk pressure"),
    "PIDPressure": ("False", "KubeletHasSufficientPID", "kubelet has sufficient PID available"),
}
_CONDITIONS_IN = {
    NodeState.SHUT_DOWN: {"Ready": ("False", "KubeletNotReady", "node is shutting down")},
    NodeState.DISK_FULL: {"DiskPressure": ("True", "KubeletHasDiskPressure", "kubelet has disk pressure")},
}
"""Conditions that differ in a state."""


class NodeSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A simulated node."""

    name: str
    capacity: dict[str, str]
    labels: dict[str, str] = {}


class SimulatedNodes:
    """All nodes; they share an address and a port, and the API server tells pods apart by name."""

    def __init__(self, api: KubeletApi, specs: Iterable[NodeSpec], *, host: str, port: int) -> None:
        self.silent: set[str] = set()
        """Nodes without a kubelet: they report nothing, and see no change of their pods."""
        self._states: dict[str, NodeState] = {}
        self._api = api
        self._specs = {spec.name: spec for spec in specs}
        self._host = host
        self._port = port
        self._since: dict[str, str] = {}
        """When a node's conditions got their statuses."""

    def __contains__(self, name: str) -> bool:
        return name in self._specs

    def state(self, name: str) -> NodeState:
        """A node's state."""
        return self._states.get(name, NodeState.ON)

    async def register(self) -> None:
        """Create the nodes and report them ready."""
        await asyncio.gather(*(self._register(spec) for spec in self._specs.values()))

    async def send_heartbeats(self) -> None:
        """Send heartbeats forever for the nodes that are on."""
        while True:
            await asyncio.sleep(_HEARTBEAT_S)
            for name in self._specs.keys() - self.silent:
                with contextlib.suppress(*REQUEST_ERRORS):
                    await self._renew(name)

    async def report_if_not_ready(self, node: KubeObject) -> None:
        """Report a node again that the control plane considers lost, or whose object was deleted and created again."""
        conditions = node.get("status", {}).get("conditions", ())
        if not any(each["type"] == "Ready" and each["status"] == "True" for each in conditions):
            name = node["metadata"]["name"]
            self._since.pop(name, None)
            await retry_until_done(partial(self._register, self._specs[name]), f"node {name}")

    async def enter(self, name: str, state: NodeState) -> None:
        """Put a node into a state, and report it unless its kubelet is gone then."""
        self._states[name] = state
        self._since.pop(name, None)
        if state in (NodeState.OFF, NodeState.KUBELET_DOWN):
            self.silent.add(name)
            return
        self.silent.discard(name)
        await retry_until_done(partial(self._register, self._specs[name]), f"node {name}")

    async def _register(self, spec: NodeSpec) -> None:
        labels = {
            "kubernetes.io/hostname": spec.name,
            "kubernetes.io/os": "linux",
            "kubernetes.io/arch": {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine()),
        }
        metadata = {"name": spec.name, "labels": labels | spec.labels}
        if await self._api.patch(f"/api/v1/nodes/{spec.name}", {"metadata": metadata}, merge=True) is None:
            await self._api.create("/api/v1/nodes", {"apiVersion": "v1", "kind": "Node", "metadata": metadata})
        await self._report(spec)
        await self._renew(spec.name)

    async def _report(self, spec: NodeSpec) -> None:
        since = self._since.setdefault(spec.name, moment())
        conditions = _CONDITIONS | _CONDITIONS_IN.get(self.state(spec.name), {})
        unknown = ("machineID", "systemUUID", "bootID", "kubeProxyVersion", "osImage")
        status: KubeObject = {
            "capacity": spec.capacity,
            "allocatable": spec.capacity,
            "addresses": [
                {"type": "InternalIP", "address": self._host},
                {"type": "Hostname", "address": spec.name},
            ],
            "daemonEndpoints": {"kubeletEndpoint": {"Port": self._port}},
            # With this the API server forwards WebSockets unchanged, so that SPDY is not needed.
            "declaredFeatures": ["ExtendWebSocketsToKubelet"],
            "nodeInfo": dict.fromkeys(unknown, "")
            | {
                "kubeletVersion": "v1.37.2",
                "containerRuntimeVersion": "process://1",
                "kernelVersion": platform.release(),
                "operatingSystem": "linux",
                "architecture": "amd64",
            },
            "conditions": [
                {
                    "type": kind,
                    "status": value,
                    "reason": reason,
                    "message": message,
                    "lastHeartbeatTime": moment(),
                    "lastTransitionTime": since,
                }
                for kind, (value, reason, message) in conditions.items()
            ],
        }
        await self._api.patch(f"/api/v1/nodes/{spec.name}/status", {"status": status})

    async def _renew(self, name: str) -> None:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        spec = {"holderIdentity": name, "leaseDurationSeconds": _LEASE_S, "renewTime": now}
        if await self._api.patch(f"{_LEASES}/{name}", {"spec": spec}, merge=True) is None:
            kind = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease"}
            await self._api.create(_LEASES, kind | {"metadata": {"name": name}, "spec": spec})
