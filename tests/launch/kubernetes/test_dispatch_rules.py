"""Why a run that MultiKueue is to send to a worker cluster is in none."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.findings import Finding
from holdfast.launch.kubernetes.pending_reason.dispatch_rules import (
    WorkerCluster,
    chosen_cluster,
    dispatch_reason,
    has_quota,
)

FULL = Finding(code="quota-in-use", what="others hold the quota", where="workload a")


def cluster(active: str) -> dict[str, Any]:
    return {"status": {"conditions": [{"type": "Active", "status": active, "message": "no route to host"}]}}


@pytest.mark.parametrize(
    ("workers", "code", "evidence"),
    [
        ({"a": WorkerCluster(known=cluster("True"))}, "waits-for-cluster", ()),
        (
            {"a": WorkerCluster(known=cluster("True"), reason=FULL), "b": WorkerCluster(known=cluster("False"))},
            "waits-for-cluster",
            ("a: others hold the quota", "b: no contact: no route to host"),
        ),
        ({"a": WorkerCluster(known=cluster("False"))}, "multikueue-cluster-inactive", ("a: no route to host",)),
        ({"a": WorkerCluster(known={}, reason=FULL)}, "waits-for-cluster", ("a: others hold the quota",)),
    ],
)
def test_reason_names_what_keeps_the_run_from_each_worker(
    workers: dict[str, WorkerCluster], code: str, evidence: tuple[str, ...]
) -> None:
    reason = dispatch_reason(workers)
    assert (reason.code, reason.evidence) == (code, evidence)


def test_workload_shows_how_far_the_run_is() -> None:
    waits = {"status": {"conditions": [{"type": "QuotaReserved", "status": "False"}]}}
    reserved = {"status": {"conditions": [{"type": "QuotaReserved", "status": "True"}]}}
    sent = {"status": {**reserved["status"], "clusterName": "a"}}
    assert [has_quota(each) for each in (None, waits, reserved, sent)] == [False, False, True, True]
    assert [chosen_cluster(each) for each in (None, waits, reserved, sent)] == [None, None, None, "a"]
