"""A gang of many pods that is suspended at once, seen through a watch by the back end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from holdfast.folder import RunFolder
from holdfast.job.accepted import Accepted
from holdfast.job.backend import NodePlace, Sight
from holdfast.job.spec import Job
from holdfast.launch.kubernetes.backend import KubernetesBackend, batches
from holdfast.launch.kubernetes.refusals import Unanswered

NODES = 300
ACCEPTED = Accepted(job=Job(command=("true",)), base="/", created_at=1.0, fabric="tcp")


def pod(node: int, **more: Any) -> dict[str, Any]:
    meta = {"uid": f"u{node}", "name": f"n{node}", "labels": {"jobset.sigs.k8s.io/job-index": str(node)}}
    status = {"phase": "Running", "podIP": f"10.0.0.{node}"}
    return {"metadata": meta | more.pop("metadata", {}), "status": status, **more}


class Gang:
    """A cluster with one JobSet, whose pods leave one after the other once it is suspended."""

    def __init__(self) -> None:
        self.suspended = asyncio.Event()
        self.asked = 0

    async def read(self, path: str) -> Mapping[str, Any]:
        self.asked += 1
        suspended = self.suspended.is_set()  # as it is when the question comes
        await asyncio.sleep(0.005)
        return {"kind": "JobSet", "metadata": {"name": "run"}, "spec": {"suspend": suspended}}

    async def pods(self, selector: str) -> AsyncIterator[Sequence[Mapping[str, Any]]]:
        yield [pod(node) for node in range(NODES)]
        await self.suspended.wait()
        for more in ({"metadata": {"deletionTimestamp": "now"}}, {"deleted": True}):
            for node in range(NODES):
                yield [pod(node, **more)]
                await asyncio.sleep(0)
        await asyncio.Event().wait()


def test_gang_that_is_suspended_is_asked_for_a_few_times_and_every_node_is_evicted(tmp_path: Path) -> None:
    async def scene() -> None:
        gang = Gang()
        backend = KubernetesBackend(
            folder=RunFolder(tmp_path),
            accepted=ACCEPTED,
            cluster=gang,  # pyright: ignore[reportArgumentType] - as much of a cluster as it asks
        )
        places = [NodePlace(node=node, generation=0) for node in range(NODES)]
        await backend.submit(tuple(places))
        seen = backend.observe()

        async def sees(sight: Sight) -> None:
            assert [(await anext(seen)).sight for _ in places] == [sight] * NODES

        async with asyncio.timeout(60.0):
            await sees(Sight.MADE)
            gang.suspended.set()
            await sees(Sight.EVICTED)
            await sees(Sight.GONE)
        assert gang.asked < NODES // 3

    asyncio.run(scene())


def test_batch_has_what_came_meanwhile_and_the_source_ends_as_it_would() -> None:
    async def source() -> AsyncIterator[Sequence[Mapping[str, Any]]]:
        yield []
        for node in range(10):
            yield [pod(node)]
        raise Unanswered("cut")

    async def scene() -> None:
        async for batch in batches(source()):
            sizes.append(len(batch))
            names.extend(each["metadata"]["name"] for each in batch)
            await asyncio.sleep(0.01)

    sizes, names = list[int](), list[str]()
    with pytest.raises(Unanswered):
        asyncio.run(scene())
    assert names == [f"n{node}" for node in range(10)]
    assert len(sizes) < 4
