"""Divides a job into replicas: whole nodes each, or an equal part of one node.

A replica that is part of a node has its own agent and its share of the GPUs. The rest of the code treats it as a
(virtual) node, so an agent that dies takes only one replica with it.
"""

from __future__ import annotations

from holdfast.job.spec import Job, Nodes, Resources


def replicas_per_node(job: Job) -> int:
    """Number of replicas per node; 1 if a replica has whole nodes."""
    return max(1, job.recovery.replicas // job.nodes.max)


def as_virtual_nodes(job: Job) -> Job:
    """The job with each part of a node as a node; the same job if replicas have whole nodes."""
    each = replicas_per_node(job)
    if each == 1:
        return job
    whole, resources = job.nodes, job.resources
    return job.model_copy(
        update={
            "nodes": Nodes(min=whole.min * each, max=whole.max * each, min_nodes_wait_s=whole.min_nodes_wait_s),
            "gpus_per_node": job.gpus_per_node // each,
            "ranks_per_node": job.local_world_size // each,
            "recovery": job.recovery.model_copy(update={"standby": job.standbys * each}),
            "resources": Resources(
                cpu=resources.cpu and resources.cpu / each,
                memory=resources.memory and resources.memory // each,
                shm=resources.shm and resources.shm // each,
            ),
        }
    )
