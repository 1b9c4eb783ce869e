"""The controller's state of a run: frozen data, changed only by the state machine (machine.py).

A long file, because it is the single list of all that the log restores.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum

from msgspec import Struct, field
from msgspec.structs import replace

from holdfast.control.node_fabrics import FabricNodes, Reports
from holdfast.control.node_set import NO_NODES, NO_RANKS, NodeSet, RankSet
from holdfast.control.policy import Failure
from holdfast.events import FaultRequested, NodeProbed, NodeReplayed, Outcome, RankExited, RankHung, SocketsObserved
from holdfast.job.backend import NodeId
from holdfast.job.quarantine import MachineEvidence
from holdfast.job.run_spec import CodeArchive
from holdfast.watch.dual_phase import Digests, Group, plan


class Timer(StrEnum):
    """Timers of the machine, each for one node or replica."""

    RECONNECT = "reconnect"
    """Deadline for a disconnected node to reconnect."""
    STOP = "stop"
    """Deadline for a replica's ranks to stop."""
    HANG_VERDICT = "hang-verdict"
    """Deadline for a hung replica's other ranks to report."""
    FIRST_STEP = "first-step"
    """Deadline for a replica's first step, in a run whose ranks have completed some before."""
    JOIN = "join"
    """Deadline for a replica's created nodes to join."""
    STANDBY_JOIN = "standby-join"
    """Deadline for a created standby to join."""
    CHECK = "check"
    """Deadline for a node to report its checks."""
    PROBE = "probe"
    """Deadline for the nodes of a replica to end their probes."""
    REPLAY = "replay"
    """Deadline for the nodes of a replica to end their replay."""
    MIN_NODES = "min-nodes"
    """Time after which a replica starts without its missing nodes."""
    BACK_OFF = "back-off"
    """Time at which a replica that fails repeatedly restarts."""
    SCALE_UP = "scale-up"
    """Time at which a replica may add nodes."""
    EXIT = "exit"
    """Deadline for the ranks of a replica to exit on request."""
    UPDATE = "update"
    """Time at which ranks are stopped for an update, unless they restart before."""

    def key(self, index: int) -> str:
        """The key of this timer for a node or replica."""
        return f"{self.value}:{index}"

    @classmethod
    def parse(cls, key: str) -> tuple[Timer, int]:
        """The timer of a key, and its node or replica."""
        kind, _, index = key.partition(":")
        return cls(kind), int(index)


class NodePhase(StrEnum):
    """State of a node slot."""

    REQUESTED = "requested"
    """Requested from the target, which has not answered."""
    UNAVAILABLE = "unavailable"
    """The target cannot create it now, and will as soon as it can."""
    CREATED = "created"
    """It exists; its agent has not connected."""
    JOINED = "joined"
    """Its agent is connected."""
    DISCONNECTED = "disconnected"
    """Its agent's connection closed; it has until its deadline to reconnect."""


class CheckPhase(StrEnum):
    """State of a node's checks before ranks start on it."""

    NONE = "none"
    """Not requested: the job wants none, or the node has not joined."""
    PENDING = "pending"
    """Requested; the node gets no ranks."""
    PASSED = "passed"
    FAILED = "failed"
    """It leaves when the others have reported."""


class ProbePhase(StrEnum):
    """State of a node's probes before ranks start on it."""

    NONE = "none"
    RUNNING = "running"
    """It gets no ranks until the probe has ended on it."""
    PASSED = "passed"


class ReplicaPhase(StrEnum):
    """State of a replica."""

    GATHERING = "gathering"
    """Waiting until all of its nodes have joined and stopped their ranks."""
    RUNNING = "running"
    """Its ranks are starting or running."""
    HANG_SUSPECTED = "hang-suspected"
    """A hang was reported; reports of the other ranks are pending."""
    STOPPING = "stopping"
    """Its ranks are being stopped."""
    DONE = "done"
    """All ranks have ended and none will restart."""


