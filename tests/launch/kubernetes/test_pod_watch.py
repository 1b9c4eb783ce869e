"""A gang of many pods, all suspended together, seen by the backend through a watch."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from holdfast.job.backend import BackendNodeState, NodeId
from holdfast.job.run_spec import RunSpec
from holdfast.job.spec import Job
from holdfast.job.targets import Workload
from holdfast.launch.kubernetes.client.api_errors import ApiUnavailable
from holdfast.launch.kubernetes.client.api_paths import NODES_PATH
from holdfast.launch.kubernetes.incluster import kubernetes_backend
from holdfast.launch.kubernetes.incluster.kubernetes_backend import KubernetesBackend, batches
from holdfast.launch.kubernetes.incluster.pod_reader import pod_status
from holdfast.launch.kubernetes.workload_catalog import CATALOG
from holdfast.run_dir import RunDir

NODES = 300
ACCEPTED = RunSpec(job=Job(command=("true",)), base="/", created_at=1.0, fabric="tcp")


def pod(node: int, **more: Any) -> dict[str, Any]:
    meta = {"uid": f"u{node}", "name": f"n{node}", "labels": {"jobset.sigs.k8s.io/job-index": str(node)}}
    status = {"phase": "Running", "podIP": f"10.0.0.{node}"}
    return {"metadata": meta | more.pop("metadata", {}), "status": status, **more}


class FakeCluster:
    """A cluster with one JobSet, whose pods leave one after the other once it is suspended."""

    def __init__(self) -> None:
        self.suspended = asyncio.Event()
        self.asked = 0

    async def get(self, path: str) -> Mapping[str, Any]:
        self.asked += 1
        suspended = self.suspended.is_set()  # as it is when the question comes
        await asyncio.sleep(0.005)
        return {"kind": "JobSet", "metadata": {"name": "run"}, "spec": {"suspend": suspended}}

    async def watch_pods(self, selector: str) -> AsyncIterator[Sequence[Mapping[str, Any]]]:
        yield [pod(node) for node in range(NODES)]
        await self.suspended.wait()
        for more in ({"metadata": {"deletionTimestamp": "now"}}, {"deleted": True}):
            for node in range(NODES):
                yield [pod(node, **more)]
                await asyncio.sleep(0)
        await asyncio.Event().wait()


def test_gang_that_is_suspended_is_asked_for_a_few_times_and_every_node_is_evicted(tmp_path: Path) -> None:
    async def scene() -> None:
        gang = FakeCluster()
        backend = KubernetesBackend(
            folder=RunDir(tmp_path),
            accepted=ACCEPTED,
            cluster=gang,  # pyright: ignore[reportArgumentType] - as much of a cluster as it asks
        )
        node_ids = [NodeId(node=node, generation=0) for node in range(NODES)]
        await backend.submit(tuple(node_ids))
        seen = backend.observe()

        async def sees(sight: BackendNodeState) -> None:
            assert [(await anext(seen)).state for _ in node_ids] == [sight] * NODES

        async with asyncio.timeout(60.0):
            await sees(BackendNodeState.CREATED)
            gang.suspended.set()
            await sees(BackendNodeState.EVICTED)
            await sees(BackendNodeState.TERMINATED)
        assert gang.asked < NODES // 3

    asyncio.run(scene())


class TaintedCluster:
    """A cluster whose machine m1 gets a taint, and whose pods stay until they are deleted."""

    def __init__(self, taint: str) -> None:
        self.taint = taint
        self.deleted = list[str]()

    async def get(self, path: str, **params: str) -> Mapping[str, Any]:
        if path != NODES_PATH:
            return {"kind": "JobSet", "metadata": {"name": "run"}, "spec": {"suspend": False}}
        assert params["labelSelector"] == "kubernetes.io/hostname in (m0,m1)"
        taints = [{"key": self.taint, "effect": "NoSchedule"}]
        return {"items": [{"metadata": {"name": f"m{node}"}, "spec": {"taints": taints * node}} for node in range(2)]}

    async def watch_pods(self, selector: str) -> AsyncIterator[Sequence[Mapping[str, Any]]]:
        yield [pod(node, spec={"nodeName": f"m{node}"}) for node in range(2)]
        await asyncio.Event().wait()

    async def delete(self, path: str, *, uid: str = "") -> None:
        del uid
        self.deleted.append(path.rpartition("/")[2])


@pytest.mark.parametrize(
    ("taint", "leaves"), [("karpenter.sh/disrupted", True), ("kubernetes.azure.com/scalesetpriority", False)]
)
def test_node_leaves_a_machine_once_whose_end_is_announced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taint: str, leaves: bool
) -> None:
    monkeypatch.setattr(kubernetes_backend, "MACHINES_POLL_S", 0.01)

    async def scene() -> None:
        cluster = TaintedCluster(taint)
        backend = KubernetesBackend(
            folder=RunDir(tmp_path),
            accepted=ACCEPTED,
            cluster=cluster,  # pyright: ignore[reportArgumentType] - as much of a cluster as it asks
        )
        await backend.submit(tuple(NodeId(node=node, generation=0) for node in range(2)))
        seen = backend.observe()
        async with asyncio.timeout(60.0):
            assert [(await anext(seen)).state for _ in range(2)] == [BackendNodeState.CREATED] * 2
            told = asyncio.ensure_future(anext(seen))
            done, _ = await asyncio.wait((told,), timeout=60.0 if leaves else 0.5)
        if not leaves:
            told.cancel()
            assert (done, cluster.deleted) == (set(), [])
            return
        evicted = told.result()
        assert (evicted.node_id.node, evicted.state) == (1, BackendNodeState.EVICTED)
        assert evicted.reason == f"the end of m1 is announced (taint {taint})"
        _, pending = await asyncio.wait((asyncio.ensure_future(anext(seen)),), timeout=0.2)
        assert (len(pending), cluster.deleted) == (1, ["n1"])

    asyncio.run(scene())


def status(why: str, *, ready: str = "True", **more: str) -> dict[str, Any]:
    target = {"type": "DisruptionTarget", "status": "True", "reason": why, "message": "text"}
    return {"phase": "Running", "conditions": [{"type": "Ready", "status": ready}, target], **more}


KUEUE_EVICTS = {"type": "TerminationTarget", "status": "True", "reason": "WorkloadEvicted", "message": "text"}
SHUT_DOWN = {"ready": "False", "phase": "Failed"}


@pytest.mark.parametrize(
    ("of_pod", "evicted"),
    [
        (status("EvictionByEvictionAPI"), "EvictionByEvictionAPI: text"),
        (status("PreemptionByScheduler"), "PreemptionByScheduler: text"),
        (status("DeletionByTaintManager"), "DeletionByTaintManager: text"),
        (status("DeletionByTaintManager", ready="False"), ""),  # the machine is unreachable
        (status("TerminationByKubelet", **SHUT_DOWN, reason="Terminated"), "TerminationByKubelet: text"),
        (status("TerminationByKubelet", **SHUT_DOWN, reason="Evicted"), ""),  # it used too much
        ({"phase": "Running", "conditions": [KUEUE_EVICTS]}, "WorkloadEvicted: text"),
        ({"phase": "Running"}, ""),
    ],
)
def test_eviction_is_what_the_cluster_does_with_a_pod_on_a_machine_that_works(
    of_pod: Mapping[str, Any], evicted: str
) -> None:
    seen = pod_status({**pod(1), "status": of_pod}, CATALOG[Workload.JOBSET].node_labels)
    assert seen is not None
    assert seen.evicted == evicted


@pytest.mark.parametrize(
    ("of_pod", "reason"),
    [
        (
            status("TerminationByKubelet", phase="Failed", reason="Evicted", message="low on disk"),
            "Evicted: low on disk",
        ),
        (status("DeletionByPodGC", phase="Failed"), "DeletionByPodGC: text"),
        ({"phase": "Failed"}, ""),
    ],
)
def test_pod_that_has_ended_says_who_ended_it(of_pod: Mapping[str, Any], reason: str) -> None:
    seen = pod_status({**pod(1), "status": of_pod}, CATALOG[Workload.JOBSET].node_labels)
    assert seen is not None
    assert (seen.ended, seen.reason) == (True, reason)


def test_batch_has_what_came_meanwhile_and_the_source_ends_as_it_would() -> None:
    async def source() -> AsyncIterator[Sequence[Mapping[str, Any]]]:
        yield []
        for node in range(10):
            yield [pod(node)]
        raise ApiUnavailable("cut")

    async def scene() -> None:
        async for batch in batches(source()):
            sizes.append(len(batch))
            names.extend(each["metadata"]["name"] for each in batch)
            await asyncio.sleep(0.01)

    sizes, names = list[int](), list[str]()
    with pytest.raises(ApiUnavailable):
        asyncio.run(scene())
    assert names == [f"n{node}" for node in range(10)]
    assert len(sizes) < 4
