"""The simulated nodes of a kubelet: registration, heartbeats, and power."""

from __future__ import annotations

import asyncio
import contextlib
import platform
from collections.abc import Iterable
from datetime import UTC, datetime
from functools import partial

import msgspec

from lab.kubelet.api import REQUEST_ERRORS, KubeletApi, KubeObject, retry_until_done
from lab.kubelet.status import moment

POWER = "lab.holdfast/power"
"""The annotation that switches a node `off`; without it, the node is on."""

_HEARTBEAT_S = 2.0
_LEASE_S = 40
_LEASES = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"
_CONDITIONS = (
    ("Ready", "True", "KubeletReady"),
    ("MemoryPressure", "False", "KubeletHasSufficientMemory"),
    ("DiskPressure", "False", "KubeletHasNoDiskPressure"),
    ("PIDPressure", "False", "KubeletHasSufficientPID"),
)


class NodeSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A simulated node."""

    name: str
    capacity: dict[str, str]
    labels: dict[str, str] = {}


class SimulatedNodes:
    """All nodes; they share an address and a port, and the API server tells pods apart by name."""

    def __init__(self, api: KubeletApi, specs: Iterable[NodeSpec], *, host: str, port: int) -> None:
        self.off: set[str] = set()
        self._api = api
        self._specs = {spec.name: spec for spec in specs}
        self._host = host
        self._port = port
        self._since: dict[str, str] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._specs

    async def register(self) -> None:
        """Create the nodes and report them ready."""
        await asyncio.gather(*(self._register(spec) for spec in self._specs.values()))

    async def send_heartbeats(self) -> None:
        """Send heartbeats forever for the nodes that are on."""
        while True:
            await asyncio.sleep(_HEARTBEAT_S)
            for name in self._specs.keys() - self.off:
                with contextlib.suppress(*REQUEST_ERRORS):
                    await self._renew(name)

    async def report_if_not_ready(self, node: KubeObject) -> None:
        """Report a node ready again that the control plane considers lost, as after an outage of the API server."""
        conditions = node.get("status", {}).get("conditions", ())
        if any(each["type"] == "Ready" and each["status"] != "True" for each in conditions):
            name = node["metadata"]["name"]
            self._since.pop(name, None)
            await retry_until_done(partial(self._report, self._specs[name]), f"node {name}")

    async def switch_on(self, name: str) -> None:
        """Bring a node back."""
        self.off.discard(name)
        self._since.pop(name, None)
        await self._report(self._specs[name])
        await self._renew(name)

    async def _register(self, spec: NodeSpec) -> None:
        labels = {
            "kubernetes.io/hostname": spec.name,
            "kubernetes.io/os": "linux",
            "kubernetes.io/arch": {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine()),
        }
        metadata = {"name": spec.name, "labels": labels | spec.labels}
        await self._api.create("/api/v1/nodes", {"apiVersion": "v1", "kind": "Node", "metadata": metadata})
        await self._report(spec)
        await self._renew(spec.name)

    async def _report(self, spec: NodeSpec) -> None:
        since = self._since.setdefault(spec.name, moment())
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
                "kubeletVersion": "v1.37.1",
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
                    "message": "",
                    "lastHeartbeatTime": moment(),
                    "lastTransitionTime": since,
                }
                for kind, value, reason in _CONDITIONS
            ],
        }
        await self._api.patch(f"/api/v1/nodes/{spec.name}/status", {"status": status})

    async def _renew(self, name: str) -> None:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        spec = {"holderIdentity": name, "leaseDurationSeconds": _LEASE_S, "renewTime": now}
        if await self._api.patch(f"{_LEASES}/{name}", {"spec": spec}, merge=True) is None:
            kind = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease"}
            await self._api.create(_LEASES, kind | {"metadata": {"name": name}, "spec": spec})
