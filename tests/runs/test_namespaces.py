"""Local nodes with a network each: names resolve, a node's loss is recovered, and no namespace is left."""

from __future__ import annotations

from pathlib import Path

from tests.runs.conftest import Runs

from holdfast.events import AgentConnected, ControllerStarted, FaultAction, FaultTarget, Outcome, RecoveryDecided
from holdfast.launch.local import netns


def test_nodes_have_addresses_and_names_of_their_own(isolated_runs: Runs, tmp_path: Path) -> None:
    program = tmp_path / "names.py"
    program.write_text(
        "import os, socket\n"
        "print(socket.gethostname(), socket.gethostbyname(socket.gethostname()), socket.gethostbyname('node0'))\n"
    )
    watched = isolated_runs.start("python3", str(program), target="apart")
    assert watched.wait_for_end().outcome is Outcome.SUCCEEDED
    addresses = {event.node: event.address for event in watched.all(AgentConnected)}
    assert addresses[0] != addresses[1]
    for node in (0, 1):
        assert watched.log(node).split() == [f"node{node}", addresses[node], addresses[0]]
    assert netns.leftovers(watched.folder.run_id.rpartition("-")[2]) == []


def test_killed_node_and_controller_are_recovered_in_namespaces(isolated_runs: Runs) -> None:
    watched = isolated_runs.steps(400, 0.02, target="apart")
    watched.drill(FaultTarget.CONTROLLER, 0, FaultAction.KILL, at_step=7)
    watched.wait_for(ControllerStarted, lambda _: len(watched.all(ControllerStarted)) == 2)
    # No sooner: a node killed while no controller receives the report is killed again by the next.
    watched.drill(FaultTarget.NODE, 1, FaultAction.KILL)
    assert watched.wait_for_end().outcome is Outcome.SUCCEEDED
    assert len(watched.all(ControllerStarted)) == 2
    assert [event.finding.code for event in watched.all(RecoveryDecided)] == ["node-lost"]
    assert netns.leftovers(watched.folder.run_id.rpartition("-")[2]) == []
