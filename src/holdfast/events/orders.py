"""Owns what travels between a controller and its agents beside events: orders down, greetings and progress up.

Both sides ignore fields they don't know. An order can be repeated without harm.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from holdfast.events import AgentEvent, encoding
from holdfast.events.bounds import Decoder
from holdfast.events.operator import DrillAction, DrillTarget

PROTOCOL = 2
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
    ranks: int = 1
    """How many ranks this one process stands for, when it is a launcher that starts them itself."""
    defaults: dict[str, str] = {}
    files: dict[str, str] = {}
    """Files to write before it starts: path and text."""
    stop_below: bool = False
    """Whether SIGTERM goes to the processes it started in its place, because it would not let them end in peace."""
    warm: bool = False
    """Whether its next start may be a fork of a process that has its imports done."""


PROGRESS_S = 0.5
"""Least time between two words of a node about its steps, unless there are very many nodes."""

PROGRESS_PER_S = 256
"""Most words about steps that a controller hears in a second, whatever the number of nodes: a tenth of a core."""


def progress_interval_s(nodes: int) -> float:
    """How long a node of so many gathers its steps before it speaks of them again."""
    return max(PROGRESS_S, nodes / PROGRESS_PER_S)


class StartRanks(Order, frozen=True, kw_only=True, tag="start-ranks"):
    """Start these ranks of an attempt, unless they were started already."""

    replica: int
    attempt: int
    ranks: tuple[RankLaunch, ...]
    env: dict[str, str] = {}
    """What all of them are given alike; a rank's own goes over it."""
    progress_s: float = PROGRESS_S
    """Progress is said at once when nothing was said for this long, else gathered until then."""
    step_deadline_s: float | Literal["auto"] | None = None
    exit_deadline_s: float | None = None
    """A rank whose program has ended is ended so long after it, where threads keep its process alive."""
    code: str = ""
    """Digest of the archive to be pulled from the controller and unpacked first; empty when nothing is shipped."""
    log_max_bytes: int | None = None
    """How much is kept of what each rank writes; none means all."""

    @property
    def launches(self) -> tuple[RankLaunch, ...]:
        """What each rank is started with, whole."""
        return tuple(msgspec.structs.replace(rank, env=self.env | rank.env) for rank in self.ranks)


class GetReady(Order, frozen=True, kw_only=True, tag="get-ready"):
    """Do all that comes before a start, for ranks that this node may have to start at once one day."""

    start: StartRanks
    """The start of some place in a replica; which one it will be is not known."""


class StopRanks(Order, frozen=True, kw_only=True, tag="stop-ranks"):
    """Stop every rank up to and including this attempt: SIGTERM, `grace_s`, SIGKILL; no grace means SIGKILL at once."""

    replica: int
    attempt: int
    grace_s: float = 0.0
    together: bool = False
    """Whether all replicas are to stop: those that can do so after the same step."""


class Break(Order, frozen=True, kw_only=True, tag="break"):
    """Inject a fault, at once or as soon as the target's ranks have passed `at_step`."""

    requested_at: float
    """Names the drill, so that one sent twice is done once."""
    target: DrillTarget
    rank: int = -1
    """Of the replica, where it is done to one."""
    index: int = -1
    """The number that was asked for: of all ranks of all replicas, or of a node."""
    action: DrillAction = DrillAction.KILL
    at_step: int | None = None
    for_s: float | None = None
    amount: float | None = None


class AskCheckpoint(Order, frozen=True, kw_only=True, tag="checkpoint"):
    """Ask every rank to checkpoint at its next step."""


class AskSplit(Order, frozen=True, kw_only=True, tag="split"):
    """Ask every rank where the time of its next steps goes."""


class TakeStacks(Order, frozen=True, kw_only=True, tag="stacks"):
    """Take the stacks of every rank and say where it stands."""


class WindDown(Order, frozen=True, kw_only=True, tag="wind-down"):
    """Ask every rank to checkpoint at its next step, then to leave."""

    reason: str = ""
    hand_over: bool = False
    """Leave the state in the node's memory instead of a checkpoint."""


class FetchCode(Order, frozen=True, kw_only=True, tag="fetch-code"):
    """Have this code before ranks are started with it; it is said when it is there."""

    digest: str


class Release(Order, frozen=True, kw_only=True, tag="release"):
    """Give back the memory in which a replica's ranks left their state."""

    replica: int


class Look(Order, frozen=True, kw_only=True, tag="look"):
    """Report the ranks of an attempt that have yet to say hello: others wait in vain, and may wait for these."""

    replica: int
    attempt: int
    everyone: bool = False
    """Report those that have spoken too: another one has given up waiting, and may have waited for these."""


class ReplicaLost(Order, frozen=True, kw_only=True, tag="replica-lost"):
    """Tell the ranks of other replicas that this one's attempt is over."""

    replica: int
    attempt: int


class ReplicaBack(Order, frozen=True, kw_only=True, tag="replica-back"):
    """Tell the ranks of other replicas that this one's ranks are starting."""

    replica: int
    attempt: int


class Leave(Order, frozen=True, kw_only=True, tag="leave"):
    """The run is over: stop whatever is left and exit."""


class KeepLog(Order, frozen=True, kw_only=True, tag="keep-log"):
    """Have this part of the run's log from this byte on, in place of whatever was there."""

    at: int
    data: bytes
    seal: str = ""
    """Of all of the log so far; empty where more of it follows."""


class Acknowledge(Order, frozen=True, kw_only=True, tag="ack"):
    """Everything the agent sent up to `seq` is safe in the log."""

    seq: int


AnyOrder = (
    StartRanks
    | GetReady
    | StopRanks
    | Break
    | AskCheckpoint
    | AskSplit
    | TakeStacks
    | WindDown
    | FetchCode
    | Release
    | Look
    | ReplicaLost
    | ReplicaBack
    | Leave
    | KeepLog
    | Acknowledge
)


class StepPassed(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
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
    steps: tuple[StepPassed, ...]
    source: str = ""
    seq: int = 0


AgentMessage = AgentEvent | Progress

encode = encoding.encode
order_decoder = msgspec.json.Decoder(AnyOrder)
agent_message_decoder: Decoder[AgentMessage] = Decoder(AgentMessage)


def messages(frame: bytes) -> list[AgentMessage]:
    """What an agent says in one frame: a message a line, one at least."""
    return [agent_message_decoder.decode(line) for line in frame.split(b"\n")]
