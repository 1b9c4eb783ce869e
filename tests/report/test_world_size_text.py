"""Reports of a changed world size: its size, effects and remaining nodes, corrected by later steps."""

from __future__ import annotations

from msgspec.structs import replace
from tests.golden import Golden

from holdfast.events import (
    NodeCreated,
    NodeRequested,
    NodeUnavailable,
    RunCreated,
    ScalingEffect,
    StepCommitted,
    WorldSizeChanged,
)
from holdfast.report.run_status import NodePhase
from holdfast.report.run_summary import format_summary, summarise
from holdfast.report.status_reducer import status_from_events
from holdfast.report.world_size_text import format_world_size, with_observed_batch

SHRUNK = WorldSizeChanged(
    at=50.0,
    replica=0,
    attempt=1,
    nodes=(0, 2),
    missing_nodes=(1, 3),
    world_size=4,
    previous_world_size=8,
    full_world_size=8,
    global_batch=ScalingEffect.KEPT,
    samples=1024,
    learning_rate=ScalingEffect.KEPT,
    confirmed=True,
    remaining_s=130.0,
    reason="node1 cannot be had: full",
)
WHOLE = replace(SHRUNK, attempt=2, nodes=(0, 1, 2, 3), missing_nodes=(), world_size=8, previous_world_size=4, reason="")


def step(attempt: int, **metrics: float) -> StepCommitted:
    return StepCommitted(at=60.0, replica=0, attempt=attempt, step=7, started=58.0, ended=60.0, metrics=metrics)


def test_changed_world_is_shown_with_all_its_effects(golden: Golden) -> None:
    scaled = replace(
        SHRUNK, global_batch=ScalingEffect.SCALED, learning_rate=ScalingEffect.SCALED, learning_rate_factor=0.5
    )
    unconfirmed = replace(SHRUNK, samples=None, confirmed=False)
    golden("\n".join(map(format_world_size, (SHRUNK, WHOLE, scaled, unconfirmed))))


def test_step_shows_whether_the_ranks_honour_the_job() -> None:
    asked = replace(SHRUNK, samples=None, confirmed=False)
    assert with_observed_batch(asked, step(1, global_batch=64.0)) == replace(asked, samples=64, confirmed=True)
    own = with_observed_batch(asked, step(1))
    assert (own.global_batch, own.learning_rate, own.confirmed) == (
        ScalingEffect.AS_CONFIGURED,
        ScalingEffect.AS_CONFIGURED,
        True,
    )


def test_status_is_degraded_until_every_node_takes_part() -> None:
    assert status_from_events([SHRUNK]).is_degraded
    assert not status_from_events([SHRUNK, WHOLE]).is_degraded
    shown = status_from_events([replace(SHRUNK, confirmed=False), step(1)]).leader.world_size_change
    assert shown is not None
    assert shown.global_batch is ScalingEffect.AS_CONFIGURED


def test_status_names_the_unavailable_node_and_the_minimum() -> None:
    events = [
        RunCreated(at=0.0, run="demo-abc234", job={"nodes": {"min": 2, "max": 4}}),
        NodeRequested(at=1.0, node=0, generation=0),
        NodeUnavailable(at=2.0, node=0, generation=0, reason="no machine"),
    ]
    status = status_from_events(events)
    assert (status.nodes[0].phase, status.nodes[0].reason) == (NodePhase.UNAVAILABLE, "no machine")
    assert status.min_nodes == 2
    assert status_from_events([NodeCreated(at=3.0, node=0, generation=0)], status).nodes[0].phase is NodePhase.CREATED


def test_summary_lists_every_change_of_the_world() -> None:
    events = [RunCreated(at=0.0, run="demo-abc234", job={}), SHRUNK, step(1, global_batch=64.0), WHOLE]
    summary = summarise(status_from_events(events), logs="", now=70.0)
    assert [world.attempt for world in summary.world_size_changes] == [1, 2]
    assert "attempt 1  degraded: world size 4 of 8" in format_summary(summary)
