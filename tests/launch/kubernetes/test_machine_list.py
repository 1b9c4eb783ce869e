"""The machines of a cluster as its user sees them, and their release."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any, cast

import msgspec
import pytest

from holdfast.errors import HoldfastError
from holdfast.job.quarantine import Quarantine, QuarantineRow
from holdfast.launch.kubernetes import machine_list
from holdfast.launch.kubernetes.client.api_errors import ApiError
from holdfast.launch.kubernetes.client.cluster import ClusterClient
from holdfast.launch.kubernetes.quarantine_object import ANNOTATION, KEY, NAME
from holdfast.launch.target_machines import MachineState, TargetMachines

FORBIDDEN = ApiError(403, "ann may not")
ROW = QuarantineRow(
    machine="m3", since=time.time() - 60, until=time.time() + 3600, code="gpu-failed", run="demo-aaaaaa"
)


def machine(name: str, *, cordoned: bool = False, why: str = "") -> dict[str, Any]:
    annotations = {ANNOTATION: why} if why else {}
    return {
        "metadata": {"name": name, "annotations": annotations},
        "spec": {"unschedulable": True} if cordoned else {},
    }


def pod(name: str, run: str, phase: str = "Running") -> dict[str, Any]:
    return {"metadata": {"labels": {"holdfast/run": run}}, "spec": {"nodeName": name}, "status": {"phase": phase}}


class FakeCluster:
    """An API server with machines, pods and a quarantine."""

    def __init__(self, *forbidden: str) -> None:
        self.forbidden = forbidden
        self.nodes = [machine("m10"), machine("m2"), machine("m3", cordoned=True, why="m3: gpu-failed"), machine("m4")]
        self.known = Quarantine(rows=(ROW,))
        self.selectors: list[str] = []

    def _refuse(self, request: str) -> None:
        if any(request.startswith(each) for each in self.forbidden):
            raise FORBIDDEN

    async def get(self, path: str, **params: str) -> Mapping[str, Any]:
        self._refuse(f"GET {path}")
        if path.endswith(NAME):
            return {"metadata": {"resourceVersion": "1"}, "data": {KEY: msgspec.json.encode(self.known).decode()}}
        if path.endswith("/pods"):
            return {"items": [pod("m2", "llama-bbbbbb"), pod("m4", "old-cccccc", "Succeeded")]}
        if path.endswith("/nodes"):
            self.selectors.append(params.get("labelSelector", ""))
            return {"items": self.nodes}
        return next(each for each in self.nodes if path.endswith(f"/{each['metadata']['name']}"))

    async def patch(self, path: str, patch: Mapping[str, Any]) -> None:
        self._refuse(f"PATCH {path}")
        if path.endswith(NAME):
            self.known = msgspec.json.decode(patch["data"][KEY], type=Quarantine)
        else:
            assert patch == {"metadata": {"annotations": {ANNOTATION: None}}, "spec": {"unschedulable": None}}
            name = path.rpartition("/")[2]
            self.nodes = [machine(name) if each["metadata"]["name"] == name else each for each in self.nodes]


def read(cluster: FakeCluster, **selector: str) -> TargetMachines:
    return asyncio.run(machine_list._read(cast("ClusterClient", cluster), selector))  # pyright: ignore[reportPrivateUsage] - without a cluster


def released(cluster: FakeCluster, name: str) -> list[str]:
    findings = asyncio.run(machine_list._release(cast("ClusterClient", cluster), "gpus", name))  # pyright: ignore[reportPrivateUsage] - without a cluster
    return [finding.code for finding in findings]


def states(cluster: FakeCluster) -> dict[str, tuple[MachineState, tuple[str, ...]]]:
    return {each.name: (each.state, each.runs) for each in read(cluster).machines}


def test_machines_are_listed_by_name_with_their_runs_and_what_is_held_against_them() -> None:
    cluster = FakeCluster()
    cluster.nodes.append(machine("m11", cordoned=True, why="m11: nic-failed"))
    found = read(cluster, pool="gpu", zone="a")
    assert cluster.selectors == ["pool=gpu,zone=a"]
    assert [(each.name, each.state, each.runs) for each in found.machines] == [
        ("m2", MachineState.USED, ("llama-bbbbbb",)),
        ("m3", MachineState.QUARANTINED, ()),
        ("m4", MachineState.FREE, ()),
        ("m10", MachineState.FREE, ()),
        ("m11", MachineState.CORDONED, ()),
    ]
    assert found.machines[1].quarantine == ROW
    assert found.machines[4].note == "m11: nic-failed", "its quarantine is over, and the cordon is not"
    assert found.findings == ()


def test_user_who_may_not_list_machines_sees_those_in_use_and_quarantined() -> None:
    cluster = FakeCluster("GET /api/v1/nodes")
    assert list(states(cluster)) == ["m2", "m3"]
    (told,) = read(cluster).findings
    assert (told.code, "nodes" in told.what) == ("not-checked", True)


def test_release_undoes_the_cordon_of_a_run_and_no_other() -> None:
    cluster = FakeCluster()
    assert released(cluster, "m3") == []
    assert states(cluster)["m3"] == (MachineState.FREE, ())
    cluster = FakeCluster()
    cluster.nodes[2] = machine("m3", cordoned=True)
    assert released(cluster, "m3") == []
    assert states(cluster)["m3"] == (MachineState.CORDONED, ())


def test_release_undoes_the_cordon_of_a_quarantine_that_is_over() -> None:
    cluster = FakeCluster()
    cluster.nodes.append(machine("m11", cordoned=True, why="m11: nic-failed"))
    before = cluster.known
    assert released(cluster, "m11") == []
    assert states(cluster)["m11"] == (MachineState.FREE, ())
    assert cluster.known == before


def test_release_by_a_user_who_may_not_uncordon_says_so() -> None:
    cluster = FakeCluster("PATCH /api/v1/nodes")
    assert released(cluster, "m3") == ["machine-still-cordoned"]
    assert cluster.known.active(time.time()) == ()


def test_release_of_a_machine_that_is_not_quarantined_names_those_that_are() -> None:
    with pytest.raises(HoldfastError) as refused:
        released(FakeCluster(), "m4")
    (finding,) = refused.value.findings
    assert (finding.code, finding.where) == ("machine-not-quarantined", "m4")
    assert finding.evidence[0].startswith("m3: gpu-failed")
