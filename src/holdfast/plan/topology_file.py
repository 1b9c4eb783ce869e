"""Reads the labels of nodes from a file, and lays a plan's best layout out on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from holdfast.errors import ExitCode, HoldfastError, failure
from holdfast.job.spec import Job
from holdfast.plan.layout import Layout
from holdfast.plan.predict import Plan
from holdfast.plan.rank_layout import RankGrid, RankLayout, Topology, lay_out, ordered_nodes, topology
from holdfast.plan.request import json_object


class TopologyFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file: the levels, highest first, and the labels of each node."""

    levels: tuple[str, ...]
    nodes: dict[str, dict[str, str]]


def read_topology(path: Path) -> Topology:
    """The tree that a file describes; raises HoldfastError if a label is missing, or the file is no such file."""
    try:
        found = msgspec.convert(json_object(path, "bad-topology", "a topology"), TopologyFile)
    except msgspec.ValidationError as error:
        raise _refused(path, str(error)) from None
    if not found.levels or not found.nodes:
        raise _refused(path, "it has no levels or no nodes")
    lacking = next((name for name, labels in found.nodes.items() if not labels.keys() >= {*found.levels}), None)
    if lacking is not None:
        raise _refused(path, f"node `{lacking}` lacks one of the labels {', '.join(found.levels)}")
    return topology(found.nodes, found.levels)


def _refused(path: Path, why: str) -> HoldfastError:
    remedy = 'Write `{"levels": ["block", "rack"], "nodes": {"node1": {"block": "b1", "rack": "r1"}}}`.'
    return failure("bad-topology", f"{path}: {why}", exit_code=ExitCode.INVALID_JOB, where=str(path), remedy=remedy)


def lay_out_plan(plan: Plan, path: Path) -> RankLayout:
    """The best layout of a plan on the nodes of a file; raises HoldfastError if they have no room for it."""
    best, tree = plan.best[0], read_topology(path)
    grid = RankGrid(layout=best.candidate.layout, per_node=plan.gpus // plan.nodes)
    if not grid.is_even:
        raise _uneven(path, grid)
    found = lay_out(tree, grid, best.sent_bytes)
    if found is None:
        raise _too_few(path, tree, grid)
    return found


GRADIENTS_FIRST: Mapping[str, float] = {"dp": 1.0, "tp": 1.0, "pp": 0.0}
"""What ranks send, as far as the order of nodes depends on it, if the job does not say what it trains."""


def order_hosts(job: Job, hosts: Sequence[str], path: Path) -> tuple[str, ...]:
    """Hosts in the order of a job's ranks, then those that it does not need; raises HoldfastError as `lay_out_plan`.

    The job's `parallel` is the layout. Of pipelines, the nodes of a stage become neighbours.
    """
    tree = read_topology(path)
    if lacking := sorted({*hosts} - {*tree.nodes}):
        raise _refused(path, f"it lacks {', '.join(lacking)} of the target's hosts")
    known = [node for node, name in enumerate(tree.nodes) if name in hosts]
    own = Topology(
        levels=tree.levels,
        nodes=tuple(tree.nodes[node] for node in known),
        domains=tuple(tuple(domains[node] for node in known) for domains in tree.domains),
    )
    grid = RankGrid(layout=_layout_of(job), per_node=job.local_world_size)
    if not grid.is_even:
        raise _uneven(path, grid)
    order = ordered_nodes(own, grid, GRADIENTS_FIRST)
    if order is None:
        raise _too_few(path, own, grid)
    first = [own.nodes[node] for node in order]
    return (*first, *(host for host in hosts if host not in first))


def _layout_of(job: Job) -> Layout:
    """Replicas are further data-parallel ranks."""
    given = job.parallel
    tp, cp, pp = (given.tp, given.cp, given.pp) if given else (1, 1, 1)
    return Layout(tp=tp, cp=cp, pp=pp, dp=max(1, job.world_size // (tp * cp * pp)))


def _uneven(path: Path, grid: RankGrid) -> HoldfastError:
    return _no_room(path, f"groups of `{grid.layout}` do not divide nodes of {grid.per_node} ranks evenly")


def _too_few(path: Path, tree: Topology, grid: RankGrid) -> HoldfastError:
    free = f"{len(tree.nodes)} nodes have no room for {grid.nodes}"
    return _no_room(path, f"{free} with {grid.group} in one lowest domain for each tensor-parallel group")


def _no_room(path: Path, why: str) -> HoldfastError:
    return failure(
        "no-room-in-topology",
        why,
        exit_code=ExitCode.CANNOT_RUN_HERE,
        where=str(path),
        remedy="Add free nodes to the file, take fewer nodes, or set `parallel.tp`.",
    )
