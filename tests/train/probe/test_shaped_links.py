"""Four ranks in network namespaces, of which one node has a slow link: a real one, shaped by the kernel."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.train.probe.probe_ranks import NODES, run_ranks

from holdfast.events.probe_results import ProbeStage
from holdfast.launch.local import netns
from holdfast.launch.local.netns import NetnsNetwork, NetnsNode, ip_command, namespace

SLOW = "qdisc replace dev eth0 root tbf rate 5mbit burst 32kb latency 200ms"
"""0.6 MB/s of what the node sends; a link without limit makes more than 100 MB/s on two busy cores."""

pytestmark = pytest.mark.slow


@pytest.fixture
def nodes() -> Iterator[list[NetnsNode]]:
    if not namespace.privileged():
        pytest.skip("needs root: the forked ranks enter namespaces of the machine")
    if reason := netns.rates_unavailable():
        pytest.skip(reason)
    tag = f"p{os.getpid()}"
    network = NetnsNetwork.create(tag)
    try:
        yield [network.add_node(f"node{each}") for each in range(NODES)]
    finally:
        netns.remove(tag)


@pytest.mark.root
def test_node_with_a_slow_link_is_located(tmp_path: Path, nodes: list[NetnsNode]) -> None:
    slow = 3
    ip_command.tc(SLOW, inside=nodes[slow].prefix)
    networks = [next(word.removeprefix("--net=") for word in node.prefix if "--net=" in word) for node in nodes]
    result = run_ranks(tmp_path, {}, "--share-of-median=0.1", master=nodes[0].address, networks=networks)[0][1]
    assert [(each.stage, each.nodes) for each in result.suspects] == [(ProbeStage.PAIRS, (slow,))], result
    assert result.all_reduce
