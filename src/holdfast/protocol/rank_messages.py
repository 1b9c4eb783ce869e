"""Messages between a rank and its agent over the rank's Unix socket: newline-delimited JSON, one object per line.

These are not log events: the agent turns them into progress and events. Both sides ignore unknown message types and
fields. To add a message to the agent: a struct and a member of `RankToAgent` here, `AgentClient.send` where it arises
(mostly train/session/rank_coordinator.py), and a `case` in `RankReports.on_message` (agent/rank_reports.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, cast, get_args

import msgspec

from holdfast.clock import ClockSample
from holdfast.events import NumericFault, encoding
from holdfast.findings import Finding
from holdfast.protocol.metric_validation import split_valid_metrics
from holdfast.protocol.phase_times import PhaseTimes
from holdfast.protocol.validation import ValidatingDecoder, out_of_range

RANK_PROTOCOL = 2
"""Sent in the rank's hello."""


class RankMessage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type"):
    """A message from a rank to its agent."""


class Hello(RankMessage, frozen=True, kw_only=True, tag="hello"):
    """First line: the sender, and its protocol version."""

    rank: int
    pid: int
    protocol: int = RANK_PROTOCOL
    clock: ClockSample | None = None
    """The clock of the rank's timestamps; None means the agent's clock."""
    step_clock: bool = False
    """Whether the sender is no Session, but the step clock, which sends little else (agent/step_clock.py)."""


class RankStep(RankMessage, frozen=True, kw_only=True, tag="step"):
    """The rank finished an optimizer step.

    `started` and `ended` are Unix seconds on the rank's clock; `checkpoint_s` is the part of that time spent waiting
    for a checkpoint.
    """

    step: int
    started: float
    ended: float
    checkpoint_s: float = 0.0
    metrics: dict[str, float] = {}
    metrics_follow: bool = False
    """Whether its metrics are still on a GPU, and come with a `RankStepMetrics`."""


class RankStepMetrics(RankMessage, frozen=True, kw_only=True, tag="step-metrics"):
    """The metrics of a step that the rank has already reported, in the order of the steps."""

    step: int
    metrics: dict[str, float] = {}


