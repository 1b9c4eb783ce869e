"""A run of another machine, adopted from objects that its start rendered."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.launch.kubernetes.golden_cases import Case, render_context

from holdfast import api
from holdfast.errors import ExitCode, HoldfastError
from holdfast.job.targets import TargetSpec
from holdfast.launch.cluster_contact import lost_contact
from holdfast.launch.kubernetes import adopt_run
from holdfast.launch.kubernetes.client.api_errors import ApiError
from holdfast.launch.kubernetes.client.api_paths import object_path
from holdfast.launch.kubernetes.cluster_ref import read_cluster_ref
from holdfast.launch.kubernetes.manifests.run_manifests import render
from holdfast.launch.target_runs import NOTHING_ARRIVED
from holdfast.run_dir import RunDir

RUN = "llama-000000"


class FakeCluster:
    """An API server with the objects of one run."""

    def __init__(self, *, agent: bool = True) -> None:
        context = render_context(Case(target={"agent": agent}))
        self.job = context.accepted.model_copy(update={"agent": agent, "created_at": 1700000000.0})
        self.objects: dict[str, Any] = {object_path(each): each for each in render(context).objects}
        text = self.job.model_dump_json(exclude_defaults=True)
        self.objects[f"/api/v1/namespaces/{{namespace}}/configmaps/{RUN}"]["data"] = {"job.json": text}
        keys = {"token": b"of-the-run", "ca.pem": b"of-its-ca"}
        for path in self.objects:
            if path.endswith(f"secrets/{RUN}-controller"):
                self.objects[path] |= {"data": {name: base64.b64encode(value).decode() for name, value in keys.items()}}
        self.forbidden = ""

    def __call__(self, **_: object) -> FakeCluster:
        return self

    async def get(self, path: str, **_: str) -> Mapping[str, Any]:
        kind = path.rsplit("/", 2)[1]
        if kind == self.forbidden:
            raise ApiError(403, f'x is forbidden: User "ann" cannot get resource "{kind}" in API group "" in ml')
        if path not in self.objects:
            raise ApiError(404, f'{kind} "x" not found')
        return self.objects[path]


def adopt(cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.setattr(adopt_run, "ClusterClient", cluster)
    return adopt_run.adopt_run(TargetSpec(kind="kubernetes", namespace="ml", context="prod"), RUN)


def test_adopted_run_has_the_files_that_its_commands_read(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = FakeCluster()
    run = adopt(cluster, monkeypatch)
    assert api.runs() == [run]
    assert api.accepted(run) == cluster.job
    assert run.token.read_text() == "of-the-run"
    assert run.ca.read_text() == "of-its-ca"
    assert run.job.stat().st_mtime == cluster.job.created_at, "it is not this user's latest run"
    where = read_cluster_ref(run)
    assert (where.adopted, where.context, where.namespace) == (True, "prod", "ml")
    assert where.owner in cluster.objects
    assert where.controller is not None
    assert cluster.objects[object_path(where.controller)]["spec"]["template"] == where.controller["spec"]["template"]
    assert (silent := lost_contact(run)) is not None
    assert silent.reason == NOTHING_ARRIVED
    assert {path.stat().st_mode & 0o77 for path in run.path.iterdir()} == {0}


def test_run_without_agents_is_adopted_without_a_secret(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = FakeCluster(agent=False)
    cluster.forbidden = "secrets"
    run = adopt(cluster, monkeypatch)
    assert not api.accepted(run).agent
    assert read_cluster_ref(run).controller is None


def test_run_from_a_tree_was_created_when_its_config_map_was_and_needs_the_keys_of_its_first_pod(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = FakeCluster()
    stored = cluster.objects[f"/api/v1/namespaces/{{namespace}}/configmaps/{RUN}"]
    text = cluster.job.model_copy(update={"from_tree": True, "created_at": 0.0}).model_dump_json(exclude_defaults=True)
    stored |= {"data": {"job.json": text}, "metadata": {"creationTimestamp": "2026-11-27T11:00:00Z"}}
    secret = cluster.objects[f"/api/v1/namespaces/{{namespace}}/secrets/{RUN}-controller"]
    keys = secret.pop("data")
    with pytest.raises(HoldfastError) as refused:
        adopt(cluster, monkeypatch)
    assert refused.value.findings[0].code == "run-has-no-keys"
    secret["data"] = keys
    run = adopt(cluster, monkeypatch)
    assert api.accepted(run).created_at == run.job.stat().st_mtime == 1795777200.0


@pytest.mark.parametrize("kind", ["configmaps", "secrets"])
def test_user_who_may_not_read_what_is_needed_is_told_and_gets_no_folder(
    home: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    cluster = FakeCluster()
    cluster.forbidden = kind
    with pytest.raises(HoldfastError) as refused:
        adopt(cluster, monkeypatch)
    assert (refused.value.findings[0].code, refused.value.exit_code) == ("not-permitted", ExitCode.NOT_PERMITTED)
    assert refused.value.findings[0].what == f"ann may not get {kind} in ml"
    assert api.runs() == []


@pytest.mark.parametrize(
    "data",
    [{}, {"job.json": "{"}, {"job.json": "null"}, {"job.json": "[1]"}, {"job.json": '{"from": "the future"}'}, None],
)
def test_run_whose_job_cannot_be_read_is_refused(home: Path, monkeypatch: pytest.MonkeyPatch, data: object) -> None:
    cluster = FakeCluster()
    path = f"/api/v1/namespaces/{{namespace}}/configmaps/{RUN}"
    if data is None:
        del cluster.objects[path]
    else:
        cluster.objects[path] = {"data": data}
    with pytest.raises(HoldfastError) as refused:
        adopt(cluster, monkeypatch)
    assert refused.value.findings[0].code == "run-not-adoptable"
    assert api.runs() == []
