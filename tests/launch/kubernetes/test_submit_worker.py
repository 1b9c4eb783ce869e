"""What a webhook does not see yet is waited for, what it refuses for good is not; what goes wrong leaves nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest

from holdfast.job.quarantine import Quarantine, QuarantineRow
from holdfast.launch.kubernetes.client.api_errors import ApiError, ApiUnavailable, ClusterError
from holdfast.launch.kubernetes.quarantine_object import KEY, MANIFEST
from holdfast.launch.kubernetes.submit import submit_worker
from holdfast.launch.kubernetes.submit.submit_request import ClusterAddress, SubmitRequest

OWNER = {"apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainJob", "metadata": {"name": "run"}}


class FakeCluster:
    """One whose webhook looks at a copy that is some requests old."""

    def __init__(self, refusals: int, said: str) -> None:
        self.refusals, self.rejection = refusals, said

    async def create(self, path: str, one: Mapping[str, Any]) -> Mapping[str, Any]:
        self.refusals -= 1
        if self.refusals >= 0:
            raise ApiError(403, self.rejection)
        return one


def made(cluster: FakeCluster, *before: str) -> Mapping[str, Any]:
    return asyncio.run(submit_worker._create_owner(cluster, OWNER, before))  # pyright: ignore[reportPrivateUsage, reportArgumentType]


def test_object_is_made_once_the_webhook_sees_what_was_made_before() -> None:
    assert made(FakeCluster(2, 'TrainingRuntime "run" not found'), "/runtime") == OWNER


@pytest.mark.parametrize(("said", "before"), [("it is denied", ("/runtime",)), ('"other" not found', ())])
def test_object_that_is_refused_for_another_reason_is_not_asked_for_again(said: str, before: tuple[str, ...]) -> None:
    cluster = FakeCluster(1, said)
    with pytest.raises(ApiError):
        made(cluster, *before)
    assert cluster.refusals == 0


SERVICE = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "run"}}
RUNTIME = {"apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainingRuntime", "metadata": {"name": "run"}}
THERE = ClusterAddress(context=None, namespace="ml")
REQUEST = SubmitRequest(run_dir="/run", prerequisites=(RUNTIME,), owner=OWNER, owned=(SERVICE,))


class Failing:
    """Creates requested objects, and then does not answer, or refuses; it may be away for a while then."""

    def __init__(self, kind: str, error: ClusterError, *, away: int, keeps: ClusterError | None = None) -> None:
        self.kind, self.error, self.away, self.keeps = kind, error, away, keeps
        self.there: list[str] = []

    async def get(self, path: str) -> Mapping[str, Any]:
        raise ApiError(404, f"{path} not found")

    async def create(self, path: str, one: Mapping[str, Any], dryRun: str = "") -> Mapping[str, Any]:
        if not dryRun:
            fails = one["kind"] == self.kind
            if not fails or isinstance(self.error, ApiUnavailable):
                self.there.append(f"{path}/{one['metadata']['name']}")
            if fails:
                raise self.error
        return {**one, "metadata": {**one["metadata"], "uid": "1"}}

    async def patch(self, path: str, part: Mapping[str, Any]) -> None:
        assert path in self.there

    async def delete(self, path: str) -> None:
        self.away -= 1
        if self.away >= 0:
            raise ApiUnavailable("connect: refused")
        if self.keeps:
            raise self.keeps
        self.there.remove(path)
        if path.endswith("/trainjobs/run"):  # with what it owns
            self.there[:] = [each for each in self.there if "/services/" not in each]


@pytest.mark.parametrize("kind", ["TrainJob", "Service"])
@pytest.mark.parametrize("error", [ApiUnavailable("timed out"), ApiError(403, "it is denied")])
@pytest.mark.parametrize("away", [0, 3])
def test_start_that_fails_leaves_nothing_though_the_api_server_is_away_for_a_while(
    kind: str, error: ClusterError, away: int
) -> None:
    cluster = Failing(kind, error, away=away)
    with pytest.raises(type(error)):
        asyncio.run(submit_worker.create_objects(cluster, THERE, REQUEST))  # pyright: ignore[reportArgumentType]
    assert cluster.there == []


def test_what_cannot_be_removed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submit_worker, "ROLL_BACK_S", 0.0)
    cluster = Failing("Service", ApiUnavailable("timed out"), away=100)
    with pytest.raises(ApiUnavailable, match="timed out; not removed: trainjobs/run, trainingruntimes/run"):
        asyncio.run(submit_worker.create_objects(cluster, THERE, REQUEST))  # pyright: ignore[reportArgumentType]


def test_what_may_not_be_removed_is_named() -> None:
    cluster = Failing("Service", ApiError(403, "it is denied"), away=0, keeps=ApiError(403, "ann may not"))
    with pytest.raises(ApiError, match="it is denied; not removed: trainjobs/run, trainingruntimes/run"):
        asyncio.run(submit_worker.create_objects(cluster, THERE, REQUEST))  # pyright: ignore[reportArgumentType]


class Accepting(Failing):
    """An API server that has a quarantine and creates everything."""

    def __init__(self, known: Quarantine) -> None:
        super().__init__("", ApiError(403, ""), away=0)
        self.known, self.created = known, dict[str, Mapping[str, Any]]()

    async def get(self, path: str) -> Mapping[str, Any]:
        return {"data": {KEY: msgspec.json.encode(self.known).decode()}}

    async def create(self, path: str, one: Mapping[str, Any], dryRun: str = "") -> Mapping[str, Any]:
        if not dryRun:
            self.created[one["kind"]] = one
        return await super().create(path, one, dryRun)


def test_quarantined_machines_are_excluded_and_the_quarantine_is_not_created_again() -> None:
    template: dict[str, Any] = {"metadata": {"labels": {"holdfast/part": "node"}}, "spec": {"containers": [{}]}}
    now = time.time()
    rows = [
        QuarantineRow(machine=machine, since=now - 60, until=now + left_s, code="gpu-failed")
        for machine, left_s in (("m7", 60), ("m8", -1))
    ]
    request = msgspec.structs.replace(
        REQUEST, prerequisites=({**RUNTIME, "spec": {"template": template}}, dict(MANIFEST))
    )
    cluster = Accepting(Quarantine(rows=tuple(rows)))
    asyncio.run(submit_worker.create_objects(cluster, THERE, request))  # pyright: ignore[reportArgumentType]
    assert set(cluster.created) == {"TrainingRuntime", "TrainJob", "Service"}
    assert "m7" in str(cluster.created["TrainingRuntime"])
    assert "m8" not in str(cluster.created)
