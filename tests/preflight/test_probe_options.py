"""What the agent tells a probe of the node: its deadline, and what counts as slow."""

from __future__ import annotations

import msgspec
from tests.agent.test_node_probe import order
from tests.preflight.conftest import MakeNode
from tests.preflight.rdma_nodes import h100_files, rdma_node

from holdfast.agent.node_probe import options


def test_pairs_of_enough_nodes_are_compared_with_the_line_rate(node: MakeNode) -> None:
    view = rdma_node(node, h100_files(), gpus=8)
    given = msgspec.structs.replace(order("python", ranks=8), wanted=view.wanted, nodes=(0, 1, 2, 3))
    assert options(given, view) == (
        "--deadline-s=5",
        "--backend=nccl",
        "--least-gb-s=10",
    )  # 8 ports of 400 Gbit/s, 8 ranks, 20 %
    assert options(msgspec.structs.replace(given, nodes=(0, 1)), view) == ("--deadline-s=5", "--backend=nccl")


def test_cpus_are_compared_with_each_other_only(node: MakeNode) -> None:
    assert options(order("python"), node({})) == ("--deadline-s=5", "--backend=gloo", "--share-of-median=0.2")


def test_one_rank_is_not_held_to_the_rate_of_all_ports(node: MakeNode) -> None:
    view = rdma_node(node, h100_files(), gpus=1)
    given = msgspec.structs.replace(order("python", ranks=1), wanted=view.wanted, nodes=(0, 1, 2, 3))
    assert options(given, view)[2:] == ("--least-gb-s=10",)
