"""Lays a plan's best layout, or a job's own, out on nodes by their labels: from a file, or by Slurm's switches."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import msgspec

from holdfast.errors import ExitCode, HoldfastError, failure
from holdfast.findings import Finding, Severity
from holdfast.job.spec import Job
from holdfast.plan.layout import Layout
from holdfast.plan.predict import Plan
from holdfast.plan.rank_layout import RankGrid, RankLayout, Topology, lay_out, ordered_nodes, topology
from holdfast.plan.request import json_object
from holdfast.plan.traffic import between_stages


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
    sent = best.sent_bytes | {"pp": between_stages(grid.layout, best.sent_bytes["pp"])}
    found = lay_out(tree, grid, sent) if grid.is_even else None
    if found is None:
        raise HoldfastError((_no_room(path, tree, grid),), ExitCode.CANNOT_RUN_HERE)
    return found


GRADIENTS_FIRST: Mapping[str, float] = {"dp": 1.0, "tp": 1.0, "pp": 0.0}
"""What ranks are taken to send, whatever the job trains: gradients, and nothing between stages."""


def order_hosts(
    job: Job, hosts: Sequence[str], path: Path, *, avoided: Collection[str] = ()
) -> tuple[tuple[str, ...], tuple[Finding, ...]]:
    """Hosts in the order of a job's ranks, then those that it does not need or must not use; and a warning, if any.

    The job's `parallel` is the layout; an elastic job is laid out on as many hosts as it can get. The nodes of a stage
    become neighbours. Hosts keep their order if the layout has no room. Raises HoldfastError for an unsuitable file.
    """
    tree = read_topology(path)
    if lacking := sorted({*hosts} - {*tree.nodes}):
        raise _refused(path, f"it lacks {', '.join(lacking)} of the target's hosts")
    usable = {*hosts} - {*avoided}
    known = [node for node, name in enumerate(tree.nodes) if name in usable]
    own = Topology(
        levels=tree.levels,
        nodes=tuple(tree.nodes[node] for node in known),
        domains=tuple(tuple(domains[node] for node in known) for domains in tree.domains),
    )
    grid = _grid_of(job, len(known))
    order = ordered_nodes(own, grid, GRADIENTS_FIRST) if grid.is_even else None
    if order is None:
        return tuple(hosts), (_no_room(path, own, grid, Severity.WARNING),)
    first = [own.nodes[node] for node in order]
    return (*first, *(host for host in hosts if host not in first)), ()


def order_by_switches(job: Job, switches: Mapping[str, str]) -> tuple[str, ...]:
    """Nodes of an allocation in the order of a job's ranks, then its spares.

    `switches` has the names of those above each node, from the top, separated by dots. Nodes keep their order if the
    switches are no tree with equal depths, or if the layout has no room.
    """
    paths = {node: path.split(".") for node, path in switches.items()}
    depths = {len(path) for path in paths.values()}
    if len(depths) != 1 or not all(switches.values()):
        return tuple(switches)
    levels = tuple(map(str, range(*depths)))
    tree = topology({node: dict(zip(levels, path, strict=True)) for node, path in paths.items()}, levels)
    grid = _grid_of(job, len(paths))
    order = ordered_nodes(tree, grid, GRADIENTS_FIRST) if grid.is_even else None
    first = [tree.nodes[node] for node in order or ()]
    return (*first, *(node for node in switches if node not in first))


def _grid_of(job: Job, nodes: int) -> RankGrid:
    """A job's layout on the nodes there are: on as many as it can get, if it is elastic."""
    return RankGrid(layout=_layout_of(job, max(1, min(job.nodes.max, nodes))), per_node=job.local_world_size)


def _layout_of(job: Job, nodes: int) -> Layout:
    """Replicas are further data-parallel ranks."""
    given = job.parallel
    tp, cp, pp = (given.tp, given.cp, given.pp) if given else (1, 1, 1)
    return Layout(tp=tp, cp=cp, pp=pp, dp=max(1, nodes * job.local_world_size // (tp * cp * pp)))


def _no_room(path: Path, tree: Topology, grid: RankGrid, severity: Severity = Severity.ERROR) -> Finding:
    what = f"{len(tree.nodes)} nodes have no room for {grid.nodes}"
    what += f" with {grid.group} in one lowest domain for each tensor-parallel group"
    if not grid.is_even:
        what = f"groups of `{grid.layout}` do not divide nodes of {grid.per_node} ranks evenly"
    return Finding(
        code="no-room-in-topology",
        severity=severity,
        what=what if severity is Severity.ERROR else f"{what}; nodes keep the order of `hosts`",
        where=str(path),
        remedy="Add free nodes to the file, take fewer nodes, or set `parallel.tp`.",
    )
