"""A node that damages what it sends: two replays on groups of nodes name it, and the run finishes without it."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path

import pytest
from msgspec.structs import replace
from tests.runs.conftest import leftovers_of

from holdfast import api, controller_main
from holdfast.control import policy
from holdfast.control.policy import Action
from holdfast.events import AttemptStarted, FindingRaised, NodeReplayed, NodeRequested, RecoveryDecided, RunFinished
from holdfast.events.log import read_events
from holdfast.job.run_spec import RunSpec
from holdfast.launch import controller_supervisor
from holdfast.launch.new_run import write_inputs
from holdfast.run_dir import RunDir

BAD_NODE = Path(__file__).parents[1] / "programs" / "bad_node.py"
NODES = 6
"""Enough for groups of two, which meet over their own rendezvous."""
DEADLINE_S = 200.0


def test_node_that_damages_what_it_sends_is_named_by_two_replays_and_replaced(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The levels before have their own tests; their probes take a minute.
    rows = tuple(replace(row, levels=row.levels[-1:]) for row in policy._UNEXPLAINED)
    monkeypatch.setattr(policy, "_UNEXPLAINED", rows)
    overrides = ("checkpoint.every_steps=2", "recovery.prewarm=false", "watch.step_clock=false")
    command = (sys.executable, str(BAD_NODE), "8", "node2.0", "6")
    job = api.load_job(None, command=command, nodes=NODES, name="bad", overrides=overrides)
    folder = RunDir.create("bad")
    write_inputs(folder, RunSpec(job=job, base=str(tmp_path), created_at=time.time(), fabric="tcp"))

    async def run() -> None:
        _, heartbeat = os.pipe()
        with controller_supervisor.listen(folder, "127.0.0.1") as (agents, clients):
            async with asyncio.timeout(DEADLINE_S):
                await controller_main.serve(folder, agents, clients, heartbeat)

    asyncio.run(run())
    log = [*read_events(folder.events)]
    assert [each.outcome for each in log if isinstance(each, RunFinished)] == ["succeeded"]
    assert [each.action for each in log if isinstance(each, RecoveryDecided)] == [Action.REPLAY]
    for number, groups in ((1, {(0, 1), (2, 3), (4, 5)}), (2, {(0, 3), (1, 4), (2, 5)})):
        reports = [each for each in log if isinstance(each, NodeReplayed) and each.number == number]
        digests = {each.nodes: each.digest for each in reports}
        assert (len(reports), digests.keys()) == (NODES, groups)
        (bad,) = (group for group in groups if 2 in group)
        assert [*digests.values()].count(digests[bad]) == 1
        assert len({*digests.values()}) == 2
        assert all(digests.values())
    (found,) = (each.finding for each in log if isinstance(each, FindingRaised) and "replay" in each.finding.code)
    assert (found.code, found.where) == ("node-failed-replay", "node2")
    assert [(each.node, each.generation) for each in log if isinstance(each, NodeRequested) and each.generation] == [
        (2, 1)
    ]
    assert [each.nodes for each in log if isinstance(each, AttemptStarted)] == [(*range(NODES),)] * 2
    folder.control_socket.unlink()
    assert leftovers_of(folder) == []
