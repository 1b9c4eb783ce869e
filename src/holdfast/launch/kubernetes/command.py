"""Owns the container of a run without an agent: the command as it is, once on each node, its place in variables."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.job.spec import Launch
from holdfast.launch.kubernetes.manifest import Node
from holdfast.launch.kubernetes.pod import Occupant
from holdfast.launch.kubernetes.submission import Submission

MASTER_PORT = 29500
"""Where ranks meet; torchrun's own default."""


def command(asked: Submission, name: str, *, place: Sequence[Node] = ()) -> Occupant:
    """The job's command in a node's pod; `place` are variables that tell the node's place, where no operator does."""
    job = asked.job
    return Occupant(
        container={
            "name": name,
            "image": job.image,
            "workingDir": job.workdir if job.workdir.startswith("/") else None,
            "command": [_literal(word) for word in job.command],
            "env": [*environment(asked), *place],
        }
    )


def environment(asked: Submission) -> list[Node]:
    """The fabric's variables and the job's own, its secrets by where they are kept."""
    job = asked.job
    env = asked.accepted.fabric_env | job.fabric.env | job.env
    return [
        *({"name": name, "value": _literal(value)} for name, value in env.items()),
        *(_secret(asked, name) for name in job.secrets),
    ]


def place_in_jobset(asked: Submission, *, pet: bool) -> list[Node]:
    """A node's place by its number in an indexed Job: torchrun's variables (`pet`), and a rank's where it is one."""
    job, first = asked.job, asked.names.first_node
    index: Node = {"fieldRef": {"fieldPath": "metadata.labels['batch.kubernetes.io/job-completion-index']"}}
    fixed = {"MASTER_ADDR": first, "MASTER_PORT": str(MASTER_PORT)}
    counted: list[str] = []
    if pet:
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


def _secret(asked: Submission, name: str) -> Node:
    return {"name": name, "valueFrom": {"secretKeyRef": {"name": asked.names.secrets, "key": name}}}


def _literal(word: str) -> str:
    """The word as it was written: Kubernetes would put a variable's value in place of `$(NAME)`."""
    return word.replace("$(", "$$(")