class NodeState(Struct, frozen=True, kw_only=True):
    """One node slot."""

    node: int
    replica: int | None
    """None for a standby."""
    node_rank: int
    """Its index among the nodes, which determines global ranks: a replacement has the same ranks."""
    generation: int = 0
    phase: NodePhase = NodePhase.REQUESTED
    since: float = 0.0
    """Unix seconds at which a missing node was requested or created."""
    reason: str = ""
    """Why it is missing."""
    join_timed_out: bool = False
    """Whether a node in this slot did not join in time, and none has since."""
    maybe_alive: bool = False
    """Whether ranks of the lost node may still live: the target has yet to report it gone."""
    evicted: bool = False
    """Whether the queue or the cluster evicts this node."""
    incarnation: str = ""
    connected_at: float = 0.0
    """Unix seconds at which its agent connected last."""
    address: str = ""
    port: int = 0
    machine: str = ""
    """The target's name of its machine, if it has one."""
    check: CheckPhase = CheckPhase.NONE
    facts: Mapping[str, str] = field(default_factory=dict[str, str])
    """What its checks found that has to be the same on all nodes."""
    probe: ProbePhase = ProbePhase.NONE
    replays: bool = False
    """Whether it repeats steps in a replay; it gets no ranks until that has ended on it."""
    checks: int = 0
    """Times that it was to be checked anew."""
    corruptions: tuple[float, ...] = ()
    """When one of its ranks differed from those that must be equal to it."""
    link_losses: tuple[float, ...] = ()
    """Unix seconds at which an adapter of it lost its link lately."""
    evidence: MachineEvidence | None = None
    """What its failed checks say against its machine."""
    failed_checks: int = 0
    """Nodes in this slot that failed their checks, since the last one that passed."""
    has_processes: bool = False
    """Whether processes of its replica's current attempt may exist on it."""

    @property
    def node_id(self) -> NodeId:
        return NodeId(node=self.node, generation=self.generation)

    @property
    def machine_id(self) -> str:
        """Its machine's name, or else its own, which changes with each replacement."""
        return self.machine or f"node{self.node}.{self.generation}"

    @property
    def is_missing(self) -> bool:
        """Whether the slot has no node, not even a disconnected one."""
        return self.phase in (NodePhase.REQUESTED, NodePhase.UNAVAILABLE, NodePhase.CREATED)

    @property
    def is_expected(self) -> bool:
        """Whether it is worth waiting for: it will soon join or be missing for good."""
        on_its_way = self.phase in (NodePhase.REQUESTED, NodePhase.CREATED) and not self.join_timed_out
        tested = self.check is CheckPhase.PENDING or self.probe is ProbePhase.RUNNING or self.replays
        return on_its_way or self.phase is NodePhase.DISCONNECTED or tested

    @property
    def is_ready(self) -> bool:
        joined = self.phase is NodePhase.JOINED and not self.has_processes
        tested = self.check not in (CheckPhase.PENDING, CheckPhase.FAILED) and self.probe is not ProbePhase.RUNNING
        return joined and tested and not self.replays


class StepRate(Struct, frozen=True, kw_only=True):
    """Measurements of a replica's steps."""

    step_s: float | None = None
    """Seconds per step, weighted towards recent steps."""
    total_steps: int | None = None
    global_batch: int | None = None
    """Samples per step, if ranks take their micro-batches from a Session."""


class Update(Struct, frozen=True, kw_only=True):
    """Other code that ranks are to run; ends once the code has made some steps or is rolled back."""

    code: CodeArchive | None
    """None for code in place."""
    due: float | None
    """Unix seconds at which ranks are stopped for it; None waits for a restart."""
    fetched_by: NodeSet = NO_NODES
    """Nodes that have the code."""

    def is_fetched_by(self, nodes: Iterable[int]) -> bool:
        """Whether all of these nodes have its code."""
        return self.code is None or all(node in self.fetched_by for node in nodes)


class Probe(Struct, frozen=True, kw_only=True):
    """A probe of some of a replica's nodes, in the order of its ranks."""

    number: int
    members: tuple[int, ...]
    new: NodeSet
    """Those of the members that no probe has passed yet."""
    reports: tuple[NodeProbed, ...] = ()
    """Of the nodes on which it has ended."""
    stopped: bool = False
    """Whether it lacks a node, so that its result is of no use."""


class Replay(Struct, frozen=True, kw_only=True):
    """A replay of a replica's last steps on groups of its nodes, the first or the second of a pair."""

    number: int
    members: tuple[int, ...]
    """The nodes of both, in the order of their ranks."""
    until_step: int
    """The last step to repeat."""
    first: Digests | None = None
    """Of the groups of the first replay; None in the first."""
    reports: tuple[NodeReplayed, ...] = ()
    """Of the nodes on which it has ended."""
    stopped: bool = False
    """Whether it lacks a node, so that its result is of no use."""

    @property
    def groups(self) -> tuple[Group, ...]:
        planned = plan(self.members)
        return planned.first if self.first is None else planned.second


