"""Runs of two nodes with a fast network and a slow one: which of them Gloo uses is seen, judged and measured."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tests.runs.conftest import Runs, WatchedRun

from holdfast import api
from holdfast.agent.link_speed import MIN_FIRST_SAMPLES
from holdfast.errors import ExitCode
from holdfast.events import (
    AgentConnected,
    FindingRaised,
    LinkSlowed,
    Outcome,
    SocketsObserved,
    StepCommitted,
)
from holdfast.launch.local import netns
from holdfast.launch.local.netns import NetnsNetwork, NetnsNode, ip_command, namespace

PROGRAM = Path(__file__).parents[1] / "programs" / "gloo_rounds.py"
FAST, SLOW = "net1", "eth0"
BYTES = 4 << 20
BUCKET = "root tbf rate 20mbit burst 128kb latency 50ms"
"""2.5 MB/s; a link without limit makes more than 100 MB/s on two busy cores."""
SLOW_BYTES_S = 20e6 / 8
LOOKS = 3 * MIN_FIRST_SAMPLES
"""Looks of both nodes at their connections, of which one node's are enough to know the link's usual rate."""

pytestmark = pytest.mark.root


@pytest.fixture(autouse=True)
def able() -> None:
    if not namespace.privileged():
        pytest.skip("needs root: the test attaches a network to the run's nodes")
    if reason := netns.rates_unavailable():
        pytest.skip(reason)


def place(node: NetnsNode) -> str:
    return next(word.removeprefix("--net=") for word in node.prefix if word.startswith("--net="))


def started(runs: Runs, *overrides: str) -> tuple[WatchedRun, list[NetnsNode]]:
    """Start a run whose nodes get a second, fast interface, and a limit on the first."""
    command = (sys.executable, str(PROGRAM), "100000", str(BYTES), FAST)
    watched = runs.start(*command, target="apart", overrides=("checks=off", *overrides))
    for _ in range(2):
        watched.wait_for(AgentConnected)
    nodes = [*NetnsNetwork.open(watched.folder.run_id.rpartition("-")[2]).nodes.values()]
    ip_command.ip(f"link add name {FAST} type veth peer name {FAST} netns {place(nodes[1])}", inside=nodes[0].prefix)
    for number, node in enumerate(nodes, start=1):
        ip_command.tc(f"qdisc replace dev {SLOW} {BUCKET}", inside=node.prefix)
        ip_command.ip(f"address add 10.254.1.{number}/24 dev {FAST}", f"link set {FAST} up", inside=node.prefix)
    return watched, nodes


def test_wrong_interface_ends_the_run_before_its_second_step(isolated_runs: Runs) -> None:
    watched, _ = started(isolated_runs, f"fabric.env.NCCL_SOCKET_IFNAME={FAST}", "fabric.on_fallback=stop")
    end = watched.wait_for_end()
    assert (end.outcome, end.exit_code) == (Outcome.FAILED, ExitCode.CANNOT_RUN_HERE)
    assert f"rank 0 on node0 and rank 1 on node1 exchange data over {SLOW} instead of {FAST}" in end.reason
    assert "GLOO_SOCKET_IFNAME is not set" in end.reason
    assert api.status(watched.folder).fabric == f"tcp over {SLOW} instead of {FAST}"
    assert max(watched.steps(), default=0) < 2


def test_promised_interface_is_confirmed_and_its_later_fall_is_found(isolated_runs: Runs) -> None:
    watched, nodes = started(isolated_runs, f"fabric.env.GLOO_SOCKET_IFNAME={FAST}", "fabric.on_fallback=stop")
    {watched.wait_for(SocketsObserved).node for _ in nodes}
    assert api.status(watched.folder).fabric == f"tcp over {FAST}, as promised"
    metric = f"tcp_sent_bytes@{FAST}"
    per_step = watched.wait_for(StepCommitted, lambda step: metric in step.metrics)
    # A mean of the steps between two looks, which begin and end within steps: of two steps, it may have three.
    assert BYTES / 2 <= per_step.metrics[metric] <= 2.1 * BYTES
    for _ in range(LOOKS):
        watched.wait_for(StepCommitted, lambda step: metric in step.metrics)
    ip_command.tc(f"qdisc replace dev {FAST} {BUCKET}", inside=nodes[1].prefix)
    slowed = watched.wait_for(LinkSlowed, lambda event: event.node == 1)
    assert slowed.now_bytes_s == pytest.approx(SLOW_BYTES_S, rel=0.3)
    assert slowed.now_bytes_s < 0.1 * slowed.before_bytes_s
    sought = f"the link from rank 1 on node1 to rank 0 on node0 over {FAST} has become slow: "
    found = watched.first(FindingRaised, lambda event: event.finding.what.startswith(sought)).finding
    assert found.code == "link-slowed"
