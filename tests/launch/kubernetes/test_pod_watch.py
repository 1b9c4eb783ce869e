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
from holdfast.launch.kubernetes.client.api_errors import ApiUnavailable
from holdfast.launch.kubernetes.incluster.kubernetes_backend import KubernetesBackend, batches
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
