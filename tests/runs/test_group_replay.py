"""A node that damages what it sends: two replays on groups of nodes name it, and the run finishes without it."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.runs.conftest import Runs

from holdfast.control.policy import Action
from holdfast.events import AttemptStarted, FindingRaised, NodeReplayed, NodeRequested, Outcome, RecoveryDecided

BAD_NODE = Path(__file__).parents[1] / "programs" / "bad_node.py"


def test_node_that_damages_what_it_sends_is_named_by_two_replays_and_replaced(runs: Runs) -> None:
    command = (sys.executable, str(BAD_NODE), "8", "node2.0", "6")
    watched = runs.start(*command, nodes=4, overrides=("checkpoint.every_steps=2",))
    assert watched.wait_for_end().outcome is Outcome.SUCCEEDED
    decided = [each.action for each in watched.all(RecoveryDecided)]
    assert decided == [Action.CHECK_NODES, Action.GO_BACK, Action.GO_BACK, Action.REPLAY]
    replayed = watched.all(NodeReplayed)
    assert sorted((each.number, each.node) for each in replayed) == [(n, node) for n in (1, 2) for node in range(4)]
    (found,) = (each.finding for each in watched.all(FindingRaised) if each.finding.code == "node-failed-replay")
    assert found.where == "node2"
    replaced = [(each.node, each.generation) for each in watched.all(NodeRequested) if each.generation]
    assert replaced == [(2, 1)]
    assert watched.all(AttemptStarted)[-1].nodes == (0, 1, 2, 3)
