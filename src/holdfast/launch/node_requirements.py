"""What a run needs of each of its nodes, as far as checks before a start look at it."""

from __future__ import annotations

from pathlib import Path

from holdfast.fabric.catalog import CATALOG
from holdfast.job.launcher_catalog import runs_python
from holdfast.job.run_spec import RunSpec
from holdfast.launch.rank_env import checkpoint_dir
from holdfast.protocol.node_requirements import NodeRequirements
from holdfast.run_dir import RunDir

NETWORK_PREFIXES = ("NCCL_", "GLOO_", "TP_", "UCX_", "FI_", "OMPI_", "CUDA_", "TORCH_NCCL_")
"""Variables that checks may see; others may be private."""


def node_requirements(accepted: RunSpec, folder: RunDir) -> NodeRequirements:
    """The requirements of an accepted job."""
    job = accepted.job
    env = accepted.fabric_env | job.fabric.env | job.env
    return NodeRequirements(
        gpus=job.gpus_per_node,
        processes=job.local_world_size,
        network=CATALOG[accepted.fabric].network,
        env={name: value for name, value in env.items() if name.startswith(NETWORK_PREFIXES)},
        python=job.command[0] if runs_python(job) else "",
        workdir="" if accepted.code else str(Path(accepted.base, job.workdir)),
        checkpoints=str(checkpoint_dir(accepted, folder)),
        logs=str(folder.logs),
    )
