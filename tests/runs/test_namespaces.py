"""Local nodes with a network each: names resolve, a node's loss is recovered, and no namespace is left."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.runs.conftest import TORCH_FREE_TRAINER, Runs

from holdfast import api
from holdfast.events import AgentConnected, FaultAction, FaultTarget, Outcome, RecoveryDecided, StepCommitted
from holdfast.host.processes import all_pids, by_env
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


def test_monarch_places_nodes_there_and_replaces_them(isolated_runs: Runs) -> None:
    overrides = ("orchestrator=monarch", "recovery.max_restarts=10")
    command = (sys.executable, str(TORCH_FREE_TRAINER), "1000000", "0.02")
    watched = isolated_runs.start(*command, target="apart", overrides=overrides)
    watched.wait_for(StepCommitted)
    addresses = {event.node: event.address for event in watched.all(AgentConnected)}
    assert addresses[0] != addresses[1]
    assert by_env(all_pids(), HOLDFAST_NODE=f"{watched.folder.run_id}/monarch")
    for fault in (FaultTarget.AGENT, FaultTarget.NODE):
        watched.drill(fault, 1, FaultAction.KILL)
        assert watched.wait_for(RecoveryDecided).finding.code == "node-lost"
        attempt = watched.all(RecoveryDecided)[-1].attempt
        watched.wait_for(StepCommitted, lambda event, last=attempt: event.attempt > last)
    api.cancel(watched.folder)
    assert watched.wait_for_end().outcome is Outcome.CANCELLED
    assert netns.leftovers(watched.folder.run_id.rpartition("-")[2]) == []