class ReplicaState(Struct, frozen=True, kw_only=True):
    """One failure domain: the ranks that must restart together."""

    replica: int
    slots: NodeSet = NO_NODES
    """Its node slots."""
    phase: ReplicaPhase = ReplicaPhase.GATHERING
    attempt: int = -1
    """The current attempt, from 0; -1 before the first."""
    members: tuple[int, ...] = ()
    """The attempt's nodes, in the order of their ranks."""
    started_at: float = 0.0
    master_addr: str = ""
    master_port: int = 0
    highest_step: int = 0
    """Highest step ever committed."""
    attempt_steps: int = 0
    """Number of steps committed in the current attempt."""
    step_rate: StepRate = StepRate()
    exit_requested: bool = False
    """Whether its ranks were requested to exit after a checkpoint, so that it can resume with more nodes."""
    transfers_state: bool = False
    """Whether they keep their state in memory instead, for the same ranks with other code."""
    code: CodeArchive | None = None
    """The code of the current attempt; None for code in place."""
    draining: bool = False
    """Whether its ranks are being stopped but may still take a step, since their node is only about to go."""
    rollout_base_step: int | None = None
    """The step after which it runs code of an update that is on trial."""
    scale_ups: tuple[float, ...] = ()
    """Unix seconds at which it stopped to add nodes, oldest first."""
    succeeded: RankSet = NO_RANKS
    """Ranks of this attempt that exited by themselves with code 0."""
    rank_failures: tuple[RankExited, ...] = ()
    """Failed exits of this attempt's ranks, in order of arrival."""
    reported: RankSet = NO_RANKS
    """Ranks of this attempt that were reported hung or gave up waiting for others."""
    hangs: tuple[RankHung, ...] = ()
    silent: tuple[RankHung, ...] = ()
    """Reports of ranks that do nothing, which are hung only if all are; not of all of `silent_ranks` in a large run."""
    silent_ranks: RankSet = NO_RANKS
    """Ranks that have reported so since any of them made a step."""
    silent_since: float = 0.0
    """Unix seconds of the first of these reports."""
    node_failures: tuple[Failure, ...] = ()
    """Nodes lost in this attempt."""
    observed: tuple[Failure, ...] = ()
    """Failures that agents or detectors saw in this attempt while its ranks ran."""
    watched: frozenset[str] = frozenset()
    """Codes of findings of running ranks that were reported in this attempt."""
    drilled: NodeSet = NO_NODES
    """Node slots that got a fault on purpose in this attempt, other than that of a device."""
    lost_slots: NodeSet = NO_NODES
    """Node slots lost since its last attempt ran: together they are one disruption."""
    probe: Probe | None = None
    probes: int = 0
    """Number of probes so far."""
    examined: bool = False
    """Whether its nodes are checked and probed before its next attempt, whatever the job says: a failure lacks a
    culprit."""
    replay: Replay | None = None
    replays: int = 0
    """Number of replays so far."""
    replay_until: int | None = None
    """The last step that its nodes are to repeat before its next attempt; None without a replay."""
    checkpoints: tuple[int, ...] = ()
    """Steps of its latest checkpoints, oldest first."""
    checkpoints_back: int = 0
    """Newest checkpoints that its next attempt sets aside."""
    compared: tuple[int, ...] = ()
    """The nodes that were compared with each other last."""
    probed_bytes_s: Mapping[frozenset[NodeId], float] = field(default_factory=dict[frozenset[NodeId], float])
    """The rate between two of its nodes in the latest probe of both."""
    fabric_findings: frozenset[str] = frozenset()
    """Codes of findings on the fabric that were reported in this attempt: one node speaks for all."""
    slow_links: Mapping[tuple[int, int], float] = field(default_factory=dict[tuple[int, int], float])
    """Share of its usual rate with which a link between two nodes was reported in this attempt."""
    fabric_nodes: FabricNodes = field(default_factory=dict[tuple[str, int], Reports])
    """What each node has reported of the fabric in this attempt."""
    sockets: Mapping[int, SocketsObserved] = field(default_factory=dict[int, SocketsObserved])
    """The latest report of each of its nodes on the ranks' sockets in this attempt."""
    failures: tuple[Failure, ...] = ()
    """What ended each earlier attempt, oldest first."""

    @property
    def is_running(self) -> bool:
        return self.phase in (ReplicaPhase.RUNNING, ReplicaPhase.HANG_SUSPECTED)

    @property
    def has_stepped(self) -> bool:
        """Whether it has committed a step in the current attempt."""
        return self.attempt_steps > 0


class Ending(Struct, frozen=True, kw_only=True):
    """The decision to end the run."""

    outcome: Outcome
    exit_code: int
    reason: str
    grace_s: float = 0.0


