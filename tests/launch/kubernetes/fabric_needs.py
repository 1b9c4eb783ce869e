"""What each fabric needs of a cluster, from the catalogue's rows: what is found without it, and what provides it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from msgspec.structs import fields
from tests.launch.kubernetes.golden_cases import FABRIC_DEVICES

from holdfast.fabric.catalog import CATALOG
from holdfast.fabric.fabric import Fabric, PodAccess

DAEMON = {"containers": [{"name": "a", "image": "a"}], "nodeSelector": {"for": "nobody"}}

CLUSTER_SCOPED = ("DeviceClass", "Network")


@dataclass(frozen=True, kw_only=True)
class Need:
    """One thing that a fabric needs: a resource of the machines, or an object."""

    resource: str = ""
    amount: int | str = 0
    kind: str = ""
    name: str = ""
    """As the target or the catalogue has it, such as `kube-system/device-injector`."""
    api: str = ""

    @property
    def finding(self) -> str:
        """What `check` finds without it."""
        if self.resource:
            return f"no machine offers {self.resource}, of which a node of the job asks for {self.amount}"
        return f"there is no {self.kind} {self.name}"

    def manifest(self, namespace: str) -> dict[str, Any]:
        """The object, in its own namespace or else this one."""
        where, _, name = self.name.rpartition("/")
        metadata = {"name": name} | ({} if self.kind in CLUSTER_SCOPED else {"namespace": where or namespace})
        if self.kind == "DeviceClass":
            spec: dict[str, Any] = {"selectors": [{"cel": {"expression": f"device.driver == '{name}'"}}]}
        elif self.api == "apps/v1":
            labels = {"app": name}
            template = {"metadata": {"labels": labels}, "spec": DAEMON}
            spec = {"selector": {"matchLabels": labels}, "template": template}
        else:
            spec = {}
        return {"apiVersion": self.api, "kind": self.kind, "metadata": metadata, "spec": spec}


def _devices(row: Fabric, device: Mapping[str, Any]) -> Iterator[Need]:
    amounts = Counter(rail["resource"] for rail in device.get("rails", ()) if "resource" in rail)
    if resource := device.get("resource", row.pod.resource):
        amounts[resource] = device.get("per_node", row.pod.per_node)
    yield from (Need(resource=name, amount=amount) for name, amount in amounts.items())


def _multus(row: Fabric, device: Mapping[str, Any]) -> Iterator[Need]:
    api, kind = "k8s.cni.cncf.io/v1", "NetworkAttachmentDefinition"
    names = [rail["network"] for rail in device.get("rails", ())] or [device["network"]]
    yield from (Need(api=api, kind=kind, name=name) for name in names)


def _gke(row: Fabric, device: Mapping[str, Any]) -> Iterator[Need]:
    names = [rail["network"] for rail in device.get("rails", ())] or [name for _, name in row.pod.gke_interfaces]
    yield from (Need(api="networking.gke.io/v1", kind="Network", name=name) for name in names)


def _claim(row: Fabric, device: Mapping[str, Any]) -> Iterator[Need]:
    assert row.pod.claim is not None
    name = device.get("device_class", row.pod.claim.device_class)
    yield Need(api="resource.k8s.io/v1", kind="DeviceClass", name=name)


def _huge_pages(row: Fabric, device: Mapping[str, Any]) -> Iterator[Need]:
    yield Need(resource="hugepages-2Mi", amount=row.pod.huge_pages)


def _daemon_sets(row: Fabric, device: Mapping[str, Any]) -> Iterator[Need]:
    yield from (Need(api="apps/v1", kind="DaemonSet", name=name) for name in row.pod.daemon_sets)


def _deployment(row: Fabric, device: Mapping[str, Any]) -> Iterator[Need]:
    yield Need(api="apps/v1", kind="Deployment", name=row.pod.deployment)


NEEDS: Mapping[str, Callable[[Fabric, Mapping[str, Any]], Iterator[Need]]] = {
    "per_node": _devices,
    "huge_pages": _huge_pages,
    "multus_attached": _multus,
    "gke_interfaces": _gke,
    "claim": _claim,
    "daemon_sets": _daemon_sets,
    "deployment": _deployment,
}
"""By the field of a row that asks for it."""

OTHERWISE_TESTED = {
    "resource": "with `per_node`: a cluster may name it otherwise",
    "gpus": "test_job_checks.py: it is the job that lacks them",
    **dict.fromkeys(
        ("capabilities", "host_network", "privileged", "mounts", "sidecar"),
        "test_manifests_accepted.py: Pod Security refuses them",
    ),
}

assert NEEDS.keys() | OTHERWISE_TESTED.keys() == {field.name for field in fields(PodAccess)}


def needs(fabric: str) -> list[Need]:
    """All that a fabric of the catalogue needs, as FABRIC_CASES uses it."""
    row, device = CATALOG[fabric], FABRIC_DEVICES.get(fabric, {})
    asked = [of for field, of in NEEDS.items() if getattr(row.pod, field) or (field == "per_node" and row.pod.resource)]
    return [need for of in asked for need in of(row, device)]
