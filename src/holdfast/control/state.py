"""Owns what a run's controller knows: frozen data, changed only by the machine (machine.py)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from holdfast.control.commands import Commands
from holdfast.control.policy import Failure
from holdfast.events import FaultRequested, Outcome, RankExited, RankHung
from holdfast.job.backend import NodeId
from holdfast.job.run_spec import CodeArchive


class Timer(StrEnum):
    """What the machine waits for, each for one node or replica."""

    RECONNECT = "reconnect"
    """A node whose connection closed is to come back."""
    STOP = "stop"
    """A replica's ranks are to end."""
    HANG_VERDICT = "hang-verdict"
    """A hung replica's other ranks are to report."""
    FIRST_STEP = "first-step"
    """A replica's ranks are to have taken a step, in a run whose ranks have taken some before."""
    JOIN = "join"
    """A replica's nodes that were made are to join."""
    STANDBY_JOIN = "standby-join"
    """A standby that was made is to join."""
    MIN_NODES = "min-nodes"
    """A replica's missing nodes are to come, or it does without them."""
    BACK_OFF = "back-off"
    """A replica that fails again and again is to try once more."""
    SCALE_UP = "scale-up"
    """A replica that could have more nodes is to take them in."""
    EXIT = "exit"
    """A replica that is winding down is to have left."""
    UPDATE = "update"
    """Ranks are to be stopped for an update, unless they restart before."""

    def key(self, index: int) -> str:
        """The key of this deadline of a node or replica."""
        return f"{self.value}:{index}"

    @classmethod
    def parse(cls, key: str) -> tuple[Timer, int]:
        """The deadline that a key names, and of which node or replica."""
        kind, _, index = key.partition(":")
        return cls(kind), int(index)


class NodePhase(StrEnum):
    """Where a node slot stands."""

    REQUESTED = "requested"
    """Asked of the back end, which has not answered."""
    UNAVAILABLE = "unavailable"
    """The back end cannot make it now, and will as soon as it can."""
    CREATED = "created"
    """It exists; its agent has not been heard of."""
    JOINED = "joined"
    DISCONNECTED = "disconnected"
    """Its agent's connection closed; it has until its deadline to come back."""


class ReplicaPhase(StrEnum):
    """Where a replica stands."""

    GATHERING = "gathering"
    """Waiting until every one of its nodes is joined and quiet."""
    RUNNING = "running"
    HANG_SUSPECTED = "hang-suspected"
    """A hang was reported; the other ranks' stacks are awaited."""
    STOPPING = "stopping"
    """Its ranks are being ended."""
    DONE = "done"
    """Every rank has ended and none will be started again."""


@dataclass(frozen=True, kw_only=True)
class NodeState:
    """One node slot."""

    node: int
    replica: int | None
    """None for a standby."""
    node_rank: int
    """Its place among the nodes, by which ranks are numbered: one that takes another's place has its ranks."""
    generation: int = 0
    phase: NodePhase = NodePhase.REQUESTED
    since: float = 0.0
    """Unix seconds at which a missing node was asked for, or made."""
    reason: str = ""
    """Why it is missing."""
    join_timed_out: bool = False
    """Whether a node in this slot did not join in time, and none has since."""
    maybe_alive: bool = False
    """Whether ranks of the node that was lost may still live: its back end has yet to say that nothing is left."""
    evicted: bool = False
    """Whether its queue takes this node back."""
    incarnation: str = ""
    address: str = ""
    port: int = 0
    has_processes: bool = False
    """Whether processes of its replica's current attempt may exist on it."""

    def with_changes(self, **changes: Any) -> NodeState:
        """This slot with some fields changed; `replace` takes five times as long, and a restart changes thousands."""
        node = object.__new__(NodeState)
        node.__dict__.update(self.__dict__, **changes)
        return node

    @property
    def node_id(self) -> NodeId:
        return NodeId(node=self.node, generation=self.generation)

    @property
    def is_missing(self) -> bool:
        """Whether nobody is there, nor known to be out of reach."""
        return self.phase in (NodePhase.REQUESTED, NodePhase.UNAVAILABLE, NodePhase.CREATED)

    @property
    def is_expected(self) -> bool:
        """Whether it is worth waiting for a while: it will join, or be missing for good."""
        on_its_way = self.phase in (NodePhase.REQUESTED, NodePhase.CREATED) and not self.join_timed_out
        return on_its_way or self.phase is NodePhase.DISCONNECTED

    @property
    def is_ready(self) -> bool:
        return self.phase is NodePhase.JOINED and not self.has_processes


