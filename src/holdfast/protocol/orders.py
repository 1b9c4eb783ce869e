"""Messages between a controller and its agents other than events: orders to agents, step progress to the controller.

Both sides ignore unknown fields. Every order can be repeated without harm.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from holdfast.events import AgentEvent, encoding
from holdfast.events.requests import FaultAction, FaultTarget
from holdfast.protocol.node_requirements import NodeRequirements
from holdfast.protocol.phase_times import PhaseTimes
from holdfast.protocol.validation import ValidatingDecoder

PROTOCOL = 3
"""Version of this protocol; docs/architecture.md says what raises it."""
OLDEST_PROTOCOL = 3
"""Oldest version that this release speaks too: the one before, as soon as a release has spoken that one."""


class Order(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="order"):
    """An order from the controller to an agent."""


class RankLaunch(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One process to start; `env` overrides the node's environment, which overrides `env_defaults`."""

    rank: int
    argv: tuple[str, ...]
    env: dict[str, str]
    cwd: str
    """Absolute, or relative to the folder of the shipped code."""
    log: str
    """File for the rank's output."""
    rank_count: int = 1
    """Number of ranks that this process starts itself if it is a launcher."""
    env_defaults: dict[str, str] = {}
    files: dict[str, str] = {}
    """Files to write before it starts: path and text."""
    signal_children: bool = False
    """Whether SIGTERM goes to its child processes instead, because it would not let them exit cleanly."""
    prewarm: bool = False
    """Whether its next start may be a fork of a zygote."""


MIN_PROGRESS_INTERVAL_S = 0.5
"""Minimum seconds between two progress messages of a node, unless there are very many nodes."""

MAX_PROGRESS_PER_S = 256
"""Maximum progress messages per second that a controller receives from all nodes: a tenth of a core."""


def progress_interval_s(nodes: int) -> float:
    """Seconds for which each of so many nodes gathers steps before it sends them."""
    return max(MIN_PROGRESS_INTERVAL_S, nodes / MAX_PROGRESS_PER_S)


class StartRanks(Order, frozen=True, kw_only=True, tag="start-ranks"):
    """Start these ranks of an attempt, unless they have started already."""

    replica: int
    attempt: int
    ranks: tuple[RankLaunch, ...]
    env: dict[str, str] = {}
    """Environment of all ranks; a rank's `env` overrides it."""
    progress_interval_s: float = MIN_PROGRESS_INTERVAL_S
    """Minimum seconds between progress messages; a step is sent immediately after a longer silence."""
    step_timeout_s: float | Literal["auto"] | None = None
    replica_count: int = 1
    """Number of replicas of the run; of several, the others wait for one that hangs, so it is stopped alone."""
    exit_timeout_s: float | None = None
    """Seconds after which the agent ends a rank whose program has ended but whose threads keep the process alive."""
    code_digest: str = ""
    """Digest of the archive to download from the controller and unpack first; empty if no code is shipped."""
    log_max_bytes: int | None = None
    """Maximum bytes kept of each rank's output; None keeps all."""
    fabric: str = ""
    """The run's fabric, as the catalogue names it."""
    nccl_logs: bool = False
    """Whether ranks log NCCL's set-up for the agent, which then reports what carries their traffic."""
    secret_names: tuple[str, ...] = ()
    """Variables whose values are the job's secrets."""
    interfaces: tuple[str, ...] = ()
    """The values by which the run names interfaces for data, in the syntax of NCCL_SOCKET_IFNAME."""
    watch_devices: bool = True
    """Whether the agent looks for failed devices from now on."""
    relays_quorum: bool = False
    """Whether ranks reach the quorum service through the agent (agent/quorum_relay.py)."""

    @property
    def launches(self) -> tuple[RankLaunch, ...]:
        """Each rank's launch with the shared environment merged in."""
        return tuple(msgspec.structs.replace(rank, env=self.env | rank.env) for rank in self.ranks)

    @property
    def world_size(self) -> int:
        """Number of the replica's ranks, on all nodes."""
        return int((self.env | self.ranks[0].env if self.ranks else self.env).get("WORLD_SIZE", "1"))


class PrepareStandby(Order, frozen=True, kw_only=True, tag="prepare-standby"):
    """Do everything that precedes a start, for ranks that this standby node may have to start."""

    start: StartRanks
    """The start of any node of a replica; which node it will replace is not known."""


class CheckNode(Order, frozen=True, kw_only=True, tag="check-node"):
    """Check this node and report it (`NodeChecked`), or report the result of the checks that have ended."""

    wanted: NodeRequirements
    deadline_s: float
    number: int = 0
    """Greater for a check that is to be made anew."""


