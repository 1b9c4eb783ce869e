"""The display of a running run."""

from __future__ import annotations

import re
from io import StringIO
from typing import Any

import pytest
from msgspec import structs
from rich.console import Console, RenderableType
from tests.golden import Golden

from holdfast.cli.event_text import describe
from holdfast.cli.finding_text import render_finding
from holdfast.cli.live_view import MOST_ROWS, LiveView, render_status
from holdfast.cli.output import print_json
from holdfast.events import (
    AgentConnected,
    AnyEvent,
    AttemptStarted,
    CheckpointCommitted,
    ControllerStarted,
    ExitReason,
    FindingRaised,
    NodeRequested,
    NodeTerminated,
    Outcome,
    RankExited,
    RankHung,
    RanksStarted,
    RankState,
    RankStepTime,
    RecoveryDecided,
    RunCreated,
    ShutdownDecided,
    StepCommitted,
    StepTimesCompared,
)
from holdfast.findings import Finding, Owner, Severity
from holdfast.report.run_summary import format_summary, summarise
from holdfast.report.status_reducer import status_from_events

LOST = Finding(code="node-lost", what="node1 was lost", where="node1", evidence=("a", "b"), owner=Owner.CLUSTER)


def shown(renderable: RenderableType, width: int = 110) -> str:
    screen = StringIO()
    Console(file=screen, width=width, markup=False, highlight=False).print(renderable)
    return screen.getvalue()


def log(nodes: int, ranks_per_node: int) -> list[AnyEvent]:
    events: list[AnyEvent] = [
        RunCreated(at=0, run="demo-abc234", job={"name": "demo"}),
        ControllerStarted(at=0, pid=1, incarnation="c"),
    ]
    for node in range(nodes):
        events.append(NodeRequested(at=1, node=node, generation=0))
        events.append(
            AgentConnected(
                at=1,
                node=node,
                generation=0,
                incarnation="i",
                hostname=f"host{node}",
                address="127.0.0.1",
                port=1,
                pid=1,
            )
        )
    events.append(
        AttemptStarted(at=2, replica=0, attempt=0, world_size=nodes * ranks_per_node, master_addr="a", master_port=1)
    )
    for node in range(nodes):
        ranks = tuple(RankState(rank=node * ranks_per_node + one, pid=1000 + one) for one in range(ranks_per_node))
        events.append(RanksStarted(at=3, node=node, replica=0, attempt=0, ranks=ranks))
    return events


def died(rank: int, node: int) -> RankExited:
    return RankExited(
        at=20, node=node, replica=0, attempt=0, rank=rank, reason=ExitReason.SIGNAL, code=11, last_step=41
    )


def test_small_run_shows_each_rank_with_its_process(golden: Golden) -> None:
    golden(shown(render_status(status_from_events([*log(2, 2), died(3, 1)]), now=30)))


def test_large_run_draws_ranks_together_and_puts_what_is_not_well_first(golden: Golden) -> None:
    text = shown(render_status(status_from_events([*log(100, 8), died(799, 99)]), now=30))
    assert f"and {100 - MOST_ROWS + 1} more, all well" in text
    golden(text)


STEPS = [
    StepCommitted(
        at=10 + number,
        replica=0,
        attempt=0,
        step=number,
        started=9 + number,
        ended=10 + number,
        metrics={"loss": 2.5, "tokens": 2048.0, "total_steps": 100.0},
    )
    for number in range(1, 41)
]


def test_headline_has_progress_speed_and_remaining_time(golden: Golden) -> None:
    golden(shown(render_status(status_from_events([*log(1, 1), *STEPS]), now=60, ettr="ETTR 50.0 %")))


def test_narrow_terminal_shows_progress_and_what_each_node_does() -> None:
    events = [
        structs.replace(event, hostname=f"demo-abc234-node-{event.node}.demo-abc234.team")
        if isinstance(event, AgentConnected)
        else event
        for event in [*log(64, 8), *STEPS]
    ]
    lines = shown(render_status(status_from_events(events), now=60, ettr="ETTR 50.0 %"), width=60).splitlines()
    assert max(map(len, lines)) <= 60
    words = " ".join(" ".join(lines).split())
    for part in ("step 40/100", "2,048 tokens/s", "1 min 00 s left", "ETTR 50.0 %", "and 49 more, all well"):
        assert part in words
    assert sum("joined" in line and "running" in line for line in lines) == MOST_ROWS - 1


def test_slowest_rank_is_named_with_its_phase_while_ranks_take_steps() -> None:
    compared = StepTimesCompared(
        at=40,
        replica=0,
        attempt=0,
        first_step=20,
        last_step=24,
        ranks=2,
        step_p50_s=1.0,
        step_p99_s=1.0,
        own_p50_s=0.5,
        own_p99_s=0.75,
        slowest=(RankStepTime(1, 0.75, "data", 0.2), RankStepTime(0, 0.25, "host", 0.0)),
    )
    known = status_from_events([*log(1, 2), *STEPS, compared])
    line = "2 ranks take 0.5 s by themselves, p99 0.75 s; the slowest is rank 1 50% over the median, most in data"
    assert line in " ".join(shown(render_status(known, now=60)).split())
    assert "slowest" not in shown(render_status(known, now=500))