class State(Struct, frozen=True, kw_only=True):
    """All that a controller knows about its run; the fold of its log."""

    nodes: tuple[NodeState, ...] = ()
    nodes_with_processes: NodeSet = NO_NODES
    """Nodes with `has_processes`: read for each message, where scanning all nodes would be quadratic."""
    ready_nodes: NodeSet = NO_NODES
    """Nodes with `is_ready`."""
    ready_standbys: NodeSet = NO_NODES
    """Standbys that reported ready."""
    replicas: tuple[ReplicaState, ...] = ()
    timers: Mapping[str, float] = field(default_factory=dict[str, float])
    """Unix seconds at which each timer expires, by key."""
    pending_faults: tuple[FaultRequested, ...] = ()
    """Faults that wait: the controller's for a step, others for an agent's report that they were injected."""
    code: CodeArchive | None = None
    """The code of ranks without an update; None for code in place."""
    update: Update | None = None
    was_updated: bool = False
    """Whether ranks run the code of an update that has ended its trial, and have not gone back from it."""
    code_before: CodeArchive | None = None
    """The code before that update; None for code in place."""
    cordoned: tuple[NodeId, ...] = ()
    """Nodes whose machine is cordoned by a drill."""
    quorum_lost: bool = False
    """Whether it was reported that too few replicas run for a step, and not yet that enough do again."""
    avoided: tuple[tuple[NodeId, str], ...] = ()
    """Failed nodes whose machines are not to be used again, each with its machine."""
    ending: Ending | None = None
    finished: bool = False
    longest_first_step_s: float = 0.0
    """Longest seconds from an attempt's start to the end of its first step; 0 before any has completed one."""

    @property
    def done(self) -> bool:
        """Whether no rank is left and none will start."""
        return all(replica.phase is ReplicaPhase.DONE for replica in self.replicas)

    @property
    def shutting_down(self) -> bool:
        """Whether only the shutdown is left: agents exit, and the target removes every node."""
        return self.ending is not None and self.done

    @property
    def has_replicas(self) -> bool:
        """Whether there are several replicas, each of which can fail alone."""
        return len(self.replicas) > 1

    @property
    def running_replicas(self) -> tuple[ReplicaState, ...]:
        """Replicas whose ranks run."""
        return tuple(replica for replica in self.replicas if replica.is_running)

    @property
    def rendezvous_by_replica(self) -> dict[int, str]:
        """Rendezvous address of each replica's attempt; empty for a replica without running ranks."""
        return {
            replica.replica: f"{replica.master_addr}:{replica.master_port}" if self.may_step(replica) else ""
            for replica in self.replicas
        }

    def may_step(self, replica: ReplicaState) -> bool:
        """Whether a replica's ranks may take a step: they run, or have a grace period to end after one."""
        draining = replica.draining or (self.ending is not None and self.ending.grace_s > 0)
        return replica.is_running or (draining and replica.phase is ReplicaPhase.STOPPING)

    @property
    def training_complete(self) -> bool:
        """Whether a replica has finished by itself: its state is the result of the training."""
        return self.ending is None and any(replica.phase is ReplicaPhase.DONE for replica in self.replicas)

    def with_nodes(self, changed: Iterable[NodeState]) -> State:
        """Replace many nodes in one pass."""
        nodes, replaced = list(self.nodes), tuple(changed)
        for node in replaced:
            nodes[node.node] = node
        others = NodeSet.of(node.node for node in replaced)
        busy = NodeSet.of(node.node for node in replaced if node.has_processes)
        ready = NodeSet.of(node.node for node in replaced if node.is_ready)
        return replace(
            self,
            nodes=tuple(nodes),
            nodes_with_processes=self.nodes_with_processes - others | busy,
            ready_nodes=self.ready_nodes - others | ready,
        )

    def with_replica(self, replica: ReplicaState) -> State:
        index = replica.replica
        return replace(self, replicas=(*self.replicas[:index], replica, *self.replicas[index + 1 :]))

    def with_timer(self, key: str, at: float | None) -> State:
        """Set a timer, or delete it with None."""
        if self.timers.get(key) == at:
            return self
        deadlines = dict(self.timers)
        if at is None:
            del deadlines[key]
        else:
            deadlines[key] = at
        return replace(self, timers=deadlines)

    def nodes_of(self, replica: int) -> tuple[NodeState, ...]:
        """Its slots, filled or not, in the order of their ranks."""
        slots = (self.nodes[slot] for slot in self.replicas[replica].slots)
        return tuple(sorted(slots, key=lambda node: node.node_rank))

    def has_ranks(self, replica: int) -> bool:
        """Whether any node of a replica may have processes of its attempt."""
        return bool(self.nodes_with_processes & self.replicas[replica].slots)

    def busy_nodes_of(self, replica: int) -> tuple[int, ...]:
        """Its nodes that may have ranks, in the order of those ranks."""
        return tuple(node.node for node in self.nodes_of(replica) if node.has_processes)

    def node_at(self, replica: int, node_rank: int) -> int | None:
        """The node at a node rank of a replica's current attempt; None if the attempt has fewer nodes."""
        members = self.replicas[replica].members
        return members[node_rank] if node_rank < len(members) else None
