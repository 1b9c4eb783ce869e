"""A controller's pod that is to be the last asks to be done without until that is taken, or nothing is left to ask."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from holdfast.launch.kubernetes import succession
from holdfast.launch.kubernetes.refusals import ClusterError, RefusedBy, Unanswered

AWAY, STARTING, GONE = Unanswered("connect: refused"), RefusedBy(403, "not yet ready"), RefusedBy(404, "not found")


@pytest.mark.parametrize(
    ("answers", "taken"), [((AWAY, STARTING, AWAY), True), ((GONE,), False), ((STARTING, GONE), False), ((), True)]
)
def test_last_pod_asks_until_it_is_heard(
    monkeypatch: pytest.MonkeyPatch, answers: tuple[ClusterError, ...], taken: bool
) -> None:
    left, asked = list(answers), list[Mapping[str, Any]]()

    class Cluster:
        async def change(self, path: str, part: Mapping[str, Any]) -> None:
            assert path.endswith("/replicasets/run-controller/scale")
            if left:
                raise left.pop(0)
            asked.append(part)

    monkeypatch.setattr(succession, "Cluster", Cluster)
    monkeypatch.setattr(succession, "ASK_AGAIN_S", 0.0)
    asyncio.run(succession.retire("run"))
    assert asked == ([{"spec": {"replicas": 0}}] if taken else [])
    assert left == []