def test_upload_of_the_code_is_shown_while_it_lasts() -> None:
    view = LiveView(lambda _: 60.0)
    view.show_activity("the code is uploaded: 12 of 480 MiB")
    assert "12 of 480 MiB" in shown(view)
    view.show_activity("")
    assert "MiB" not in shown(view)


def test_view_shows_last_events_and_findings(golden: Golden) -> None:
    training = LiveView(lambda _: 60.0)
    for event in [*log(1, 1), *STEPS]:
        training.on_event(event)
    recovering = LiveView(lambda _: 60.0)
    decided = RecoveryDecided(at=30, replica=0, attempt=0, action="restart in place", failed_at=30, finding=LOST)
    for event in [*log(2, 1), decided]:
        recovering.on_event(event)
    recovering.add_note("stopping the run")
    golden(shown(training), shown(recovering))


def test_speed_is_shown_only_while_ranks_take_steps(golden: Golden) -> None:
    metrics = {"tokens": 2048.0, "total_steps": 100.0}
    steps = [
        StepCommitted(
            at=10 + number, replica=0, attempt=0, step=number, started=9 + number, ended=10 + number, metrics=metrics
        )
        for number in range(1, 41)
    ]
    known = status_from_events([*log(1, 1), *steps])
    decided = RecoveryDecided(at=52, replica=0, attempt=0, action="restart in place", failed_at=52, finding=LOST)
    recovering = status_from_events([decided], known)
    training, hung = shown(render_status(known, now=90)), shown(render_status(known, now=150))
    assert ("tokens/s" in training, "tokens/s" in hung) == (True, False)
    golden(training, hung, shown(render_status(recovering, now=53)))


def test_nothing_known_yet_can_be_shown(golden: Golden) -> None:
    golden(shown(LiveView(lambda _: 0.0)))


def test_finding_has_what_where_evidence_remedy_and_owner(golden: Golden) -> None:
    finding = Finding(
        code="slow-disk",
        severity=Severity.WARNING,
        what="the disk is slow",
        where="node1",
        evidence=("12 MB/s", "\x1b[2Jrude"),
        remedy="Use another disk.",
        owner=Owner.CLUSTER,
    )
    golden(render_finding(finding).plain)


HOSTILE = "x\x1b]0;owned\x07\x1b[2J\x9b31m\r\u202e\u2028y"
"""What sets a terminal's title, clears it, colours it, and turns text around."""
HARMFUL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")


def hostile_log() -> list[AnyEvent]:
    """A run in which everything that comes from a rank or a node is hostile, as a log of an older version may be."""
    finding = Finding(code=HOSTILE, what=HOSTILE, where=HOSTILE, evidence=(HOSTILE,), remedy=HOSTILE)
    of: dict[str, Any] = {"node": 0, "replica": 0, "attempt": 0}
    return [
        *log(1, 2),
        AgentConnected(
            at=3,
            node=0,
            generation=0,
            incarnation="i",
            hostname=HOSTILE,
            address=HOSTILE,
            port=1,
            pid=1,
        ),
        StepCommitted(at=4, replica=0, attempt=0, step=1, started=3, ended=4, metrics={HOSTILE: 1.0, "loss": 1.0}),
        CheckpointCommitted(at=4, **of, step=1, path=HOSTILE),
        FindingRaised(at=5, finding=finding),
        RankHung(at=5, **of, rank=0, last_step=1, last_step_at=4, waited_s=1, top_frame=HOSTILE, stacks=HOSTILE),
        RankExited(
            at=6, **of, rank=1, reason=ExitReason.CODE, code=1, error=HOSTILE, evidence=HOSTILE, error_location=HOSTILE
        ),
        RecoveryDecided(at=6, replica=0, attempt=0, action="end the run", failed_at=6, finding=finding),
        NodeTerminated(at=7, node=0, generation=0, reason=HOSTILE),
        ShutdownDecided(
            at=8, outcome=Outcome.FAILED, reason=HOSTILE, exit_code=1, finding=structs.replace(finding, code="x\x1b")
        ),
    ]


def test_text_of_a_rank_never_reaches_the_terminal_unsanitized(capsys: pytest.CaptureFixture[str]) -> None:
    view = LiveView()
    pictures: list[str] = []
    for event in hostile_log():
        view.on_event(event)
        pictures += [shown(view), shown(render_status(view.status, 9)), describe(event)]
        pictures += [shown(render_finding(finding)) for finding in view.status.findings]
    print_json(*hostile_log())
    pictures += [
        format_summary(summarise(status_from_events(hostile_log()), logs="/logs", now=9)),
        capsys.readouterr().out,
    ]
    assert not [text for text in pictures if HARMFUL.search(text.replace("\r\n", "\n"))]