@dataclass(frozen=True, kw_only=True)
class StepRate:
    """What a replica's steps have shown of themselves."""

    step_s: float | None = None
    """Seconds a step takes, those of late counting more."""
    total_steps: int | None = None
    global_batch: int | None = None
    """Samples in a step, where ranks take their micro-batches from a Session."""


@dataclass(frozen=True, kw_only=True)
class Update:
    """Other code that ranks are to run; over when it has made some steps, or is taken back."""

    code: CodeArchive | None
    """None where it lies in place."""
    due: float | None
    """Unix seconds at which ranks are stopped for it; none waits for a restart."""
    fetched_by: int = 0
    """Nodes that have the code, a bit each."""

    def is_fetched_by(self, nodes: Iterable[int]) -> bool:
        """Whether all of these nodes have its code."""
        return self.code is None or all(self.fetched_by >> node & 1 for node in nodes)


@dataclass(frozen=True, kw_only=True)
class ReplicaState:
    """One failure domain: the ranks that must restart together."""

    replica: int
    slots: int = 0
    """Its node slots, a bit each, as in `State.busy`."""
    phase: ReplicaPhase = ReplicaPhase.GATHERING
    attempt: int = -1
    """The attempt in hand, from 0; -1 before the first."""
    members: tuple[int, ...] = ()
    """The attempt's nodes, in the order of their ranks."""
    started_at: float = 0.0
    master_addr: str = ""
    master_port: int = 0
    highest_step: int = 0
    """Highest step ever committed."""
    attempt_steps: int = 0
    """How many it has committed in the attempt in hand."""
    step_rate: StepRate = StepRate()
    exit_requested: bool = False
    """Whether its ranks were asked to leave after a checkpoint, so that it can go on with more nodes."""
    transfers_state: bool = False
    """Whether they leave their state in memory instead, for the same ranks with other code."""
    code: CodeArchive | None = None
    """What the attempt in hand runs; none where code lies in place."""
    draining: bool = False
    """Whether its ranks are being ended and may take a step till then, since their node is only about to go."""
    rollout_base_step: int | None = None
    """The step after which it runs code of an update that is on trial."""
    scale_ups: tuple[float, ...] = ()
    """Unix seconds at which it stopped for that, oldest first."""
    succeeded: int = 0
    """Ranks of this attempt that ended by themselves with code 0, a bit each."""
    rank_failures: tuple[RankExited, ...] = ()
    """How ranks of this attempt failed, in the order it was learnt."""
    reported: int = 0
    """Ranks of this attempt that were reported hung, or gave up waiting for others, a bit each."""
    hangs: tuple[RankHung, ...] = ()
    node_failures: tuple[Failure, ...] = ()
    """Nodes lost in this attempt."""
    lost_slots: int = 0
    """Node slots lost since its last attempt was running, a bit each: together they are one disruption."""
    failures: tuple[Failure, ...] = ()
    """What ended each earlier attempt, oldest first."""

    @property
    def is_running(self) -> bool:
        return self.phase in (ReplicaPhase.RUNNING, ReplicaPhase.HANG_SUSPECTED)

    @property
    def has_stepped(self) -> bool:
        """Whether it has committed a step in the attempt in hand."""
        return self.attempt_steps > 0


