"""What Monarch's client reads of a run before its controller connects."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.job.run_spec import RunSpec
from holdfast.job.spec import Job
from holdfast.launch.monarch.monarch_client import nodes_at_start
from holdfast.run_dir import RunDir


@pytest.mark.parametrize(("nodes", "expected"), [(None, 1), (3, 3), ("2..4", 4)])
def test_client_starts_a_mesh_for_each_node_before_the_first_order(
    tmp_path: Path, nodes: int | str | None, expected: int
) -> None:
    given = {"command": "true"} if nodes is None else {"command": "true", "nodes": nodes}
    accepted = RunSpec(job=Job.model_validate(given), base=str(tmp_path), created_at=0.0, fabric="tcp")
    run = RunDir(tmp_path)
    run.job.write_text(accepted.model_dump_json(exclude_defaults=True))
    assert nodes_at_start(run) == expected
    run.node_dir(0, 0).mkdir(parents=True)
    assert nodes_at_start(run) == 0
