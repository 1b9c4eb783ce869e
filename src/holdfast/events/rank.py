"""Owns what a rank and its agent say to each other over the rank's Unix socket: newline JSON, one object a line.

These are not log events: the agent turns them into progress and events of its own. Both sides ignore kinds and
fields they don't know.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, cast, get_args

import msgspec

from holdfast.clock import Anchor
from holdfast.events import encoding
from holdfast.events.bounds import Decoder, implausible
from holdfast.events.metrics import sift
from holdfast.findings import Finding

PROTOCOL = 1
"""Said in the rank's hello."""


class RankMessage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type"):
    """Something a rank tells its agent."""


class Hello(RankMessage, frozen=True, kw_only=True, tag="hello"):
    """First line: who speaks, and in which version of this protocol (`v`)."""

    rank: int
    pid: int
    v: int = PROTOCOL
    clock: Anchor | None = None
    """The clock that the rank's times are on; none means the agent's own."""


class Step(RankMessage, frozen=True, kw_only=True, tag="step"):
    """The rank finished an optimiser step.

    `started` and `ended` are Unix seconds on the rank's clock; `checkpoint_s` is the part of that time spent waiting
    for a checkpoint.
    """

    step: int
    started: float
    ended: float
    checkpoint_s: float = 0.0
    metrics: dict[str, float] = {}


class Checkpointed(RankMessage, frozen=True, kw_only=True, tag="checkpoint-committed"):
    """A complete checkpoint exists; said by the one rank that committed it."""

    step: int
    path: str
    took_s: float = 0.0


class Found(RankMessage, frozen=True, kw_only=True, tag="finding"):
    """The session noticed something."""

    finding: Finding


class Doing(StrEnum):
    """What a rank is at, as far as a deadline for its steps is concerned."""

    STEPS = "steps"
    ASIDE = "aside"
    """Something between two steps: a checkpoint, an evaluation, a wait for other replicas."""
    REST = "rest"
    """What comes after the last step."""


class Turned(RankMessage, frozen=True, kw_only=True, tag="turned"):
    """The rank turns to something else; with the next step that it passes it is at its steps again."""

    to: Doing


class ProgramOver(RankMessage, frozen=True, kw_only=True, tag="program-over"):
    """The program has ended, and threads that are not daemons keep its process alive; sent on its own connection."""

    rank: int
    failed: bool = False
    """Whether an exception ended it."""
    threads: tuple[str, ...] = ()


class Leaving(RankMessage, frozen=True, kw_only=True, tag="leaving"):
    """The rank ends with code 75 because it was asked to, with steps left to do."""


class RankRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type"):
    """Something an agent asks of a rank."""


class CheckpointNow(RankRequest, frozen=True, kw_only=True, tag="checkpoint-now"):
    """Take a checkpoint at the end of the step in hand."""


class SplitNow(RankRequest, frozen=True, kw_only=True, tag="split-now"):
    """Profile a few steps after the one in hand, and report with the last of them where a step's time goes."""


class StopNow(RankRequest, frozen=True, kw_only=True, tag="stop"):
    """Take a checkpoint at the end of the step in hand, then leave."""

    reason: str = ""
    together: bool = False
    """Whether all replicas are asked: they leave after the same step."""


class HandOver(RankRequest, frozen=True, kw_only=True, tag="hand-over"):
    """At the end of the step in hand leave the state to the process that takes this one's place, then leave."""


class ReplicaLost(RankRequest, frozen=True, kw_only=True, tag="replica-lost"):
    """Another replica's attempt is over: whoever waits for its ranks waits in vain."""

    replica: int
    attempt: int


class ReplicaBack(RankRequest, frozen=True, kw_only=True, tag="replica-back"):
    """Another replica's ranks have been told to start, and will ask to be taken in."""

    replica: int
    attempt: int


class Misfortune(StrEnum):
    """What a program may do of itself that ends its training."""

    RAISE = "raise"
    HANG = "hang"
    COLLECTIVE = "collective"
    """Enter a collective that no other rank enters."""


class Befall(RankRequest, frozen=True, kw_only=True, tag="befall"):
    """Do it, at the end of the step in hand: a drill."""

    what: Misfortune


RankToAgent = Hello | Step | Turned | Checkpointed | Found | ProgramOver | Leaving

AgentToRank = CheckpointNow | SplitNow | StopNow | HandOver | ReplicaLost | ReplicaBack | Befall

encode = encoding.encode
from_rank: Decoder[RankToAgent] = Decoder(RankToAgent)
from_agent = msgspec.json.Decoder(AgentToRank)


class UnknownKindError(ValueError):
    """A message of a kind that this version does not know."""


class _Tagged(msgspec.Struct):
    type: str


_tagged = msgspec.json.Decoder(_Tagged)
_KINDS = frozenset(str(kind.__struct_config__.tag) for kind in get_args(RankToAgent))


def read(line: bytes) -> tuple[RankToAgent, Mapping[str, str]]:
    """A rank's message, and by name why some of its metrics were dropped: those never cost the step.

    Raises ValueError for what is no message, for its form or its meaning; UnknownKindError for one of a later version.
    """
    try:
        return from_rank.decode(line), {}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        if (step := _step_without_bad_metrics(line)) is not None:
            return step
        if _is_of_another_version(line):
            raise UnknownKindError(str(error)) from error
        raise ValueError(str(error)) from error


def _is_of_another_version(line: bytes) -> bool:
    try:
        return _tagged.decode(line).type not in _KINDS
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False


def _step_without_bad_metrics(line: bytes) -> tuple[Step, Mapping[str, str]] | None:
    """A step that only its metrics make unreadable; None for anything else.

    Python's parser takes what no JSON has, and other programs write: NaN, infinities and lone surrogates.
    """
    if b'"step"' not in line:
        return None
    try:
        given: Any = json.loads(line.decode("utf-8", "surrogateescape"))
        metrics: Any = given["metrics"]
        good, dropped = sift(cast("dict[str, Any]", metrics)) if isinstance(metrics, dict) else ({}, _NO_METRICS)
        step = msgspec.convert({**given, "metrics": good}, Step)
    except (ValueError, LookupError, TypeError, RecursionError):
        return None
    return None if implausible(step) else (step, dropped)


_NO_METRICS = {"metrics": "it is no JSON object, so all metrics of the step are lost"}
