"""The tokens of a tree's nodes are of this run's keys, whatever an earlier run with its id has left."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest

from holdfast.launch.kubernetes.client.api_errors import ApiError
from holdfast.launch.kubernetes.client.cluster import ClusterClient
from holdfast.launch.kubernetes.incluster import prepare_controller
from holdfast.launch.kubernetes.object_names import ObjectNames
from holdfast.run_dir import RunDir
from holdfast.security.tls import make_identity
from holdfast.security.tokens import new_token

EMPTY: dict[str, Any] = {"metadata": {"uid": "of-this-run"}}
FILLED = EMPTY | {"data": {"token": "of-an-earlier-pod"}}
EARLIER: dict[str, Any] = {"data": {}}


class Secrets:
    """An API server with one Secret, which its garbage collector removes after so many attempts to create it."""

    def __init__(self, secret: dict[str, Any], *, attempts: int) -> None:
        self.secret: dict[str, Any] | None = secret
        self._attempts = attempts

    async def create(self, _path: str, secret: dict[str, Any]) -> dict[str, Any]:
        if self.secret is None:
            self.secret = secret
            return secret
        self._attempts -= 1
        if self._attempts == 0:
            self.secret = None
        raise ApiError(409, "secrets already exists")


def provide(secrets: Secrets, folder: Path, controller: dict[str, Any]) -> None:
    keys = RunDir(folder, secrets_dir=folder)
    keys.token.write_text(new_token())
    make_identity(keys.ca, keys.identity)
    cluster = cast("ClusterClient", secrets)
    names = ObjectNames("llama-v1")
    asyncio.run(prepare_controller._provide_tokens(cluster, names, 2, keys, controller))  # pyright: ignore[reportPrivateUsage]


def test_tokens_of_an_earlier_run_are_replaced_once_they_are_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare_controller, "RETRY_S", 0.0)
    secrets = Secrets(EARLIER, attempts=2)
    provide(secrets, tmp_path, EMPTY)
    assert secrets.secret is not None
    assert secrets.secret["data"].keys() == {"ca.pem", "metrics-token", "node0", "node1"}


def test_tokens_of_an_earlier_pod_of_the_run_stay(tmp_path: Path) -> None:
    secrets = Secrets(EARLIER, attempts=9)
    provide(secrets, tmp_path, FILLED)
    assert secrets.secret is EARLIER


def test_tokens_of_an_earlier_run_that_stay_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare_controller, "APPLY_S", 0.0)
    with pytest.raises(SystemExit, match="secret/llama-v1-keys is of an earlier run with this id: delete it"):
        provide(Secrets(EARLIER, attempts=99), tmp_path, EMPTY)


def test_job_that_was_damaged_is_said_and_not_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Damaged:
        async def get(self, _path: str) -> dict[str, Any]:
            return {"data": {"job.json": "[1]"}}

    monkeypatch.setattr(prepare_controller, "ClusterClient", Damaged)
    words = ["prepare", "llama-v1", str(tmp_path), "--secrets", str(tmp_path), "--code", str(tmp_path)]
    monkeypatch.setattr("sys.argv", words)
    with pytest.raises(
        SystemExit, match=r"the controller of llama-v1 cannot start yet: job\.json holds no JSON object"
    ):
        prepare_controller.main()
