"""Local nodes with a network each: names resolve, a node's loss is recovered, and no namespace is left."""

from __future__ import annotations

from pathlib import Path

from tests.runs.conftest import Runs

from holdfast.events import AgentConnected, Outcome
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
