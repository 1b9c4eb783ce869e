"""The runs of a namespace, from its objects."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, cast

import pytest
from tests.launch.kubernetes.golden_cases import Case, render_context

from holdfast.findings import Severity
from holdfast.launch.kubernetes.client.api_errors import ApiError
from holdfast.launch.kubernetes.client.cluster import ClusterClient
from holdfast.launch.kubernetes.manifests.run_manifests import render
from holdfast.launch.kubernetes.manifests.yaml_writer import to_plain
from holdfast.launch.kubernetes.run_list import read_runs
from holdfast.launch.kubernetes.workload_catalog import CATALOG
from holdfast.launch.target_runs import TargetRun, TargetRuns

AT = "2026-11-20T10:00:00Z"
LATER = "2026-11-20T10:05:00Z"


def run_object(workload: str, run: str, at: str = AT, **more: Any) -> dict[str, Any]:
    """The object that a start creates, as the API server returns it."""
    one = to_plain(render(render_context(Case(target={"workload": workload}))).owner)
    labels = {**one["metadata"]["labels"], "holdfast/run": run}
    meta = {**one["metadata"], "name": run, "labels": labels, "creationTimestamp": at, **more.pop("metadata", {})}
    return {**one, "metadata": meta, **more}


def ended(condition: str, reason: str = "") -> dict[str, Any]:
    return {"conditions": [{"type": condition, "status": "True", "reason": reason, "lastTransitionTime": LATER}]}


class FakeCluster:
    """An API server that has JobSets and TrainJobs, and refuses some of its kinds."""

    def __init__(self, *forbidden: str) -> None:
        self.forbidden = forbidden
        queued = run_object("trainjob", "queued-dddddd")
        new = run_object("jobset", "new-cccccc", at=LATER)
        mine = {"ownerReferences": [{"kind": "TrainJob", "name": "queued-dddddd", "controller": True}]}
        self.objects: Mapping[str, list[dict[str, Any]]] = {
            "jobsets": [
                run_object("jobset", "old-aaaaaa", status=ended("Completed")),
                run_object("jobset", "bad-bbbbbb", status=ended("Failed")),
                run_object("jobset", "cut-ffffff", status=ended("Failed", "RunCancelled")),
                {**new, "spec": {**new["spec"], "suspend": False}},  # by Kueue
                run_object("jobset", "gone-eeeeee", metadata={"deletionTimestamp": LATER}),
                run_object("jobset", "queued-dddddd", metadata=mine),
            ],
            "trainjobs": [queued],
            "pods": [{"metadata": {"labels": {"holdfast/run": "new-cccccc"}}, "status": {"phase": "Running"}}] * 2,
        }
        self.requests: list[str] = []

    async def get(self, path: str, **_: str) -> Mapping[str, Any]:
        kind = path.rpartition("/")[2]
        self.requests.append(kind)
        if kind in self.forbidden:
            raise ApiError(403, f'{kind} is forbidden: User "ann" cannot list resource "{kind}"')
        if kind not in self.objects:
            raise ApiError(404, "the server could not find the requested resource")
        return {"items": self.objects[kind]}


def read(cluster: FakeCluster) -> TargetRuns:
    return asyncio.run(read_runs(cast("ClusterClient", cluster)))


def phases(found: TargetRuns) -> dict[str, tuple[str, int | None]]:
    return {run.run: (run.phase, run.running_nodes) for run in found.runs}


def test_runs_of_all_kinds_are_listed_newest_first_with_one_request_for_each_kind() -> None:
    cluster = FakeCluster()
    found = read(cluster)
    assert sorted(cluster.requests) == sorted(["pods", *(kind.resource for kind in CATALOG.values())])
    assert phases(found) == {
        "new-cccccc": ("running", 2),
        "bad-bbbbbb": ("failed", 0),
        "cut-ffffff": ("cancelled", 0),
        "gone-eeeeee": ("stopping", 0),
        "old-aaaaaa": ("succeeded", 0),
        "queued-dddddd": ("pending", 0),
    }
    assert found.runs[0] == TargetRun(
        run="new-cccccc",
        phase=found.runs[0].phase,
        created_at=found.runs[1].created_at + 300,
        user="(set when the run is started)",
        nodes=2,
        running_nodes=2,
        where="jobset/new-cccccc",
    )
    assert found.runs[1].finished_at == found.runs[0].created_at
    assert found.findings == ()


def test_kind_that_the_user_may_not_list_is_named_and_the_rest_is_listed() -> None:
    found = read(FakeCluster("jobsets", "pods"))
    assert phases(found) == {"queued-dddddd": ("pending", None)}
    (finding,) = found.findings
    assert (finding.code, finding.remedy) == ("not-checked", "Allow `list` on jobsets, pods.")
    assert phases(read(FakeCluster("pods")))["new-cccccc"] == ("running", None)


def test_user_who_may_list_no_kind_is_refused() -> None:
    with pytest.raises(ApiError, match='cannot list resource "jobsets"'):
        read(FakeCluster("jobsets", "trainjobs"))


def test_pods_of_runs_that_multikueue_sent_elsewhere_are_counted_there() -> None:
    workers = {"a": FakeCluster(), "b": FakeCluster(), "c": FakeCluster("pods")}
    manager = FakeCluster("pods")
    found = asyncio.run(read_runs(cast("ClusterClient", manager), cast("dict[str, ClusterClient]", workers)))
    assert phases(found)["new-cccccc"] == ("running", 4)
    assert "pods" not in manager.requests
    (finding,) = found.findings
    assert (finding.code, finding.severity) == ("not-permitted", Severity.WARNING)
    assert finding.what.startswith("in cluster c: ")
