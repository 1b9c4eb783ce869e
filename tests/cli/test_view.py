"""What a run looks like while it goes on."""

from __future__ import annotations

from io import StringIO

from rich.console import Console, RenderableType

from holdfast.cli.findings import block
from holdfast.cli.view import MOST_ROWS, View, picture
from holdfast.events import (
    AgentJoined,
    AnyEvent,
    AttemptStarted,
    NodeRequested,
    RankExit,
    RankExited,
    RanksStarted,
    RankState,
    RecoveryDecided,
    RunCreated,
    StepCommitted,
)
from holdfast.findings import Fault, Finding, Severity
from holdfast.report.advance import fold

LOST = Finding(code="node-lost", what="node1 was lost", where="node1", evidence=("a", "b"), fault=Fault.CLUSTER)


def shown(renderable: RenderableType, width: int = 110) -> str:
    screen = StringIO()
    Console(file=screen, width=width, markup=False, highlight=False).print(renderable)
    return screen.getvalue()


def log(nodes: int, ranks_per_node: int) -> list[AnyEvent]:
    events: list[AnyEvent] = [RunCreated(at=0, run="demo-abc234", job={"name": "demo"})]
    for node in range(nodes):
        events.append(NodeRequested(at=1, node=node, generation=0))
        events.append(
            AgentJoined(
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
    return RankExited(at=20, node=node, replica=0, attempt=0, rank=rank, how=RankExit.SIGNAL, code=11, last_step=41)


def test_small_run_shows_each_rank_with_its_process() -> None:
    text = shown(picture(fold([*log(2, 2), died(3, 1)]), now=30))
    assert "node1.0" in text
    assert "1001" in text
    assert "ended by signal 11 at step 41" in text
    assert text.count("running") == 1 + 3


def test_large_run_draws_ranks_together_and_puts_what_is_not_well_first() -> None:
    text = shown(picture(fold([*log(100, 8), died(799, 99)]), now=30))
    lines = text.splitlines()
    first = next(line for line in lines if line.startswith("node") and "host" in line and "joined" in line)
    assert "node99.0" in first
    assert "792-798 running; 799 ended by signal 11 at step 41" in first
    assert f"and {100 - MOST_ROWS + 1} more, all well" in text
    assert len(lines) < 30


def test_headline_tells_progress_speed_and_what_is_left() -> None:
    steps = [
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
    text = shown(picture(fold([*log(1, 1), *steps]), now=60))
    for words in (
        "demo-abc234  running  1 min 00 s",
        "step 40/100",
        "40%",
        "loss 2.5",
        "2,048 tokens/s",
        "1 min 00 s left",
    ):
        assert words in text


def test_view_shows_last_events_and_findings() -> None:
    view = View(lambda _: 60.0)
    decided = RecoveryDecided(at=30, replica=0, attempt=0, action="restart in place", failed_at=30, finding=LOST)
    for event in [*log(2, 1), decided]:
        view.take(event)
    view.note("ending the run")
    text = shown(view)
    assert "recovering" in text
    assert "decision: restart in place" in text
    assert "ending the run" in text
    assert "warning, 30.0 s ago: node1 was lost  [node-lost]" in text


def test_speed_is_shown_only_while_ranks_take_steps() -> None:
    metrics = {"tokens": 2048.0, "total_steps": 100.0}
    steps = [
        StepCommitted(
            at=10 + number, replica=0, attempt=0, step=number, started=9 + number, ended=10 + number, metrics=metrics
        )
        for number in range(1, 41)
    ]
    known = fold([*log(1, 1), *steps])
    assert "2,048 tokens/s" in shown(picture(known, now=90))
    hung = shown(picture(known, now=150))
    assert "tokens/s" not in hung
    assert "step 40/100" in hung
    assert "no step for 1 min 40 s" in hung
    decided = RecoveryDecided(at=52, replica=0, attempt=0, action="restart in place", failed_at=52, finding=LOST)
    recovering = shown(picture(fold([decided], known), now=53))
    assert "tokens/s" not in recovering
    assert " a step" not in recovering


def test_nothing_known_yet_can_be_shown() -> None:
    assert "pending" in shown(View(lambda _: 0.0))


def test_finding_tells_what_where_evidence_remedy_and_fault() -> None:
    finding = Finding(
        code="slow-disk",
        severity=Severity.WARNING,
        what="the disk is slow",
        where="node1",
        evidence=("12 MB/s", "\x1b[2Jrude"),
        remedy="Use another disk.",
        fault=Fault.CLUSTER,
    )
    assert block(finding).plain == (
        "warning: the disk is slow  [slow-disk]\n"
        "  where       node1\n"
        "  evidence    12 MB/s\n"
        "              rude\n"
        "  what to do  Use another disk.\n"
        "  fault of    the machines or the cluster"
    )
