"""Without a role to cordon machines, the run avoids a machine alone, and names the command for others."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import pytest

from holdfast.job.backend import NodeId
from holdfast.job.run_spec import RunSpec
from holdfast.job.spec import Job
from holdfast.launch.kubernetes.client.api_errors import ApiError, ApiUnavailable, ClusterError
from holdfast.launch.kubernetes.client.cluster import ClusterClient
from holdfast.launch.kubernetes.incluster.kubernetes_backend import KubernetesBackend
from holdfast.run_dir import RunDir

FAILED = NodeId(node=1, generation=0)
FORBIDDEN = ApiError(
    403, 'nodes "m7" is forbidden: User "system:serviceaccount:train:run" cannot patch resource "nodes"'
)


class Refusing:
    """An API server that answers every patch with an error."""

    def __init__(self, error: ClusterError) -> None:
        self.error = error
        self.patched: list[str] = []

    async def patch(self, path: str, patch: Mapping[str, Any]) -> None:
        self.patched.append(path)
        raise self.error


def backend(folder: Path, cluster: Refusing) -> KubernetesBackend:
    accepted = RunSpec(job=Job(command=("true",)), base="/", created_at=1.0, fabric="tcp")
    return KubernetesBackend(folder=RunDir(folder), accepted=accepted, cluster=cast("ClusterClient", cluster))


def test_machine_that_may_not_be_cordoned_is_named_with_the_command(tmp_path: Path) -> None:
    finding = asyncio.run(backend(tmp_path, Refusing(FORBIDDEN)).avoid_machine(FAILED, "m7", cordon=True))
    assert finding is not None
    assert (finding.code, finding.where) == ("machine-not-cordoned", "m7")
    assert "kubectl cordon m7" in finding.remedy
    assert finding.evidence == (str(FORBIDDEN),)


def test_api_server_that_does_not_answer_is_asked_again_by_the_controller(tmp_path: Path) -> None:
    with pytest.raises(ApiUnavailable):
        asyncio.run(backend(tmp_path, Refusing(ApiUnavailable("down"))).avoid_machine(FAILED, "m7", cordon=True))


def test_next_controller_cordons_nothing_that_may_be_repaired_by_now(tmp_path: Path) -> None:
    cluster = Refusing(FORBIDDEN)
    assert asyncio.run(backend(tmp_path, cluster).avoid_machine(FAILED, "m7", cordon=False)) is None
    assert cluster.patched == []
