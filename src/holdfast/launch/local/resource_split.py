"""Divides this machine among the nodes of a job: cores evenly, GPUs exclusively."""

from __future__ import annotations

import itertools
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from holdfast.job.spec import Job
from holdfast.launch.rank_env import NodeResources


def node_resources(job: Job, environ: Mapping[str, str]) -> tuple[NodeResources, ...]:
    """Every node's share of this machine."""
    return split_machine(job, cpus=len(os.sched_getaffinity(0)), devices=visible_devices(environ))


def split_machine(job: Job, *, cpus: int, devices: tuple[str, ...]) -> tuple[NodeResources, ...]:
    """Every node's share of a machine; hides GPUs that the job did not request, or all nodes would use the first."""
    nodes, each = job.node_slots, job.gpus_per_node
    return tuple(
        NodeResources(
            cpus=cpus / job.nodes.max,
            devices=devices[node * each : (node + 1) * each] if devices else None,
            shares_machine=nodes > 1,
            python=sys.executable,
        )
        for node in range(nodes)
    )


def visible_devices(environ: Mapping[str, str], devices: Path = Path("/dev")) -> tuple[str, ...]:
    """The NVIDIA GPUs visible to a process here, named as in CUDA_VISIBLE_DEVICES."""
    count = sum(1 for path in devices.glob("nvidia*") if re.fullmatch(r"nvidia[0-9]+", path.name))
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return tuple(str(number) for number in range(count))
    names = itertools.takewhile(_names_a_device, (name.strip() for name in visible.split(",")))
    return tuple(names)[:count]


def _names_a_device(name: str) -> bool:
    """CUDA stops at the first invalid name; users often write -1 for no GPU."""
    return name != "" and not name.startswith("-")
