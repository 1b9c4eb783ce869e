"""Events that agents produce: what happened to the ranks of one node."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import msgspec

from holdfast.clock import ClockSample
from holdfast.events.base import Event
from holdfast.findings import Finding


class ExitReason(StrEnum):
    """How a rank's process ended, by the word of whoever ended it."""

    CODE = "code"
    """It exited with a code of its own."""
    SIGNAL = "signal"
    """A signal ended it."""
    OUT_OF_MEMORY = "out-of-memory"
    """The kernel or its cgroup ended it for memory, and says so."""
    PORT_TAKEN = "port-taken"
    """It could not listen where its peers were to meet it: a stranger has the port."""
    NOT_STARTED = "not-started"
    """The program could not be started at all."""
    ORPHANED_RANKS = "orphaned-ranks"
    """It exited with code 0 while a rank that it had started was at work."""
    CODE_DELIVERY_FAILED = "code-delivery-failed"
    """The code that it runs did not reach the node."""

    def is_success(self, code: int) -> bool:
        """Whether what ended so, with this code, had done its work."""
        return self is ExitReason.CODE and code == 0


class RankState(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What an agent knows of one of its ranks."""

    rank: int
    pid: int
    prewarmed: bool = False
    """Whether its imports were done before it was started."""


LOG_REPLICA_NAME = "events.jsonl"
"""What a node's copy of the log is called, where it lies and on its way back."""
LOG_SIGNATURE = "holdfast-log-signature"
"""The header that says, on its way back, what the controller vouched for."""
LOG_REPLICA_REQUIRED = 409
"""What a controller answers an agent whose copy of the run's log it has to have before anything else."""


class LogReplicaPosition(msgspec.Struct, frozen=True, kw_only=True):
    """How much of the run's log a node has a copy of, and the controller's own word for what is in it."""

    bytes: Annotated[int, msgspec.Meta(ge=0)]
    signature: str


class AgentConnected(Event, frozen=True, kw_only=True):
    """An agent connected (or connected again) and says all it has.

    `attempt` is the attempt whose ranks it has started (-1: none); `running` lists those alive. `port` is free and
    held for the next rendezvous; `address` is where other nodes reach this one.
    """

    node: int
    generation: int
    incarnation: str
    hostname: str
    address: str
    port: int
    pid: int
    attempt: int = -1
    running: tuple[RankState, ...] = ()
    clock: ClockSample | None = None
    """The clock that the agent's times are on."""
    protocol: int = 1
    """The version of the words between agents and controllers that this agent speaks (protocol/orders.py)."""
    log_replica: LogReplicaPosition | None = None
    """Of an agent that keeps a copy of the log where its controller may lose it; it is not written down."""


class RanksStarted(Event, frozen=True, kw_only=True):
    """A node's ranks of an attempt were started (`ranks` by global rank)."""

    node: int
    replica: int
    attempt: int
    ranks: tuple[RankState, ...]


class CodeFetched(Event, frozen=True, kw_only=True):
    """A node has the code that an update is to start, before anybody runs it; or cannot have it."""

    node: int
    digest: str
    failure: Finding | None = None


class RanksPrewarmed(Event, frozen=True, kw_only=True):
    """The imports of these ranks' programs are done on a node, in processes that wait: their next start is warm."""

    node: int
    replica: int
    ranks: tuple[int, ...]


class StacksDumped(Event, frozen=True, kw_only=True):
    """Where a rank stood when somebody asked (`StackDumpRequested`)."""

    node: int
    replica: int
    attempt: int
    rank: int
    process_state: str
    """The kernel's letter for the state of its process."""
    stacks: str = ""
    """File with the stacks of its threads, on its node; empty where they cannot be taken."""
    top_frame: str = ""
    """The function and line that its main thread was in."""


class StandbyReady(Event, frozen=True, kw_only=True):
    """A standby node has its checks, its code and its imports done: it can take a lost node's place at once."""

    node: int
    generation: int


class RankExited(Event, frozen=True, kw_only=True):
    """A rank's process ended. `stopped` is true when holdfast itself ended it on purpose."""

    node: int
    replica: int
    attempt: int
    rank: int
    reason: ExitReason
    code: int = 0
    """Exit code, or the signal's number."""
    stopped: bool = False
    error: str = ""
    """The last error line the rank wrote, at most 500 characters, such as `ValueError: bad shape`."""
    evidence: str = ""
    """What proves `how`: the kernel's line, the cgroup's counter, the operating system's reason, a launcher's word."""
    first_failed_rank: int = -1
    """The rank that ended first by the word of its launcher, whose process this is; -1 where none is named."""
    error_location: str = ""
    """`file:line` of that error line."""
    last_step: int = -1
    has_session: bool = False
    """Whether the rank ever opened its holdfast channel."""
    exited_on_request: bool = False
    """Whether it exited with code 75 after its Session said that it leaves because it was asked to; the same code of a
    program's own is a failure like any other."""

    @property
    def failed(self) -> bool:
        """Whether this end, by itself, fails the attempt."""
        return not (self.stopped or self.reason.is_success(self.code))


class RanksStopped(Event, frozen=True, kw_only=True):
    """No process of this attempt is left on the node. `port` is fresh and held for the next rendezvous."""

    node: int
    replica: int
    attempt: int
    port: int


class NodePreemptionNotice(Event, frozen=True, kw_only=True):
    """A node's agent got SIGTERM: whoever gave the node takes it away, and its ranks have `grace_s` to save and end."""

    node: int
    grace_s: float


class RanksDrained(Event, frozen=True, kw_only=True):
    """A rank of a node that is taken away has taken its last step, and saved; its process has yet to end."""

    node: int
    replica: int
    attempt: int


class RankHung(Event, frozen=True, kw_only=True):
    """A rank passed no step within its deadline, or was looked at because another waited in vain."""

    node: int
    replica: int
    attempt: int
    rank: int
    last_step: int
    last_step_at: float
    waited_s: float
    process_state: str = ""
    """The kernel's letter for the process: R, S, D, T (stopped), Z."""
    stacks: str = ""
    """File that holds the stacks, when they could be taken."""
    top_frame: str = ""
    """The innermost Python frame of its main thread, such as `all_reduce (distributed_c10d.py:2841)`."""
    has_session: bool = True
    """Whether the rank had opened its holdfast channel."""
    commit_line: int = 0
    """Line of `Session.commit` that it stood in after it had told of its last step; 0 where it stood elsewhere."""


class CheckpointCommitted(Event, frozen=True, kw_only=True):
    """A complete checkpoint of a replica exists."""

    node: int
    replica: int
    attempt: int
    step: int
    path: str
    took_s: float = 0.0


class FaultInjected(Event, frozen=True, kw_only=True):
    """A fault was injected on request, just before it took effect; `requested_at` is the request's `at`."""

    node: int
    """The node it befell; -1 for the controller."""
    requested_at: float
    target: str
    """With its number, as it was asked for, where it is a rank's: `rank 3`."""
    action: str
    step: int = -1
