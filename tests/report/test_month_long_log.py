"""The log of a few days of a large run, through the real controller: small, and everything that counts is in it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from bench.event_log import RANKS, make_log

from holdfast import api
from holdfast.control.machine import Machine
from holdfast.events import RankExited, RanksStopped, RecoveryDecided, StepCommitted
from holdfast.events.log import read_events
from holdfast.report.goodput import TimeCategory
from holdfast.report.rank_table import RankPhase
from holdfast.report.run_status import RunPhase
from holdfast.run_dir import RunDir

NODES, DAYS = 192, 4.0


@pytest.mark.slow
def test_log_of_days_is_small_and_holds_every_step_restart_and_second(tmp_path: Path) -> None:
    folder = RunDir(tmp_path / "run")
    run = make_log(folder, NODES, DAYS)
    restarts = sum(run.happened[what] for what in ("lose_node", "crash", "hang"))
    assert restarts > 0
    events = read_events(folder.events)
    lines = [event for event in events if isinstance(event, StepCommitted)]
    steps = [(line.attempt, number) for line in lines for number in range(line.first, line.step + 1)]
    assert steps == run.committed
    assert len(lines) < len(steps) / 2
    assert Machine(run.machine.job).replay(events) == run.controller._state
    assert sum(isinstance(event, RecoveryDecided) for event in events) == restarts
    exits_in_log = sum(isinstance(event, RankExited | RanksStopped) for event in events)
    assert exits_in_log < 30 * restarts < NODES * RANKS * restarts
    status = api.status(folder)
    account = status.account(run.now)
    assert account.total_s == pytest.approx(DAYS * 86400, rel=0.01)
    assert sum(account.parts.values()) == pytest.approx(account.total_s)
    assert account.recomputed_steps == sum(
        count - 1 for count in Counter(number for _, number in run.committed).values()
    )
    assert account.parts[TimeCategory.TRAINING] > 0.8 * account.total_s
    assert status.phase is RunPhase.STOPPING  # the run's end is not part of it
    assert (status.restarts, status.leader.step) == (restarts, run.step)
    assert status.leader.seconds_per_step == pytest.approx(10.0, rel=0.2)
    assert Counter(rank.phase for rank in status.leader.ranks.values()) == {RankPhase.RUNNING: NODES * RANKS}
