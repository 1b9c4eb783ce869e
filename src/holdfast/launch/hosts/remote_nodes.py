"""What ranks of a node find on a machine that is not the controller's."""

from __future__ import annotations

from pathlib import Path

from holdfast.job.spec import Job
from holdfast.launch.rank_env import NodeResources
from holdfast.run_dir import RunDir


def remote_resources(job: Job, python: str) -> tuple[NodeResources, ...]:
    """Resources of nodes that each have a machine, on which `python` has holdfast."""
    return (NodeResources(cpus=job.resources.cpu or job.local_world_size, python=python),) * job.node_slots


def run_dir_on_nodes(folder: str, run: str) -> RunDir:
    """A run's folder as nodes see it, which have holdfast's files in `folder`."""
    return RunDir(Path(folder) / "runs" / run)
