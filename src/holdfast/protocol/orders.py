"""Owns what travels between a controller and its agents beside events: orders down, greetings and progress up.

Both sides ignore fields they don't know. An order can be repeated without harm.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from holdfast.events import AgentEvent, encoding
from holdfast.events.requests import FaultAction, FaultTarget
from holdfast.protocol.validation import ValidatingDecoder

PROTOCOL = 3
"""Version of this protocol; an agent of another version is refused."""


class Order(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="order"):
    """Something a controller tells an agent."""


class RankLaunch(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One process to start; `env` goes over the node's own environment, and that over `defaults`."""

    rank: int
    argv: tuple[str, ...]
    env: dict[str, str]
    cwd: str
    """Absolute, or relative to the folder of the shipped code."""
    log: str
    """File that takes the rank's output."""
    rank_count: int = 1
    """How many ranks this one process stands for, when it is a launcher that starts them itself."""
    env_defaults: dict[str, str] = {}
    files: dict[str, str] = {}
    """Files to write before it starts: path and text."""
    signal_children: bool = False
    """Whether SIGTERM goes to the processes it started in its place, because it would not let them end in peace."""
    prewarm: bool = False
    """Whether its next start may be a fork of a process that has its imports done."""


MIN_PROGRESS_INTERVAL_S = 0.5
"""Least time between two words of a node about its steps, unless there are very many nodes."""

MAX_PROGRESS_PER_S = 256
"""Most words about steps that a controller hears in a second, whatever the number of nodes: a tenth of a core."""


def progress_interval_s(nodes: int) -> float:
    """How long a node of so many gathers its steps before it speaks of them again."""
    return max(MIN_PROGRESS_INTERVAL_S, nodes / MAX_PROGRESS_PER_S)


class StartRanks(Order, frozen=True, kw_only=True, tag="start-ranks"):
    """Start these ranks of an attempt, unless they were started already."""

    replica: int
    attempt: int
    ranks: tuple[RankLaunch, ...]
    env: dict[str, str] = {}
    """What all of them are given alike; a rank's own goes over it."""
    progress_interval_s: float = MIN_PROGRESS_INTERVAL_S
    """Progress is said at once when nothing was said for this long, else gathered until then."""
    step_timeout_s: float | Literal["auto"] | None = None
    exit_timeout_s: float | None = None
    """A rank whose program has ended is ended so long after it, where threads keep its process alive."""
    code_digest: str = ""
    """Digest of the archive to be pulled from the controller and unpacked first; empty when nothing is shipped."""
    log_max_bytes: int | None = None
    """How much is kept of what each rank writes; none means all."""

    @property
    def launches(self) -> tuple[RankLaunch, ...]:
        """What each rank is started with, whole."""
        return tuple(msgspec.structs.replace(rank, env=self.env | rank.env) for rank in self.ranks)


class PrepareStandby(Order, frozen=True, kw_only=True, tag="prepare-standby"):
    """Do all that comes before a start, for ranks that this node may have to start at once one day."""

    start: StartRanks
    """The start of some place in a replica; which one it will be is not known."""


class StopRanks(Order, frozen=True, kw_only=True, tag="stop-ranks"):
    """Stop every rank up to and including this attempt: SIGTERM, `grace_s`, SIGKILL; no grace means SIGKILL at once."""

    replica: int
    attempt: int
    grace_s: float = 0.0
    all_replicas: bool = False
    """Whether all replicas are to stop: those that can do so after the same step."""


class InjectFault(Order, frozen=True, kw_only=True, tag="inject-fault"):
    """Inject a fault, at once or as soon as the target's ranks have passed `at_step`."""

    requested_at: float
    """Names the drill, so that one sent twice is done once."""
    target: FaultTarget
    rank: int = -1
    """Of the replica, where it is done to one."""
    index: int = -1
    """The number that was asked for: of all ranks of all replicas, or of a node."""
    action: FaultAction = FaultAction.KILL
    at_step: int | None = None
    for_s: float | None = None
    amount: float | None = None


class TakeCheckpoint(Order, frozen=True, kw_only=True, tag="take-checkpoint"):
    """Ask every rank to checkpoint at its next step."""


class ProfileSteps(Order, frozen=True, kw_only=True, tag="profile-steps"):
    """Ask every rank where the time of its next steps goes."""


class DumpStacks(Order, frozen=True, kw_only=True, tag="dump-stacks"):
    """Take the stacks of every rank and say where it stands."""


class CheckpointAndExit(Order, frozen=True, kw_only=True, tag="checkpoint-and-exit"):
    """Ask every rank to checkpoint at its next step, then to leave."""

    reason: str = ""
    transfer_state: bool = False
    """Leave the state in the node's memory instead of a checkpoint."""


class FetchCode(Order, frozen=True, kw_only=True, tag="fetch-code"):
    """Have this code before ranks are started with it; it is said when it is there."""

    digest: str


class FreeState(Order, frozen=True, kw_only=True, tag="free-state"):
    """Give back the memory in which a replica's ranks left their state."""

    replica: int


class ReportSilentRanks(Order, frozen=True, kw_only=True, tag="report-silent-ranks"):
    """Report the ranks of an attempt that have yet to say hello: others wait in vain, and may wait for these."""

    replica: int
    attempt: int
    all_ranks: bool = False
    """Report those that have spoken too: another one has given up waiting, and may have waited for these."""


class AnnounceReplicaDown(Order, frozen=True, kw_only=True, tag="announce-replica-down"):
    """Tell the ranks of other replicas that this one's attempt is over."""

    replica: int
    attempt: int


class AnnounceReplicaStarting(Order, frozen=True, kw_only=True, tag="announce-replica-starting"):
    """Tell the ranks of other replicas that this one's ranks are starting."""

    replica: int
    attempt: int


class Shutdown(Order, frozen=True, kw_only=True, tag="shutdown"):
    """The run is over: stop whatever is left and exit."""


class ReplicateLog(Order, frozen=True, kw_only=True, tag="replicate-log"):
    """Have this part of the run's log from this byte on, in place of whatever was there."""

    offset: int
    data: bytes
    signature: str = ""
    """Of all of the log so far; empty where more of it follows."""


class Acknowledge(Order, frozen=True, kw_only=True, tag="ack"):
    """Everything the agent sent up to `seq` is safe in the log."""

    seq: int


AnyOrder = (
    StartRanks
    | PrepareStandby
    | StopRanks
    | InjectFault
    | TakeCheckpoint
    | ProfileSteps
    | DumpStacks
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
    """All of a node's ranks finished a step; times as in `StepCommitted`."""

    step: int
    started: float
    ended: float
    checkpoint_s: float = 0.0
    metrics: dict[str, float] = {}


class Progress(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type", tag="progress"):
    """Steps a node has passed since its last word; `seq` shares the agent's one count with its events."""

    node: int
    replica: int
    attempt: int
    steps: tuple[NodeStep, ...]
    source: str = ""
    seq: int = 0


AgentMessage = AgentEvent | Progress

encode = encoding.encode
order_decoder = msgspec.json.Decoder(AnyOrder)
agent_message_decoder: ValidatingDecoder[AgentMessage] = ValidatingDecoder(AgentMessage)


def decode_frame(frame: bytes) -> list[AgentMessage]:
    """What an agent says in one frame: a message a line, one at least."""
    return [agent_message_decoder.decode(line) for line in frame.split(b"\n")]
