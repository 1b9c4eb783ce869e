"""Batched events: one event has the contents of many, and no deciding event is batched."""

from __future__ import annotations

import msgspec
import pytest

from holdfast.control.event_batching import BATCH_ABOVE_NODES, UNBATCHED_FAILURES, EventBatcher
from holdfast.control.machine import Machine
from holdfast.control.state import ReplicaPhase, State
from holdfast.events import (
    AgentConnected,
    AgentEvent,
    AnyEvent,
    ExitReason,
    GroupCollectives,
    NodesStarted,
    NodesStopped,
    RankExited,
    RankHung,
    RanksExited,
    RanksHung,
    RanksStarted,
    RanksStopped,
    RankState,
    RunCreated,
    from_ranges,
    to_ranges,
)
from holdfast.job.spec import Job, Nodes

NODES, EACH = 40, 2


class Run:
    """A machine whose nodes have all joined, so that attempt 0 runs."""

    def __init__(self, nodes: int = NODES) -> None:
        self.machine = Machine(Job(command=("train",), nodes=Nodes(min=nodes, max=nodes), ranks_per_node=EACH))
        self.state = State()
        self.feed(RunCreated(at=0.0, run="r", job={}))
        for node in range(nodes):
            self.feed(
                AgentConnected(
                    at=0.0, node=node, generation=0, incarnation="i", hostname="h", address="a", port=node, pid=1
                )
            )
        assert self.phase is ReplicaPhase.RUNNING

    def feed(self, *events: AnyEvent) -> None:
        for event in events:
            self.state, _ = self.machine.step(self.state, event)

    @property
    def phase(self) -> ReplicaPhase:
        return self.state.replicas[0].phase


def told(node: int, word: AgentEvent, seq: int = 1) -> AgentEvent:
    return msgspec.structs.replace(word, source=f"n{node}", seq=seq)


def started(node: int) -> AgentEvent:
    ranks = tuple(RankState(rank=node * EACH + local, pid=7) for local in range(EACH))
    return told(node, RanksStarted(at=1.0, node=node, replica=0, attempt=0, ranks=ranks))


def exited(rank: int, code: int = 0, at: float = 2.0, *, stopped: bool = False, error: str = "") -> AgentEvent:
    node, seq = rank // EACH, 10 + rank % EACH
    word = RankExited(
        at=at,
        node=node,
        replica=0,
        attempt=0,
        rank=rank,
        reason=ExitReason.CODE,
        code=code,
        stopped=stopped,
        error=error,
    )
    return told(node, word, seq)


