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

from holdfast.clock import ClockSample
from holdfast.events import encoding
from holdfast.findings import Finding
from holdfast.protocol.metric_validation import split_valid_metrics
from holdfast.protocol.validation import ValidatingDecoder, out_of_range

RANK_PROTOCOL = 2
"""Said in the rank's hello."""


class RankMessage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type"):
    """Something a rank tells its agent."""


class Hello(RankMessage, frozen=True, kw_only=True, tag="hello"):
    """First line: who speaks, and in which version of this protocol (`v`)."""

    rank: int
    pid: int
    protocol: int = RANK_PROTOCOL
    clock: ClockSample | None = None
    """The clock that the rank's times are on; none means the agent's own."""


class RankStep(RankMessage, frozen=True, kw_only=True, tag="step"):
    """The rank finished an optimiser step.

    `started` and `ended` are Unix seconds on the rank's clock; `checkpoint_s` is the part of that time spent waiting
    for a checkpoint.
    """

    step: int
    started: float
    ended: float
    checkpoint_s: float = 0.0
    metrics: dict[str, float] = {}


class RankCheckpointCommitted(RankMessage, frozen=True, kw_only=True, tag="checkpoint-committed"):
    """A complete checkpoint exists; said by the one rank that committed it."""

    step: int
    path: str
    took_s: float = 0.0


class FindingReported(RankMessage, frozen=True, kw_only=True, tag="finding"):
    """The session noticed something."""

    finding: Finding


class Activity(StrEnum):
    """What a rank is at, as far as a deadline for its steps is concerned."""

    STEPPING = "stepping"
    BETWEEN_STEPS = "between-steps"
    """Something between two steps: a checkpoint, an evaluation, a wait for other replicas."""
    FINISHED = "finished"
    """What comes after the last step."""


class ActivityChanged(RankMessage, frozen=True, kw_only=True, tag="activity-changed"):
    """The rank turns to something else; with the next step that it passes it is at its steps again."""

    to: Activity


class ProgramEnded(RankMessage, frozen=True, kw_only=True, tag="program-ended"):
    """The program has ended, and threads that are not daemons keep its process alive; sent on its own connection."""

    rank: int
    failed: bool = False
    """Whether an exception ended it."""
    threads: tuple[str, ...] = ()


class ExitingOnRequest(RankMessage, frozen=True, kw_only=True, tag="exiting-on-request"):
    """The rank ends with code 75 because it was asked to, with steps left to do."""


class RankRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type"):
    """Something an agent asks of a rank."""


class TakeCheckpointNow(RankRequest, frozen=True, kw_only=True, tag="take-checkpoint-now"):
    """Take a checkpoint at the end of the step in hand."""


class ProfileStepsNow(RankRequest, frozen=True, kw_only=True, tag="profile-steps-now"):
    """Profile a few steps after the one in hand, and report with the last of them where a step's time goes."""


class CheckpointAndExitNow(RankRequest, frozen=True, kw_only=True, tag="checkpoint-and-exit-now"):
    """Take a checkpoint at the end of the step in hand, then leave."""

    reason: str = ""
    all_replicas: bool = False
    """Whether all replicas are asked: they leave after the same step."""


class TransferAndExitNow(RankRequest, frozen=True, kw_only=True, tag="transfer-and-exit-now"):
    """At the end of the step in hand leave the state to the process that takes this one's place, then leave."""


class ReplicaDown(RankRequest, frozen=True, kw_only=True, tag="replica-down"):
    """Another replica's attempt is over: whoever waits for its ranks waits in vain."""

    replica: int
    attempt: int


class ReplicaStarting(RankRequest, frozen=True, kw_only=True, tag="replica-starting"):
    """Another replica's ranks have been told to start, and will ask to be taken in."""

    replica: int
    attempt: int


class RankFault(StrEnum):
    """What a program may do of itself that ends its training."""

    RAISE = "raise"
    HANG = "hang"
    COLLECTIVE = "collective"
    """Enter a collective that no other rank enters."""


class InjectRankFault(RankRequest, frozen=True, kw_only=True, tag="inject-rank-fault"):
    """Do it, at the end of the step in hand: a drill."""

    fault: RankFault


RankToAgent = (
    Hello | RankStep | ActivityChanged | RankCheckpointCommitted | FindingReported | ProgramEnded | ExitingOnRequest
)

AgentToRank = (
    TakeCheckpointNow
    | ProfileStepsNow
    | CheckpointAndExitNow
    | TransferAndExitNow
    | ReplicaDown
    | ReplicaStarting
    | InjectRankFault
)

encode = encoding.encode
rank_message_decoder: ValidatingDecoder[RankToAgent] = ValidatingDecoder(RankToAgent)
rank_request_decoder = msgspec.json.Decoder(AgentToRank)


class UnknownKindError(ValueError):
    """A message of a kind that this version does not know."""


class _Tagged(msgspec.Struct):
    type: str


_tagged = msgspec.json.Decoder(_Tagged)
_KINDS = frozenset(str(kind.__struct_config__.tag) for kind in get_args(RankToAgent))


def decode_rank_message(line: bytes) -> tuple[RankToAgent, Mapping[str, str]]:
    """A rank's message, and by name why some of its metrics were dropped: those never cost the step.

    Raises ValueError for what is no message, for its form or its meaning; UnknownKindError for one of a later version.
    """
    try:
        return rank_message_decoder.decode(line), {}
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


def _step_without_bad_metrics(line: bytes) -> tuple[RankStep, Mapping[str, str]] | None:
    """A step that only its metrics make unreadable; None for anything else.

    Python's parser takes what no JSON has, and other programs write: NaN, infinities and lone surrogates.
    """
    if b'"step"' not in line:
        return None
    try:
        given: Any = json.loads(line.decode("utf-8", "surrogateescape"))
        metrics: Any = given["metrics"]
        good, dropped = (
            split_valid_metrics(cast("dict[str, Any]", metrics)) if isinstance(metrics, dict) else ({}, _NO_METRICS)
        )
        step = msgspec.convert({**given, "metrics": good}, RankStep)
    except (ValueError, LookupError, TypeError, RecursionError):
        return None
    return None if out_of_range(step) else (step, dropped)


_NO_METRICS = {"metrics": "it is no JSON object, so all metrics of the step are lost"}
