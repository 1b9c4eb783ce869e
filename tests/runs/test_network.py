"""Bad luck with the network: parts of a run that are out of reach for a while, or for good, cost no step."""

from __future__ import annotations

from tests.runs.conftest import Runs

from holdfast.events import AttemptStarted, DrillAction, DrillDone, DrillTarget, NodeRequested, Outcome, StepCommitted


def test_node_cut_off_for_a_second_costs_nothing(isolated: Runs) -> None:
    watched = isolated.steps(60, 0.02, profile="apart")
    watched.drill(DrillTarget.NODE, 1, DrillAction.PARTITION, at_step=12, for_s=1.0)
    assert watched.end().outcome is Outcome.SUCCEEDED
    assert len(watched.all(DrillDone)) == 1
    assert len(watched.all(AttemptStarted)) == 1
    assert len(watched.all(NodeRequested)) == 2
    # No upper bound, for machines may be slow; but a step must have waited, or nothing was cut.
    assert max(event.ended - event.started for event in watched.all(StepCommitted)) > 0.9
    assert [event.step for event in watched.all(StepCommitted)] == list(range(1, 61))


def test_agent_stopped_for_a_second_costs_nothing(runs: Runs) -> None:
    watched = runs.steps(60, 0.02)
    watched.drill(DrillTarget.AGENT, 1, DrillAction.STOP, at_step=12, for_s=1.0)
    assert watched.end().outcome is Outcome.SUCCEEDED
    assert len(watched.all(DrillDone)) == 1
    assert len(watched.all(AttemptStarted)) == 1
    assert [event.step for event in watched.all(StepCommitted)] == list(range(1, 61))