def hung(rank: int, last_step: int = 5, collectives: tuple[GroupCollectives, ...] = ()) -> AgentEvent:
    word = RankHung(
        at=3.0,
        node=rank // EACH,
        replica=0,
        attempt=0,
        rank=rank,
        last_step=last_step,
        last_step_at=2.0,
        waited_s=1.0,
        collectives=collectives,
    )
    return told(rank // EACH, word, 20 + rank % EACH)


def stopped(node: int) -> AgentEvent:
    return told(node, RanksStopped(at=4.0, node=node, replica=0, attempt=0, port=5000 + node), 30)


def gathered(run: Run, *words: AgentEvent) -> list[AnyEvent]:
    crowd = EventBatcher()
    assert all(crowd.offer(run.state, word) for word in words)
    return crowd.flush(run.state)


@pytest.mark.parametrize("them", [[], [4], [0, 1, 2, 5, 7, 8], [9, 3, 3, 4]])
def test_spans_stand_for_their_numbers(them: list[int]) -> None:
    assert list(from_ranges(to_ranges(them))) == sorted(set(them))


def test_small_replica_has_a_line_for_every_event() -> None:
    run = Run(nodes=BATCH_ABOVE_NODES)
    assert not any(EventBatcher().offer(run.state, word) for word in (started(0), exited(0), stopped(0)))


def test_every_start_is_one_event_as_soon_as_the_last_node_has_said_it() -> None:
    run, crowd = Run(), EventBatcher()
    for node in range(NODES):
        assert not crowd.is_complete(run.state)
        crowd.offer(run.state, started(node))
    assert crowd.is_complete(run.state)
    ticket = crowd.rounds
    assert not crowd.is_flushed(ticket)
    (event,) = crowd.flush(run.state)
    assert event == NodesStarted(at=1.0, replica=0, attempt=0, nodes=((0, NODES - 1),), ranks=((0, NODES * EACH - 1),))
    assert crowd.is_flushed(ticket)
    assert crowd.flush(run.state) == []


def test_single_event_is_not_batched() -> None:
    word = started(3)
    assert gathered(Run(), word) == [word]


def test_ends_drawn_together_lead_where_each_alone_leads() -> None:
    words = [exited(rank) for rank in range(NODES * EACH)] + [stopped(node) for node in range(NODES)]
    alone, together = Run(), Run()
    alone.feed(*words)
    events = gathered(together, *words)
    assert [type(event) for event in events] == [RanksExited, NodesStopped]
    together.feed(*events)
    assert together.state == alone.state
    assert alone.phase is ReplicaPhase.DONE


def test_part_of_the_ends_leads_where_each_alone_leads() -> None:
    words = [exited(rank) for rank in range(30)] + [stopped(node) for node in range(15)]
    alone, together = Run(), Run()
    alone.feed(*words)
    together.feed(*gathered(together, *words))
    assert together.state == alone.state
    assert alone.phase is ReplicaPhase.RUNNING


def test_deciding_event_is_not_batched() -> None:
    run = Run()
    assert not EventBatcher().offer(run.state, exited(0, code=1))
    assert not EventBatcher().offer(run.state, exited(0, stopped=True))
    assert not EventBatcher().offer(run.state, hung(0))


def test_failures_after_the_first_are_drawn_together_but_for_those_that_may_have_come_before_it() -> None:
    run = Run()
    run.feed(exited(5, code=1, at=50.0, error="ConnectionError: closed by peer"))
    assert run.phase is ReplicaPhase.STOPPING
    others = [
        exited(rank, code=1, at=50.0 + rank, error="RuntimeError: Connection reset by peer")
        for rank in range(10, NODES * EACH)
    ]
    cause = exited(9, code=1, at=60.0, error="ValueError: bad shape")
    events = gathered(run, *others, cause)
    whole = [event for event in events if isinstance(event, RankExited)]
    (rest,) = [event for event in events if isinstance(event, RanksExited)]
    assert cause in whole
    assert len(whole) < UNBATCHED_FAILURES
    assert {word.rank for word in whole} | set(from_ranges(rest.ranks)) == {9, *range(10, NODES * EACH)}
    run.feed(*events)
    run.feed(*gathered(run, *(stopped(node) for node in range(NODES))))
    (failure,) = run.state.replicas[0].failures
    assert (failure.rank, failure.error) == (9, "ValueError: bad shape")


WAITS = (GroupCollectives(group="0", enqueued=8, completed=7, pending=8),)
FREE = (GroupCollectives(group="0", enqueued=7, completed=7),)


@pytest.mark.parametrize("behind", [hung(33, last_step=4), hung(33, collectives=FREE)], ids=["steps", "recorder"])
def test_hangs_are_drawn_together_but_for_the_likeliest_causes_and_all_of_them_end_the_wait(
    behind: AgentEvent,
) -> None:
    run = Run()
    run.feed(hung(0, collectives=WAITS))
    assert run.phase is ReplicaPhase.HANG_SUSPECTED
    others = [hung(rank, collectives=WAITS) for rank in range(1, NODES * EACH) if rank != 33]
    events = gathered(run, *others, behind)
    assert behind in events
    assert any(isinstance(event, RanksHung) for event in events)
    run.feed(*events)
    assert run.phase is ReplicaPhase.STOPPING
    run.feed(*gathered(run, *(stopped(node) for node in range(NODES))))
    assert run.state.replicas[0].failures[0].rank == 33


def test_ranks_that_give_up_waiting_together_are_drawn_together_and_end_the_wait() -> None:
    run = Run()
    gave_up = "RuntimeError: [..] Timed out waiting 2000ms for recv operation to complete"
    run.feed(exited(0, 1, error=gave_up))
    assert run.phase is ReplicaPhase.HANG_SUSPECTED
    events = gathered(run, *(exited(rank, 1, error=gave_up) for rank in range(1, NODES * EACH)))
    assert any(isinstance(event, RanksExited) for event in events)
    run.feed(*events)
    assert run.phase is ReplicaPhase.STOPPING


def test_resent_message_changes_nothing() -> None:
    run = Run()
    events = gathered(run, *(stopped(node) for node in range(NODES - 1)))
    run.feed(*events)
    before = run.state
    run.feed(*events)
    assert run.state == before
