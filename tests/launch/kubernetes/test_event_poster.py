"""What the run's object is told of a run, by an API server that refuses, fails or forgets to answer."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, cast

import pytest

from holdfast.events import AnyEvent, NodeEvicted, NodeRequested, Outcome, RecoveryDecided, ShutdownDecided
from holdfast.events.log_writer import EventWriter
from holdfast.findings import Finding
from holdfast.launch.kubernetes.client.api_errors import ApiError, ApiUnavailable, ClusterError
from holdfast.launch.kubernetes.client.cluster import ClusterClient
from holdfast.launch.kubernetes.incluster.event_poster import MAX_PER_MINUTE, EventPoster
from holdfast.run_dir import RunDir

FAILURE = RecoveryDecided(
    at=3.0,
    replica=0,
    attempt=0,
    action="restart",
    failed_at=2.0,
    finding=Finding(code="rank-failed", what="rank 1 exited with code 3", remedy="r"),
)
END = ShutdownDecided(at=9.0, outcome=Outcome.FAILED, reason="too many restarts", exit_code=3)


class FakeCluster:
    """An API server with a JobSet of a TrainJob."""

    def __init__(self) -> None:
        self.posted: dict[str, Mapping[str, Any]] = {}
        self.errors: list[ClusterError] = []
        """Answers to the next requests to create."""
        self.tries = 0

    async def get(self, path: str) -> Mapping[str, Any]:
        owner = {"apiVersion": "trainer/v1", "kind": "TrainJob", "name": "run", "uid": "2", "controller": True}
        meta = {"name": "run", "namespace": "ml", "uid": "1", "ownerReferences": [owner]}
        return {"apiVersion": "jobset/v1", "kind": "JobSet", "metadata": meta}

    async def create(self, path: str, one: Mapping[str, Any]) -> None:
        self.tries += 1
        if self.errors:
            raise self.errors.pop(0)
        if one["metadata"]["name"] in self.posted:
            raise ApiError(409, "already exists")
        self.posted[one["metadata"]["name"]] = one

    def lines(self) -> list[tuple[str, str, str]]:
        return [(one["type"], one["reason"], one["message"]) for one in self.posted.values()]


def write(run: RunDir, *events: AnyEvent) -> None:
    writer = EventWriter(run.events)
    writer.append(events)
    writer.close()


@pytest.fixture
def run(home: object) -> RunDir:
    return RunDir.create("run")


def poster_of(run: RunDir, cluster: FakeCluster) -> EventPoster:
    return EventPoster(run, cast("ClusterClient", cluster), "/the/jobset")


def test_events_of_the_log_are_posted_once_for_the_runs_own_object(run: RunDir) -> None:
    cluster = FakeCluster()
    write(run, NodeRequested(at=1.0, node=0, generation=1, reason="before this controller"))
    poster = poster_of(run, cluster)
    evicted = [NodeEvicted(at=5.0, node=node, generation=0, reason="suspended") for node in range(100)]
    write(run, NodeRequested(at=2.0, node=0, generation=0), FAILURE, *evicted, END)
    for _ in range(2):
        asyncio.run(poster.flush())
    assert cluster.lines() == [
        ("Warning", "FailureDetected", "rank 1 exited with code 3 [rank-failed]; action: restart"),
        ("Normal", "Evicted", "ranks save and stop: suspended"),
        ("Warning", "RunFailed", "too many restarts (exit code 3)"),
    ]
    assert {one["involvedObject"]["kind"] for one in cluster.posted.values()} == {"TrainJob"}
    assert cluster.tries == 3


def test_server_that_does_not_answer_is_asked_again_and_one_that_refuses_is_not(run: RunDir) -> None:
    cluster = FakeCluster()
    poster = poster_of(run, cluster)
    write(run, FAILURE)
    cluster.errors = [ApiUnavailable("timed out"), ApiError(409, "already exists"), ApiError(403, "may not create")]
    asyncio.run(poster.flush())
    asyncio.run(poster.flush())
    assert cluster.tries == 2, "the first answer was lost"
    write(run, END)
    for _ in range(2):
        asyncio.run(poster.flush())
    assert (cluster.tries, cluster.lines()) == (3, [])


def test_many_events_are_posted_at_a_bounded_rate(run: RunDir) -> None:
    cluster = FakeCluster()
    poster = poster_of(run, cluster)
    write(run, *(NodeRequested(at=float(node), node=node, generation=1, reason="lost") for node in range(500)))

    async def watch() -> None:
        running = asyncio.ensure_future(poster.run())
        async with asyncio.timeout(60):
            while len(cluster.posted) < MAX_PER_MINUTE:  # noqa: ASYNC110 - the cluster's own list
                await asyncio.sleep(0.01)
            await poster.flush()
        running.cancel()

    asyncio.run(watch())
    assert len(cluster.posted) == 100, "the newest, and no more wait"
    assert cluster.lines()[-1] == ("Normal", "NodeReplaced", "node499 is replaced: lost")
