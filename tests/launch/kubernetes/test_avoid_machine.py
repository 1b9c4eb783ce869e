"""A machine that failed is quarantined in the namespace's ConfigMap, and cordoned where the account may do that."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import pytest

from holdfast.findings import Finding, Owner
from holdfast.job.backend import NodeId
from holdfast.job.quarantine import Certainty, MachineEvidence
from holdfast.job.run_spec import RunSpec
from holdfast.job.spec import Job
from holdfast.launch.kubernetes.client.api_errors import ApiError, ApiUnavailable, ClusterError
from holdfast.launch.kubernetes.client.cluster import ClusterClient
from holdfast.launch.kubernetes.incluster.kubernetes_backend import KubernetesBackend
from holdfast.launch.kubernetes.quarantine_object import ANNOTATION, KEY, NAME, with_machines_excluded
from holdfast.run_dir import RunDir

FAILED = NodeId(node=1, generation=0)
FORBIDDEN = ApiError(
    403, 'nodes "m7" is forbidden: User "system:serviceaccount:train:run" cannot patch resource "nodes"'
)
GPU_FAILED = Finding(code="gpu-failed", what="its GPU failed", evidence=("Xid 79",), owner=Owner.CLUSTER)
EVIDENCE = {certainty: MachineEvidence(certainty=certainty, finding=GPU_FAILED) for certainty in Certainty}


class FakeCluster:
    """An API server with machines and the quarantine, which refuses what is in `refusals`, by the end of its path."""

    def __init__(self, refusals: Mapping[str, ClusterError] | None = None, *, machines: int = 20) -> None:
        self.refusals = dict(refusals or {})
        self.machines = [f"m{number}" for number in range(machines)]
        self.config_map: dict[str, Any] | None = {"metadata": {"name": NAME, "resourceVersion": "1"}}
        self.patched: list[tuple[str, Mapping[str, Any]]] = []
        self.conflicts = 0

    def _refuse(self, path: str) -> None:
        for end, error in self.refusals.items():
            if path.endswith(end):
                raise error

    async def get(self, path: str, **_: str) -> Mapping[str, Any]:
        self._refuse(f"GET {path}")
        if path.endswith("/nodes"):
            return {"items": [{"metadata": {"name": name}} for name in self.machines]}
        if self.config_map is None:
            raise ApiError(404, f"configmaps {NAME} not found")
        return self.config_map

    async def create(self, path: str, one: Mapping[str, Any]) -> Mapping[str, Any]:
        self._refuse(f"POST {path}")
        self.config_map = {**one, "metadata": {**one["metadata"], "resourceVersion": "1"}}
        return self.config_map

    async def patch(self, path: str, patch: Mapping[str, Any]) -> None:
        self._refuse(f"PATCH {path}")
        if not path.endswith(NAME):
            self.patched.append((path, patch))
            return
        assert self.config_map is not None
        current = self.config_map["metadata"]["resourceVersion"]
        if self.conflicts or patch["metadata"]["resourceVersion"] != current:
            self.conflicts -= 1
            raise ApiError(409, "the object has been modified")
        data = {**self.config_map.get("data", {}), **patch["data"]}
        self.config_map = {"metadata": {"name": NAME, "resourceVersion": str(int(current) + 1)}, "data": data}

    @property
    def rows(self) -> list[tuple[str, str]]:
        assert self.config_map is not None
        known = json.loads(self.config_map.get("data", {}).get(KEY, "{}"))
        return [(row["machine"], row["code"]) for row in known.get("rows", ())]


def backend(folder: Path, cluster: FakeCluster) -> KubernetesBackend:
    accepted = RunSpec(job=Job(command=("true",)), base="/", created_at=1.0, fabric="tcp", target="gpus")
    return KubernetesBackend(folder=RunDir(folder), accepted=accepted, cluster=cast("ClusterClient", cluster))


def avoided(folder: Path, cluster: FakeCluster, certainty: Certainty | None = Certainty.CERTAIN) -> list[Finding]:
    evidence = EVIDENCE[certainty] if certainty else None
    return list(asyncio.run(backend(folder, cluster).avoid_machine(FAILED, "m7", evidence)))


def test_machine_is_quarantined_and_cordoned_with_the_reason(tmp_path: Path) -> None:
    cluster = FakeCluster()
    cluster.conflicts = 2
    quarantined, cordoned = avoided(tmp_path, cluster)
    assert [quarantined.code, cordoned.code] == ["machine-quarantined", "machine-cordoned"]
    assert "holdfast nodes --release m7 --on gpus" in quarantined.remedy
    ((path, patch),) = cluster.patched
    assert (path, patch["spec"]) == ("/api/v1/nodes/m7", {"unschedulable": True})
    assert patch["metadata"]["annotations"][ANNOTATION].startswith("m7: gpu-failed, found by ")
    assert cluster.rows == [("m7", "gpu-failed")]


def test_suspected_machine_is_quarantined_and_not_cordoned(tmp_path: Path) -> None:
    cluster = FakeCluster()
    assert [told.code for told in avoided(tmp_path, cluster, Certainty.NAMED)] == ["machine-quarantined"]
    assert avoided(tmp_path, FakeCluster(), Certainty.CHECK) == []
    assert (cluster.rows, cluster.patched) == ([("m7", "gpu-failed")], [])


def test_machine_beyond_a_tenth_is_neither_quarantined_nor_cordoned(tmp_path: Path) -> None:
    cluster = FakeCluster(machines=10)
    avoided(tmp_path, cluster)
    here = backend(tmp_path, cluster)
    (full,) = asyncio.run(here.avoid_machine(FAILED, "m8", EVIDENCE[Certainty.CERTAIN]))
    assert full.code == "quarantine-full"
    assert [path for path, _ in cluster.patched] == ["/api/v1/nodes/m7"]
    assert cluster.rows == [("m7", "gpu-failed")]


def test_machine_that_may_not_be_cordoned_is_named_with_the_command(tmp_path: Path) -> None:
    _, finding = avoided(tmp_path, FakeCluster({"PATCH /api/v1/nodes/m7": FORBIDDEN}))
    assert (finding.code, finding.where) == ("machine-not-cordoned", "m7")
    assert "kubectl cordon m7" in finding.remedy
    assert finding.evidence == (str(FORBIDDEN),)


def test_account_that_may_not_write_the_quarantine_says_so_once_and_cordons_nothing(tmp_path: Path) -> None:
    cluster = FakeCluster({f"POST {path}": FORBIDDEN for path in ("/api/v1/namespaces/{namespace}/configmaps",)})
    cluster.config_map = None
    here = backend(tmp_path, cluster)
    (told,) = asyncio.run(here.avoid_machine(FAILED, "m7", EVIDENCE[Certainty.CERTAIN]))
    assert told.code == "machine-not-remembered"
    assert NAME in told.remedy
    assert asyncio.run(here.avoid_machine(FAILED, "m8", EVIDENCE[Certainty.CERTAIN])) == ()
    assert cluster.patched == []


def test_account_that_may_not_list_machines_counts_those_of_its_run(tmp_path: Path) -> None:
    cluster = FakeCluster({"GET /api/v1/nodes": FORBIDDEN})
    assert avoided(tmp_path, cluster) == [], "the only machine that it knows"
    assert cluster.rows == []


def test_damaged_quarantine_is_a_finding_and_is_kept(tmp_path: Path) -> None:
    cluster = FakeCluster()
    assert cluster.config_map is not None
    cluster.config_map["data"] = {KEY: "{"}
    told, *_ = avoided(tmp_path, cluster)
    assert told.code == "quarantine-unreadable"
    kept = [value for key, value in cluster.config_map["data"].items() if key.startswith("damaged-")]
    assert (kept, cluster.rows) == (["{"], [("m7", "gpu-failed")])


def test_api_server_that_does_not_answer_is_asked_again_by_the_controller(tmp_path: Path) -> None:
    for path in (f"GET /api/v1/namespaces/{{namespace}}/configmaps/{NAME}", "PATCH /api/v1/nodes/m7"):
        with pytest.raises(ApiUnavailable):
            avoided(tmp_path, FakeCluster({path: ApiUnavailable("down")}))


def test_next_controller_quarantines_nothing_that_may_be_repaired_by_now(tmp_path: Path) -> None:
    cluster = FakeCluster()
    assert avoided(tmp_path, cluster, None) == []
    assert (cluster.rows, cluster.patched) == ([], [])


def test_later_run_says_what_it_avoids(tmp_path: Path) -> None:
    cluster = FakeCluster()
    avoided(tmp_path / "first-aaaaaa", cluster)
    (told,) = asyncio.run(backend(tmp_path / "later-bbbbbb", cluster).quarantined())
    assert (told.code, told.where) == ("machines-quarantined", "m7")
    assert asyncio.run(backend(tmp_path / "first-aaaaaa", cluster).quarantined()) == ()


def test_only_pods_of_nodes_keep_off_quarantined_machines() -> None:
    def pod(part: str, **more: object) -> dict[str, Any]:
        return {"metadata": {"labels": {"holdfast/part": part}}, "spec": {"containers": [{}], **more}}

    apart = {"podAntiAffinity": {"x": 1}}
    gang = {"spec": {"jobs": [{"template": pod("node", affinity=apart)}, {"template": pod("controller")}]}}
    changed = with_machines_excluded(gang, ("m7", "m8"))
    node, other = (job["template"]["spec"] for job in changed["spec"]["jobs"])
    terms = node["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    fields = [{"key": "metadata.name", "operator": "NotIn", "values": [name]} for name in ("m7", "m8")]
    assert terms == [{"matchFields": fields}]
    assert node["affinity"]["podAntiAffinity"] == {"x": 1}
    assert "affinity" not in other
    assert gang["spec"]["jobs"][0]["template"]["spec"]["affinity"] == apart
    assert with_machines_excluded(gang, ()) == gang


def test_machines_are_excluded_in_each_term_of_the_target_s_node_affinity() -> None:
    required = "requiredDuringSchedulingIgnoredDuringExecution"
    zones = [{"matchExpressions": [{"key": "zone", "operator": "In", "values": [zone]}]} for zone in "ab"]
    preferred = {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 1}]}
    affinity = {"nodeAffinity": {required: {"nodeSelectorTerms": zones}, **preferred}}
    template = {"metadata": {"labels": {"holdfast/part": "node"}}, "spec": {"containers": [{}], "affinity": affinity}}
    changed = with_machines_excluded({"template": template}, ("m7",))["template"]["spec"]["affinity"]["nodeAffinity"]
    away = {"matchFields": [{"key": "metadata.name", "operator": "NotIn", "values": ["m7"]}]}
    assert changed == {required: {"nodeSelectorTerms": [{**zone, **away} for zone in zones]}, **preferred}
