"""A controller's pod that is to be the last asks to be done without until that is taken, or nothing is left to ask."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from holdfast.launch.kubernetes.client.api_errors import ApiError, ApiUnavailable, ClusterError
from holdfast.launch.kubernetes.incluster import controller_identity

AWAY, STARTING, GONE = ApiUnavailable("connect: refused"), ApiError(403, "not yet ready"), ApiError(404, "not found")


@pytest.mark.parametrize(
    ("answers", "taken"), [((AWAY, STARTING, AWAY), True), ((GONE,), False), ((STARTING, GONE), False), ((), True)]
)
def test_last_pod_asks_until_it_is_heard(
    monkeypatch: pytest.MonkeyPatch, answers: tuple[ClusterError, ...], taken: bool
) -> None:
    left, asked = list(answers), list[Mapping[str, Any]]()

    class Cluster:
        async def patch(self, path: str, part: Mapping[str, Any]) -> None:
            assert path.endswith("/replicasets/run-controller/scale")
            if left:
                raise left.pop(0)
            asked.append(part)

    monkeypatch.setattr(controller_identity, "ClusterClient", Cluster)
    monkeypatch.setattr(controller_identity, "RETRY_S", 0.0)
    asyncio.run(controller_identity.scale_to_zero("run"))
    assert asked == ([{"spec": {"replicas": 0}}] if taken else [])
    assert left == []
