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

OWNER = {"metadata": {"uid": "of-this-run"}}


class Secrets:
    """An API server with one Secret, which its garbage collector removes once it was read `reads` times."""

    def __init__(self, secret: dict[str, Any] | None, *, reads: int) -> None:
        self.secret = secret
        self._reads = reads

    async def create(self, _path: str, secret: dict[str, Any]) -> dict[str, Any]:
        if self.secret is not None:
            raise ApiError(409, "secrets already exists")
        self.secret = secret
        return secret

    async def get(self, _path: str) -> dict[str, Any]:
        if self.secret is None:
            raise ApiError(404, "not found")
        found, self._reads = self.secret, self._reads - 1
        if self._reads == 0:
            self.secret = None
        return found


def provide(secrets: Secrets, folder: Path) -> None:
    keys = RunDir(folder, secrets_dir=folder)
    keys.token.write_text(new_token())
    make_identity(keys.ca, keys.identity)
    cluster = cast("ClusterClient", secrets)
    names = ObjectNames("llama-v1")
    asyncio.run(prepare_controller._provide_tokens(cluster, names, 2, keys, OWNER))  # pyright: ignore[reportPrivateUsage]


def owned_by(uid: str) -> dict[str, Any]:
    return {"metadata": {"ownerReferences": [{"uid": uid}]}, "data": {}}


def test_tokens_of_an_earlier_run_are_replaced_once_they_are_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare_controller, "RETRY_S", 0.0)
    secrets = Secrets(owned_by("of-an-earlier-run"), reads=2)
    provide(secrets, tmp_path)
    assert secrets.secret is not None
    assert secrets.secret["data"].keys() == {"ca.pem", "node0", "node1"}


def test_tokens_of_an_earlier_pod_of_the_run_stay(tmp_path: Path) -> None:
    earlier = owned_by("of-this-run")
    secrets = Secrets(earlier, reads=9)
    provide(secrets, tmp_path)
    assert secrets.secret is earlier


def test_tokens_of_an_earlier_run_that_stay_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare_controller, "APPLY_S", 0.0)
    with pytest.raises(SystemExit, match="secret/llama-v1-keys is of an earlier run with this id: delete it"):
        provide(Secrets(owned_by("of-an-earlier-run"), reads=99), tmp_path)
