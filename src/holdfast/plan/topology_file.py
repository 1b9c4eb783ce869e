"""Reads the labels of nodes from a file, and lays a plan's best layout out on them."""

from __future__ import annotations

from pathlib import Path

import msgspec

from holdfast.errors import ExitCode, HoldfastError, failure
from holdfast.plan.predict import Plan
from holdfast.plan.rank_layout import RankGrid, RankLayout, Topology, lay_out, topology
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
        raise _no_room(path, f"groups of `{best.layout}` do not divide nodes of {grid.per_node} GPUs evenly")
    found = lay_out(tree, grid, best.sent_bytes)
    if found is None:
        free = f"{len(tree.nodes)} nodes have no room for {plan.nodes}"
        raise _no_room(path, f"{free} with {grid.group} in one lowest domain for each tensor-parallel group")
    return found


def _no_room(path: Path, why: str) -> HoldfastError:
    return failure(
        "no-room-in-topology",
        why,
        exit_code=ExitCode.CANNOT_RUN_HERE,
        where=str(path),
        remedy="Add free nodes to the file, take fewer nodes, or set `parallel.tp`.",
    )
