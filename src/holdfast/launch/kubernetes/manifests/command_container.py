"""Renders the container of a run without agents: the job's command, once per node, with its rank in variables."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.job.spec import Launch
from holdfast.launch.kubernetes.manifests.pod_template import ContainerSpec
from holdfast.launch.kubernetes.manifests.render_context import RenderContext
from holdfast.launch.kubernetes.manifests.yaml_writer import YamlValue

MASTER_PORT = 29500
"""Rendezvous port of the ranks; torchrun's default."""


def command_container(ctx: RenderContext, name: str, *, rank_env: Sequence[YamlValue] = ()) -> ContainerSpec:
    """The job's command in a node's pod; `rank_env` has the node's rank, if no operator sets it."""
    job = ctx.job
    return ContainerSpec(
        container={
            "name": name,
            "image": job.image,
            "workingDir": job.workdir if job.workdir.startswith("/") else None,
            "command": [_literal(word) for word in job.command],
            "env": [*command_env(ctx), *rank_env],
        }
    )


def command_env(ctx: RenderContext) -> list[YamlValue]:
    """The variables of the fabric and the job, with references to its secrets."""
    job = ctx.job
    env = ctx.accepted.fabric_env | job.fabric.env | job.env
    return [
        *({"name": name, "value": _literal(value)} for name, value in env.items()),
        *(_secret_env(ctx, name) for name in job.secrets),
    ]


def jobset_rank_env(ctx: RenderContext, *, torchrun: bool) -> list[YamlValue]:
    """A node's rank from its index in an indexed Job: torchrun's PET_* variables, or those of a single rank."""
    job, first = ctx.job, ctx.names.first_node
    index: YamlValue = {"fieldRef": {"fieldPath": "metadata.labels['batch.kubernetes.io/job-completion-index']"}}
    fixed = {"MASTER_ADDR": first, "MASTER_PORT": str(MASTER_PORT)}
    counted: list[str] = []
    if torchrun:
        fixed |= {
            "PET_MASTER_ADDR": first,
            "PET_MASTER_PORT": str(MASTER_PORT),
            "PET_NNODES": str(job.nodes.max),
            "PET_NPROC_PER_NODE": str(job.local_world_size),
        }
        counted.append("PET_NODE_RANK")
    if job.launch is Launch.PER_RANK:
        fixed |= {"WORLD_SIZE": str(job.world_size), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        counted.append("RANK")
    return [
        *({"name": name, "value": value} for name, value in fixed.items()),
        *({"name": name, "valueFrom": index} for name in counted),
    ]


def _secret_env(ctx: RenderContext, name: str) -> YamlValue:
    return {"name": name, "valueFrom": {"secretKeyRef": {"name": ctx.names.secrets, "key": name}}}


def _literal(word: str) -> str:
    """Escape a word, because Kubernetes expands `$(NAME)`."""
    return word.replace("$(", "$$(")
