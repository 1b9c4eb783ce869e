"""Owns what the machine can ask the world to do; the controller carries it out, and nothing here does I/O.

Every command can be carried out twice without harm: after a controller died, its successor repeats what may not have
arrived.
"""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.events import AnyEvent, DrillRequested
from holdfast.job.accepted import Shipped
from holdfast.job.backend import NodePlace


@dataclass(frozen=True, kw_only=True)
class SubmitNodes:
    """Have the back end make these nodes."""

    places: tuple[NodePlace, ...]


@dataclass(frozen=True, kw_only=True)
class ReplaceNode:
    """Have the back end remove what is left of a slot's earlier generation and make this one."""

    place: NodePlace
    reason: str


@dataclass(frozen=True, kw_only=True)
class Cordon:
    """Have the back end put nothing new on the machine under a node."""

    place: NodePlace


@dataclass(frozen=True, kw_only=True)
class Uncordon:
    """Have the back end use the machine that was under a node again."""

    place: NodePlace


@dataclass(frozen=True, kw_only=True)
class Start:
    """Have these nodes start their ranks of an attempt; the controller fills in what each rank is given."""

    replica: int
    attempt: int
    nodes: tuple[int, ...]
    master_addr: str
    master_port: int
    code: Shipped | None = None
    """What they run; none where it lies in place."""


@dataclass(frozen=True, kw_only=True)
class Fetch:
    """Have these nodes fetch code before ranks are started with it."""

    nodes: tuple[int, ...]
    digest: str


@dataclass(frozen=True, kw_only=True)
class Release:
    """Have a node give back the memory in which a replica's ranks left their state."""

    node: int
    replica: int


@dataclass(frozen=True, kw_only=True)
class Prepare:
    """Have a standby do all that comes before a start."""

    node: int


@dataclass(frozen=True, kw_only=True)
class Stop:
    """Have these nodes end every rank up to and including an attempt."""

    replica: int
    attempt: int
    nodes: tuple[int, ...]
    grace_s: float
    together: bool = False
    """Whether all replicas are to stop."""


@dataclass(frozen=True, kw_only=True)
class WindDown:
    """Ask the ranks of these nodes to take a checkpoint and leave; those that cannot go on as if nothing was said."""

    nodes: tuple[int, ...]
    reason: str
    hand_over: bool = False
    """To leave their state in memory instead of a checkpoint."""


@dataclass(frozen=True, kw_only=True)
class Look:
    """Have these nodes report the ranks of an attempt that have yet to speak; or every one that they have."""

    replica: int
    attempt: int
    nodes: tuple[int, ...]
    everyone: bool = False


@dataclass(frozen=True, kw_only=True)
class TellLost:
    """Have these nodes tell their ranks that another replica's attempt is over."""

    replica: int
    attempt: int
    nodes: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class TellBack:
    """Have these nodes tell their ranks that another replica is starting."""

    replica: int
    attempt: int
    nodes: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Inject:
    """Break something on request; `node` is None for the controller itself."""

    drill: DrillRequested
    node: int | None


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """Ask every rank to checkpoint at its next step."""


@dataclass(frozen=True, kw_only=True)
class Split:
    """Ask every rank where the time of its next steps goes."""


@dataclass(frozen=True, kw_only=True)
class Stacks:
    """Have every node say where its ranks stand."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """Write down a decision; it changes no state, so replaying the log does not need it."""

    event: AnyEvent


@dataclass(frozen=True, kw_only=True)
class Finish:
    """Dismiss the agents, have the back end remove every node, and close the log."""


Command = (
    SubmitNodes
    | ReplaceNode
    | Cordon
    | Uncordon
    | Start
    | Fetch
    | Release
    | Prepare
    | Stop
    | WindDown
    | Look
    | TellLost
    | TellBack
    | Inject
    | Checkpoint
    | Split
    | Stacks
    | Record
    | Finish
)
Commands = tuple[Command, ...]
