"""What a webhook does not see yet is waited for; what it refuses for good is not."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from holdfast.launch.kubernetes import starting
from holdfast.launch.kubernetes.refusals import RefusedBy

OWNER = {"apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainJob", "metadata": {"name": "run"}}


class Cluster:
    """One whose webhook looks at a copy that is some requests old."""

    def __init__(self, refusals: int, said: str) -> None:
        self.refusals, self.said = refusals, said

    async def make(self, path: str, one: Mapping[str, Any]) -> Mapping[str, Any]:
        self.refusals -= 1
        if self.refusals >= 0:
            raise RefusedBy(403, self.said)
        return one


def made(cluster: Cluster, *before: str) -> Mapping[str, Any]:
    return asyncio.run(starting._made_after(cluster, OWNER, before))  # pyright: ignore[reportPrivateUsage, reportArgumentType]


def test_object_is_made_once_the_webhook_sees_what_was_made_before() -> None:
    assert made(Cluster(2, 'TrainingRuntime "run" not found'), "/runtime") == OWNER


@pytest.mark.parametrize(("said", "before"), [("it is denied", ("/runtime",)), ('"other" not found', ())])
def test_object_that_is_refused_for_another_reason_is_not_asked_for_again(said: str, before: tuple[str, ...]) -> None:
    cluster = Cluster(1, said)
    with pytest.raises(RefusedBy):
        made(cluster, *before)
    assert cluster.refusals == 0