class ProbeNode(Order, frozen=True, kw_only=True, tag="probe-node"):
    """Run the probe's ranks of this node, and report their end (`NodeProbed`); a known number is reported again."""

    replica: int
    number: int
    start: StartRanks
    """The places and the environments of the ranks; their commands are replaced by the probe's."""
    wanted: NodeRequirements
    nodes: tuple[int, ...]
    deadline_s: float
    python: str
    """The interpreter of the job's command; empty means the agent's own."""


class StopProbe(Order, frozen=True, kw_only=True, tag="stop-probe"):
    """End the probe of this number, which lacks a node, and report that; or never start it."""

    replica: int
    number: int
    nodes: tuple[int, ...]


class ReplayNode(Order, frozen=True, kw_only=True, tag="replay-node"):
    """Repeat steps with this node's ranks of a group, and report the end (`NodeReplayed`); as for `ProbeNode`."""

    replica: int
    number: int
    start: StartRanks
    """The ranks of this node in its group."""
    nodes: tuple[int, ...]
    """The group, in the order of its ranks."""
    until_step: int
    """The last step to repeat."""
    deadline_s: float


class StopReplay(Order, frozen=True, kw_only=True, tag="stop-replay"):
    """End the replay of this number, whose group lacks a node, and report that; or never start it."""

    replica: int
    number: int


class StopRanks(Order, frozen=True, kw_only=True, tag="stop-ranks"):
    """Stop every rank up to this attempt: SIGTERM, `grace_s`, SIGKILL; without a grace period, SIGKILL immediately."""

    replica: int
    attempt: int
    grace_s: float = 0.0
    all_replicas: bool = False
    """Whether all replicas are to stop; those that can do so stop after the same step."""


class InjectFault(Order, frozen=True, kw_only=True, tag="inject-fault"):
    """Inject a fault, immediately or as soon as the target's ranks have finished `at_step`."""

    requested_at: float
    """Identifies the request, so that one sent twice is executed once."""
    target: FaultTarget
    rank: int = -1
    """Rank within the replica, for a fault in one rank."""
    index: int = -1
    """The requested number: a global rank over all replicas, or a node."""
    action: FaultAction = FaultAction.KILL
    at_step: int | None = None
    for_s: float | None = None
    amount: float | None = None


class TakeCheckpoint(Order, frozen=True, kw_only=True, tag="take-checkpoint"):
    """Request a checkpoint from every rank at its next step."""


class ProfileSteps(Order, frozen=True, kw_only=True, tag="profile-steps"):
    """Request a step profile from every rank."""

    ranks: tuple[int, ...] = ()
    """Global ranks that keep a trace; empty: some ranks of replica 0 (train/metrics/kept_traces.py)."""
    memory: bool = False
    """Whether they also keep a snapshot of their GPU memory."""


class DumpStacks(Order, frozen=True, kw_only=True, tag="dump-stacks"):
    """Dump the stacks of every rank and report them: once (`StacksDumped`), or in several rounds (`StackRound`)."""

    requested_at: float = 0.0
    """Identifies a request for several rounds, so that one sent twice is executed once."""
    rounds: int = 1
    interval_s: float = 0.0
    """Seconds from the beginning of a round to that of the next."""
    native: bool = False
    """Whether a single dump has native frames too; an older agent ignores this and reports Python frames."""


class ReadMonitors(Order, frozen=True, kw_only=True, tag="read-monitors"):
    """Report what the monitors of the node last read (`NodeReadings`); sent only while the controller is scraped."""


class CheckpointAndExit(Order, frozen=True, kw_only=True, tag="checkpoint-and-exit"):
    """Request that every rank takes a checkpoint at its next step and exits."""

    reason: str = ""
    transfer_state: bool = False
    """Keep the state in the node's memory instead of a checkpoint."""


class FetchCode(Order, frozen=True, kw_only=True, tag="fetch-code"):
    """Download this code before ranks start with it; the agent reports when it is there."""

    digest: str


class FreeState(Order, frozen=True, kw_only=True, tag="free-state"):
    """Free the memory that holds the state of a replica's ranks."""

    replica: int


class ReportSilentRanks(Order, frozen=True, kw_only=True, tag="report-silent-ranks"):
    """Report the ranks of an attempt that have yet to send a hello: other ranks are waiting, perhaps for these."""

    replica: int
    attempt: int
    all_ranks: bool = False
    """Also report ranks that have sent a hello: another rank gave up waiting, perhaps for one of these."""


class AnnounceReplicaDown(Order, frozen=True, kw_only=True, tag="announce-replica-down"):
    """Notify the ranks of other replicas that this replica's attempt is over."""

    replica: int
    attempt: int


class AnnounceReplicaStarting(Order, frozen=True, kw_only=True, tag="announce-replica-starting"):
    """Notify the ranks of other replicas that this replica's ranks are starting."""

    replica: int
    attempt: int