@dataclass(frozen=True, kw_only=True)
class Ending:
    """The decision to end the run."""

    outcome: Outcome
    exit_code: int
    reason: str
    grace_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class State:
    """All that a controller knows of its run; the fold of its log."""

    nodes: tuple[NodeState, ...] = ()
    nodes_with_processes: int = 0
    """Nodes that are `busy`, a bit each: asked at every word of every node, where looking at all would be square."""
    ready_nodes: int = 0
    """Nodes that are `ready`, a bit each."""
    ready_standbys: int = 0
    """Standbys that have said that they can start at once, a bit each."""
    replicas: tuple[ReplicaState, ...] = ()
    timers: Mapping[str, float] = field(default_factory=dict[str, float])
    """Unix seconds at which the machine wants to be told that time has passed, by key."""
    pending_faults: tuple[FaultRequested, ...] = ()
    """Drills that wait: the controller's own for a step, others for an agent's word that they were done."""
    code: CodeArchive | None = None
    """What ranks run, but for an update; none where it lies in place."""
    update: Update | None = None
    cordoned: tuple[NodeId, ...] = ()
    """Places whose machine is out of use, by a drill."""
    ending: Ending | None = None
    finished: bool = False
    longest_first_step_s: float = 0.0
    """Longest, in seconds, that an attempt took from its start to the end of its first step; 0 before any has."""

    @property
    def done(self) -> bool:
        """Whether no rank is left and none will be started."""
        return all(replica.phase is ReplicaPhase.DONE for replica in self.replicas)

    @property
    def shutting_down(self) -> bool:
        """Whether only the end is left: agents are told to leave, and the back end removes every node."""
        return self.ending is not None and self.done

    @property
    def has_replicas(self) -> bool:
        """Whether there are replicas that survive one another."""
        return len(self.replicas) > 1

    @property
    def running_replicas(self) -> tuple[ReplicaState, ...]:
        """Replicas whose ranks run."""
        return tuple(replica for replica in self.replicas if replica.is_running)

    @property
    def rendezvous_by_replica(self) -> dict[int, str]:
        """Where the ranks of each replica's attempt meet; empty for one that has none at work."""
        return {
            replica.replica: f"{replica.master_addr}:{replica.master_port}" if self.may_step(replica) else ""
            for replica in self.replicas
        }

    def may_step(self, replica: ReplicaState) -> bool:
        """Whether a replica's ranks may take a step: they are at work, or have time to end after one."""
        parting = replica.draining or (self.ending is not None and self.ending.grace_s > 0)
        return replica.is_running or (parting and replica.phase is ReplicaPhase.STOPPING)

    @property
    def training_complete(self) -> bool:
        """Whether a replica has finished by itself: what it holds is what all of them were to come to."""
        return self.ending is None and any(replica.phase is ReplicaPhase.DONE for replica in self.replicas)

    def with_node(self, node: NodeState) -> State:
        busy, ready = (
            _with_bit(self.nodes_with_processes, node.node, node.has_processes),
            _with_bit(self.ready_nodes, node.node, node.is_ready),
        )
        nodes = (*self.nodes[: node.node], node, *self.nodes[node.node + 1 :])
        return replace(self, nodes=nodes, nodes_with_processes=busy, ready_nodes=ready)

    def with_nodes(self, changed: Iterable[NodeState]) -> State:
        """Many at once: all are looked at, which beats thousands of changes of single bits."""
        nodes = list(self.nodes)
        for node in changed:
            nodes[node.node] = node
        busy, ready = _bits(node.has_processes for node in nodes), _bits(node.is_ready for node in nodes)
        return replace(self, nodes=tuple(nodes), nodes_with_processes=busy, ready_nodes=ready)

    def with_replica(self, replica: ReplicaState) -> State:
        index = replica.replica
        return replace(self, replicas=(*self.replicas[:index], replica, *self.replicas[index + 1 :]))

    def with_timer(self, key: str, at: float | None) -> State:
        """Set a deadline, or take it away with None."""
        if self.timers.get(key) == at:
            return self
        deadlines = dict(self.timers)
        if at is None:
            del deadlines[key]
        else:
            deadlines[key] = at
        return replace(self, timers=deadlines)

    def with_ready_standby(self, node: int, ready: bool) -> State:
        return replace(self, ready_standbys=_with_bit(self.ready_standbys, node, ready))

    def nodes_of(self, replica: int) -> tuple[NodeState, ...]:
        """Its slots, filled or not, in the order of their ranks."""
        return tuple(sorted((node for node in self.nodes if node.replica == replica), key=lambda node: node.node_rank))

    def node_at(self, replica: int, node_rank: int) -> int | None:
        """The node at a place of a replica's attempt in hand; none where it has not so many."""
        members = self.replicas[replica].members
        return members[node_rank] if node_rank < len(members) else None


def _bits(flags: Iterable[bool]) -> int:
    """A bit for each flag, the first one lowest."""
    return int("".join("1" if flag else "0" for flag in flags)[::-1] or "0", 2)


def _with_bit(bits: int, index: int, on: bool) -> int:
    return bits | 1 << index if on else bits & ~(1 << index)


Transition = tuple[State, Commands]
"""What an event leads to: the state after it, and what is to be done."""