class GpuMemory(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Memory of a rank's GPU at the end of a step."""

    used_bytes: float
    """What its tensors use."""
    free_bytes: float
    """What more tensors could use: memory that is free, and what the allocator keeps without a tensor in it."""


class RankPhases(RankMessage, frozen=True, kw_only=True, tag="phases"):
    """How the rank spent its last steps; times are on its clock."""

    times: PhaseTimes
    gpu: GpuMemory | None = None


class RankCheckpointCommitted(RankMessage, frozen=True, kw_only=True, tag="checkpoint-committed"):
    """A checkpoint is complete; sent by the rank that committed it."""

    step: int
    path: str
    took_s: float = 0.0
    size_bytes: int = 0
    """Of the files of all ranks; 0 if unknown."""


class FindingReported(RankMessage, frozen=True, kw_only=True, tag="finding"):
    """The session reports a finding."""

    finding: Finding


class NumericFaultReported(RankMessage, frozen=True, kw_only=True, tag="numeric-fault"):
    """Loss, gradients or weights of this rank are not finite, or spiked; fields as in `NumericFaultObserved`."""

    step: int
    fault: NumericFault
    quantity: str
    parameter_group: str = ""
    damaged: bool = False
    is_origin: bool = True
    finding: Finding


class CorruptionReported(RankMessage, frozen=True, kw_only=True, tag="corruption"):
    """This rank holds or computes other numbers than the others; fields as in `CorruptionObserved`."""

    step: int
    agreed_step: int
    quantity: str
    certain: bool
    continues: bool = False
    finding: Finding


class Activity(StrEnum):
    """What a rank is doing, for its step timeout."""

    STEPPING = "stepping"
    BETWEEN_STEPS = "between-steps"
    """Work between two steps: a checkpoint, an evaluation, a wait for other replicas."""
    FINISHED = "finished"
    """Work after the last step."""


class ActivityChanged(RankMessage, frozen=True, kw_only=True, tag="activity-changed"):
    """The rank changes its activity; its next finished step implies STEPPING again."""

    to: Activity


class ProgramEnded(RankMessage, frozen=True, kw_only=True, tag="program-ended"):
    """The program has ended, but non-daemon threads keep its process alive; sent on a separate connection."""

    rank: int
    failed: bool = False
    """Whether it ended with an exception."""
    threads: tuple[str, ...] = ()


class StepClockFailed(RankMessage, frozen=True, kw_only=True, tag="step-clock-failed"):
    """The step clock has stopped because of an error; sent on a separate connection."""

    rank: int
    error: str = ""


class TraceWritten(RankMessage, frozen=True, kw_only=True, tag="trace-written"):
    """The rank has written the trace of a profile, or could not."""

    step: int
    """The last step of the profile."""
    kept: int
    """Ranks that keep a trace of these steps."""
    step_clock: bool = False
    """Whether the rank has no Session: it reports no breakdown, which its trace holds."""
    failure: str = ""
    memory: bool = False
    """Whether the rank has also written a snapshot of its GPU memory."""
    memory_failure: str = ""
    """Why it has not, although one was requested."""


class ExitingOnRequest(RankMessage, frozen=True, kw_only=True, tag="exiting-on-request"):
    """The rank exits on request with code 75, before its last step."""


class RankRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type"):
    """A request from an agent to a rank."""


class TakeCheckpointNow(RankRequest, frozen=True, kw_only=True, tag="take-checkpoint-now"):
    """Take a checkpoint at the end of the current step."""


class ProfileStepsNow(RankRequest, frozen=True, kw_only=True, tag="profile-steps-now"):
    """Profile a few steps after the current one, and report the step-time breakdown with the last of them."""

    traces: str = ""
    """Start of the paths of trace files (`trace_path`); empty: no rank keeps one."""
    ranks: tuple[int, ...] = ()
    """Ranks that keep one; empty: rank 0, the slowest and the fastest rank."""
    memory: bool = False
    """Whether they record allocations of GPU memory in these steps, and keep a snapshot at the end."""


def trace_path(start: str, step: int, rank: int) -> str:
    """Where a rank writes a trace."""
    return f"{start}step-{step}-rank-{rank}.json.gz"


def memory_path(start: str, step: int, rank: int) -> str:
    """Where a rank writes a snapshot of its GPU memory."""
    return f"{start}step-{step}-rank-{rank}-memory.pickle.gz"


class CheckpointAndExitNow(RankRequest, frozen=True, kw_only=True, tag="checkpoint-and-exit-now"):
    """Take a checkpoint at the end of the current step, then exit."""

    reason: str = ""
    all_replicas: bool = False
    """Whether all replicas receive this request: they exit after the same step."""


class TransferAndExitNow(RankRequest, frozen=True, kw_only=True, tag="transfer-and-exit-now"):
    """At the end of the current step keep the state in memory for the successor process, then exit."""


class ReplicaDown(RankRequest, frozen=True, kw_only=True, tag="replica-down"):
    """Another replica's attempt is over; stop waiting for its ranks."""

    replica: int
    attempt: int


class ReplicaStarting(RankRequest, frozen=True, kw_only=True, tag="replica-starting"):
    """Another replica's ranks are starting and will request to join."""

    replica: int
    attempt: int


class RankFault(StrEnum):
    """A fault that a rank injects into itself."""

    RAISE = "raise"
    HANG = "hang"
    NAN = "nan"
    SPIKE = "spike"
    BITFLIP = "bitflip"
    SLOW = "slow"
    DATA_STALL = "data-stall"
    LEAK = "leak"
    COLLECTIVE = "collective"
    """Enter a collective that no other rank enters."""


class InjectRankFault(RankRequest, frozen=True, kw_only=True, tag="inject-rank-fault"):
    """Inject this fault at the end of the current step, for a drill."""

    fault: RankFault
    target: str = ""
    """The part of the rank, such as `forward` or `gradients`, for faults that have several targets."""
    amount: float | None = None
    """In the unit of the fault catalogue."""
    for_s: float | None = None


RankToAgent = (
    Hello
    | RankStep
    | RankStepMetrics
    | RankPhases
    | ActivityChanged
    | RankCheckpointCommitted
    | FindingReported
    | NumericFaultReported
    | CorruptionReported
    | ProgramEnded
    | StepClockFailed
    | TraceWritten
    | ExitingOnRequest
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
    """A message of a type that this version does not know."""


class _Tagged(msgspec.Struct):
    type: str


_tagged = msgspec.json.Decoder(_Tagged)
_KINDS = frozenset(str(kind.__struct_config__.tag) for kind in get_args(RankToAgent))


def decode_rank_message(line: bytes) -> tuple[RankToAgent, Mapping[str, str]]:
    """Decode a rank's message; also returns, by name, why some of its metrics were dropped.

    Dropped metrics never cost the step. Raises ValueError for an invalid message, and UnknownKindError for one of a
    later version.
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


def _step_without_bad_metrics(line: bytes) -> tuple[RankStep | RankStepMetrics, Mapping[str, str]] | None:
    """A step, or its metrics, of which some metrics alone are invalid; None for anything else.

    Python's parser accepts what other programs write although JSON forbids it: NaN, infinities and lone surrogates.
    """
    if b'"step"' not in line:
        return None
    try:
        given: Any = json.loads(line.decode("utf-8", "surrogateescape"))
        metrics: Any = given["metrics"]
        good, dropped = (
            split_valid_metrics(cast("dict[str, Any]", metrics)) if isinstance(metrics, dict) else ({}, _NO_METRICS)
        )
        step = msgspec.convert({**given, "metrics": good}, RankStep | RankStepMetrics)
    except (ValueError, LookupError, TypeError, RecursionError):
        return None
    return None if out_of_range(step) else (step, dropped)


_NO_METRICS = {"metrics": "it is no JSON object, so all metrics of the step are lost"}