class Shutdown(Order, frozen=True, kw_only=True, tag="shutdown"):
    """The run is over: stop all remaining processes and exit."""


class ReplicateLog(Order, frozen=True, kw_only=True, tag="replicate-log"):
    """Write this part of the run's log at this byte offset, in place of what follows there."""

    offset: int
    data: bytes
    signature: str = ""
    """Signature of the whole log so far; empty if more of it follows."""


class Acknowledge(Order, frozen=True, kw_only=True, tag="ack"):
    """All messages of the agent up to `seq` are in the log."""

    seq: int


AnyOrder = (
    StartRanks
    | PrepareStandby
    | CheckNode
    | ProbeNode
    | StopProbe
    | ReplayNode
    | StopReplay
    | StopRanks
    | InjectFault
    | TakeCheckpoint
    | ProfileSteps
    | DumpStacks
    | ReadMonitors
    | CheckpointAndExit
    | FetchCode
    | FreeState
    | ReportSilentRanks
    | AnnounceReplicaDown
    | AnnounceReplicaStarting
    | Shutdown
    | ReplicateLog
    | Acknowledge
)


class NodeStep(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """All ranks of a node finished a step; times as in `StepCommitted`."""

    step: int
    started: float
    ended: float
    checkpoint_s: float = 0.0
    metrics: dict[str, float] = {}
    step_clock: bool = False
    """As in `StepCommitted`."""


class Progress(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type", tag="progress"):
    """Steps that a node has finished since its last message; `seq` shares the agent's counter with its events."""

    node: int
    replica: int
    attempt: int
    steps: tuple[NodeStep, ...]
    phases: tuple[PhaseTimes, ...] = ()
    """How ranks of the node spent their last steps, one for each rank."""
    source: str = ""
    seq: int = 0


class RankStack(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank's training thread did at one moment, innermost frame first; empty if it is not known."""

    rank: int
    frames: tuple[str, ...]


class StackRound(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type", tag="stack-round"):
    """One dump of all ranks of a node, of several that a request wants; compared, and not kept in the log."""

    node: int
    replica: int
    attempt: int
    requested_at: float
    number: int
    """From 0."""
    rounds: int
    stacks: tuple[RankStack, ...]
    source: str = ""
    seq: int = 0


class NodeReadings(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type", tag="node-readings"
):
    """What the monitors of a node last read, as the numbers of watch/node_values.py; not kept in the log."""

    node: int
    values: dict[str, float]
    source: str = ""
    seq: int = 0


class UnknownMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A message of an agent of a later version, of a kind or with a value that this one does not know."""

    type: str
    source: str = ""
    seq: int = 0


class ProtocolOffer(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="agent-connected"):
    """The protocol versions that an agent speaks, as its hello (`AgentConnected`) offers them."""

    protocol: int = 1
    oldest_protocol: int = 0

    @property
    def spoken(self) -> bool:
        """Whether this release speaks one of them."""
        return (self.oldest_protocol or self.protocol) <= PROTOCOL and self.protocol >= OLDEST_PROTOCOL

    def __str__(self) -> str:
        return versions_text(self.oldest_protocol or self.protocol, self.protocol)


def versions_text(oldest: int, newest: int) -> str:
    """A range of versions: `3`, or `3 and 4`."""
    return " and ".join(map(str, sorted({oldest, newest})))


AgentMessage = AgentEvent | Progress | StackRound | NodeReadings

encode = encoding.encode
order_decoder = msgspec.json.Decoder(AnyOrder)
agent_message_decoder: ValidatingDecoder[AgentMessage] = ValidatingDecoder(AgentMessage)


_unknown_decoder: ValidatingDecoder[UnknownMessage] = ValidatingDecoder(UnknownMessage)
_offer_decoder = msgspec.json.Decoder(ProtocolOffer)


def decode_offer(hello: bytes) -> ProtocolOffer:
    """The versions that a hello offers, whatever else it has; raises msgspec.MsgspecError and UnicodeDecodeError."""
    return _offer_decoder.decode(hello)


def decode_frame(frame: bytes, *, from_later: bool = False) -> list[AgentMessage | UnknownMessage]:
    """Decode an agent's frame: one message per line, at least one.

    An agent `from_later`, of a later version than this, may send what is unknown here.
    """
    return [_decode_message(line, from_later=from_later) for line in frame.split(b"\n")]


def _decode_message(line: bytes, *, from_later: bool) -> AgentMessage | UnknownMessage:
    try:
        return agent_message_decoder.decode(line)
    except msgspec.ValidationError:
        if not from_later:
            raise
        return _unknown_decoder.decode(line)
