"""Events that agents emit: what happened to the ranks of one node.

One file, because each source of events has one.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import msgspec

from holdfast.clock import ClockSample
from holdfast.events.base import Event
from holdfast.events.collectives import GroupCollectives
from holdfast.events.probe_results import ProbeResult, ProbeStage
from holdfast.events.ranges import Ranges
from holdfast.findings import CheckResult, Finding, Severity


class ExitReason(StrEnum):
    """How a rank's process ended, as reported by the process that started it or by the kernel."""

    CODE = "code"
    """It exited with its own exit code."""
    SIGNAL = "signal"
    """A signal killed it."""
    OUT_OF_MEMORY = "out-of-memory"
    """The kernel or its cgroup killed it because memory ran out."""
    PORT_TAKEN = "port-taken"
    """It could not listen on the rendezvous port: another process uses that port."""
    NOT_STARTED = "not-started"
    """The program could not be started."""
    ORPHANED_RANKS = "orphaned-ranks"
    """It exited with code 0 while a rank that it had started was still running."""
    CODE_DELIVERY_FAILED = "code-delivery-failed"
    """The shipped code did not reach the node."""

    def is_success(self, code: int) -> bool:
        """Whether a process with this reason and exit code completed its work."""
        return self is ExitReason.CODE and code == 0


class DeviceFault(StrEnum):
    """What a rank's output, or its node's kernel log, shows of a device; the strongest first.

    The values are codes of findings: control/policy.py decides what follows each.
    """

    GPU = "gpu-failed"
    """A GPU is lost, off the bus, or has no spare memory rows left."""
    MEMORY = "gpu-memory-failed"
    """A GPU's memory returned data that ECC could not correct."""
    NVLINK = "nvlink-failed"
    """A link between GPUs failed."""
    RESET = "gpu-needs-reset"
    """A GPU does not work until it is reset, or its node rebooted."""
    NIC = "nic-failed"
    """A network adapter failed."""
    NOT_READY = "gpu-not-ready"
    """The node's GPUs wait for a service of the node, such as the Fabric Manager."""
    CONTAINED = "gpu-memory-error-contained"
    """A memory error of a GPU that affected only this program."""
    NIC_LINK_DOWN = "nic-link-down"
    """A network adapter lost its link or its address."""
    UNCLEAR = "gpu-error-unclear"
    """A CUDA error that the program or the GPU may have caused."""
    NCCL_SYSTEM = "nccl-system-call-failed"
    """A call of NCCL to the operating system or the network failed."""
    NCCL_REMOTE = "nccl-peer-gone"
    """NCCL reports that a peer has gone."""


class RankState(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What an agent knows about one of its ranks."""

    rank: int
    pid: int
    prewarmed: bool = False
    """Whether the rank was forked from a zygote that had its imports done."""


LOG_REPLICA_NAME = "events.jsonl"
"""Name of a node's log replica, on disk and in uploads."""
LOG_SIGNATURE = "holdfast-log-signature"
"""HTTP header of an upload with the controller's signature of the log."""
LOG_REPLICA_REQUIRED = 409
"""HTTP status with which a controller requests an agent's log replica before it accepts anything else."""


class LogReplicaPosition(msgspec.Struct, frozen=True, kw_only=True):
    """How many bytes of the run's log a node has replicated, and the controller's signature of them."""

    bytes: Annotated[int, msgspec.Meta(ge=0)]
    signature: str


class AgentConnected(Event, frozen=True, kw_only=True):
    """An agent connected or reconnected, and reports its state.

    `attempt` is the attempt whose ranks it started (-1: none); `running` lists the live ones. `port` is reserved for
    the next rendezvous; `address` is where other nodes reach this node.
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
    """The clock of the agent's timestamps."""
    protocol: int = 1
    """The agent's protocol version (protocol/orders.py)."""
    oldest_protocol: int = 0
    """The oldest version that it speaks too; 0 if it speaks no other."""
    log_replica: LogReplicaPosition | None = None
    """Set by agents that keep a log replica; not written to the log."""
    unacked_seq: int = 0
    """Sequence number of its last message that no controller has acknowledged; it resends all of these. Not logged."""


class RanksStarted(Event, frozen=True, kw_only=True):
    """A node started its ranks of an attempt (`ranks` by global rank)."""

    node: int
    replica: int
    attempt: int
    ranks: tuple[RankState, ...]


class CodeFetched(Event, frozen=True, kw_only=True):
    """A node downloaded the code of an update before any rank runs it, or failed to."""

    node: int
    digest: str
    failure: Finding | None = None


class RanksPrewarmed(Event, frozen=True, kw_only=True):
    """A node has zygotes with the imports of these ranks' programs done: their next start is prewarmed.

    It replaces the node's last report, so an empty one means that no rank is prewarmed any more.
    """

    node: int
    replica: int
    ranks: tuple[int, ...]


class StacksDumped(Event, frozen=True, kw_only=True):
    """A rank's stacks, dumped on request (`StackDumpRequested`)."""

    node: int
    replica: int
    attempt: int
    rank: int
    process_state: str
    """The kernel's state letter of its process."""
    stacks: str = ""
    """File on its node with the stacks of its threads; empty if they could not be dumped."""
    top_frame: str = ""
    """The function and line that its main thread was in."""
    frames: tuple[str, ...] = ()
    """Its training thread's frames, innermost first, by which ranks are compared (diagnose/rank_stack.py)."""
    flight_dumps: tuple[str, ...] = ()
    """Files on its node with the dumps of its flight recorders."""
    collectives: tuple[GroupCollectives, ...] = ()
    """Its position in the collectives of its process groups, from those dumps; at most 16 groups."""
    native: tuple[str, ...] | None = None
    """Frames of C and C++ within its innermost Python frame, innermost first; None if not requested, or not read."""
    native_missing: str = ""
    """Why they could not be read, and what to do."""


class StandbyReady(Event, frozen=True, kw_only=True):
    """A standby node has finished its checks, code download and imports: it can replace a lost node immediately."""

    node: int
    generation: int


class NodeChecked(Event, frozen=True, kw_only=True):
    """A node has ended its checks before a start; `results` leaves out those that found nothing.

    `facts` are what has to be the same on all nodes, such as versions.
    """

    node: int
    generation: int
    number: int = 0
    """That of the order: checks are made anew after some failures."""
    results: tuple[CheckResult, ...] = ()
    facts: dict[str, str] = {}
    took_s: float = 0.0

    @property
    def problem(self) -> Finding | None:
        """The first error; None if the node may run ranks."""
        found = (finding for result in self.results for finding in result.findings)
        return next((finding for finding in found if finding.severity is Severity.ERROR), None)


class ProbeAdvanced(Event, frozen=True, kw_only=True):
    """The probes of a replica's nodes begin their next stage; the node of rank 0 reports it."""

    node: int
    generation: int
    replica: int
    number: int
    stage: ProbeStage
    elapsed_s: float


class NodeProbed(Event, frozen=True, kw_only=True):
    """No process of a probe is left on a node; the node of rank 0 reports the result, if there is one."""

    node: int
    generation: int
    replica: int
    number: int
    """Counts the probes of a replica, from 1."""
    port: int
    """A fresh port for the next rendezvous."""
    nodes: tuple[int, ...]
    """The nodes of the probe: the result numbers them from 0, in this order."""
    result: ProbeResult | None = None
    not_looked_at: str = ""
    """Why the probe cannot run on this node, such as an interpreter without torch."""
    problem: str = ""
    """Why it gave no complete result on this node."""
    crashed: bool = False
    """Whether its processes ended without a word."""


class NodeReplayed(Event, frozen=True, kw_only=True):
    """No process of a replay is left on a node, which was in a group that repeated the run's last steps."""

    node: int
    generation: int
    replica: int
    number: int
    """Counts the replays of a replica, from 1."""
    port: int
    """A fresh port for the next rendezvous."""
    nodes: tuple[int, ...] = ()
    """The group, in the order of its ranks; empty if it was stopped before its start."""
    digest: str = ""
    """Of the state of this node's ranks after the last step; empty if one of them did not get there."""
    problem: str = ""
    """Why there is no digest."""


class FabricObserved(Event, frozen=True, kw_only=True):
    """What carries a communicator's traffic, by what NCCL logged in this node's ranks.

    An agent sends it within seconds of the communicator's creation, and again when its ranks have connected.
    """

    node: int
    replica: int
    attempt: int
    promised: str
    """The run's fabric, as the catalogue names it."""
    communicator: str
    """NCCL's id of it, or its ranks where this version of NCCL logs none."""
    size: int
    ranks: Ranges
    """Its ranks on this node, as it numbers them."""
    spans_nodes: bool
    network: str = ""
    """The network that NCCL chose on most ranks, by its own name."""
    between: dict[str, int] = {}
    """The transports to ranks of other nodes, such as `NET/IB/GDRDMA`, and the channel ends of each."""
    within: dict[str, int] = {}
    """The same among the ranks of this node."""
    nics: int = 0
    """Network devices that connections use."""
    devices: tuple[str, ...] = ()
    """RDMA devices that NCCL found, as `device:port/link layer`."""
    channels: int = 0
    connected: tuple[str, ...] = ()
    """What all of its ranks here have connected (`all rings`, `all trees`); empty while they have other connections."""
    nccl: str = ""
    """The version of NCCL that most ranks have loaded."""
    causes: dict[str, str] = {}
    """Why NCCL does not use the fabric (`no device`, `NCCL_IB_DISABLE`, `memlock`), each with its line."""
    other_interfaces: tuple[str, ...] = ()
    """Interfaces in use that the run's NCCL_SOCKET_IFNAME does not name."""
    differing: tuple[str, ...] = ()
    """How single ranks differ from the others of the node, in words."""
    findings: tuple[Finding, ...] = ()
    """What degrades the fabric on this node."""


class RankExited(Event, frozen=True, kw_only=True):
    """A rank's process ended; `stopped` is true if holdfast stopped it on purpose."""

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
    """Evidence for `reason`: a kernel log line, a cgroup counter, an operating system error or a launcher's report."""
    device_fault: DeviceFault | None = None
    """What its output, or its node's kernel log, shows of a device; `evidence` begins with that line if `error` is not.
    """
    first_failed_rank: int = -1
    """The rank that ended first according to the launcher that this process is; -1 if unknown."""
    error_location: str = ""
    """`file:line` of that error line."""
    last_step: int = -1
    has_session: bool = False
    """Whether the rank ever connected to its agent's socket."""
    exited_on_request: bool = False
    """Whether it exited with code 75 after its Session had reported an exit on request; otherwise 75 is a failure."""

    @property
    def failed(self) -> bool:
        """Whether this exit fails the attempt."""
        return not (self.stopped or self.reason.is_success(self.code))


class RanksStopped(Event, frozen=True, kw_only=True):
    """No process of this attempt is left on the node; `port` is newly reserved for the next rendezvous."""

    node: int
    replica: int
    attempt: int
    port: int


class NodePreemptionNotice(Event, frozen=True, kw_only=True):
    """A node's agent received SIGTERM: the node is preempted, and its ranks have `grace_s` seconds to save and exit."""

    node: int
    grace_s: float


class RanksDrained(Event, frozen=True, kw_only=True):
    """A rank of a preempted node has taken its last step and saved; its process has yet to exit."""

    node: int
    replica: int
    attempt: int


class RankHung(Event, frozen=True, kw_only=True):
    """A rank completed no step within its timeout, or was inspected because another rank was waiting for it."""

    node: int
    replica: int
    attempt: int
    rank: int
    last_step: int
    last_step_at: float
    waited_s: float
    process_state: str = ""
    """The kernel's state letter of the process: R, S, D, T (stopped), Z."""
    system_call: str = ""
    """The system call in which its main thread sleeps, such as `read of /data/shard-7` (host/system_calls.py)."""
    stacks: str = ""
    """File with the stacks, if they could be dumped."""
    top_frame: str = ""
    """The innermost Python frame of its main thread, such as `all_reduce (distributed_c10d.py:2841)`."""
    frames: tuple[str, ...] = ()
    """Its training thread's frames, innermost first, by which ranks are compared (diagnose/rank_stack.py)."""
    has_session: bool = True
    """Whether the rank had connected to its agent's socket."""
    commit_line: int = 0
    """Line of `Session.commit` that it was in after it had reported its last step; 0 if it was elsewhere."""
    flight_dumps: tuple[str, ...] = ()
    """Files on its node with the dumps of its flight recorders."""
    collectives: tuple[GroupCollectives, ...] = ()
    """Its position in the collectives of its process groups, from those dumps; at most 16 groups."""
    waits_for_peers: bool = False
    """Whether it was seen waiting in a collective, or in a backward pass."""
    unless_others_work: bool = False
    """Whether this is a hang only if all other ranks of the replica report too: they may be evaluating or saving."""


class EvidenceKept(Event, frozen=True, kw_only=True):
    """A node has kept what it can show of a failed attempt; the attempt with which a run ends has no event."""

    node: int
    replica: int
    attempt: int
    folder: str
    """On the node."""
    files: int
    bytes: int
    left_out: int = 0
    """Files over the limit, or that could not be read."""


class TraceKept(Event, frozen=True, kw_only=True):
    """The controller has received the trace of a rank's profiled steps, or knows why there is none."""

    node: int
    replica: int
    attempt: int
    rank: int
    step: int
    """The last step of the profile."""
    kept: int
    """Ranks of the replica that keep a trace of these steps."""
    step_clock: bool = False
    """Whether the rank has no Session: the breakdown of its steps is in its trace alone."""
    file: str = ""
    """In the run's folder; empty if there is none."""
    failure: str = ""
    memory_file: str = ""
    """A snapshot of the rank's GPU memory, in the run's folder; empty if there is none."""
    memory_failure: str = ""
    """Why there is none, although one was requested."""


class CheckpointCommitted(Event, frozen=True, kw_only=True):
    """A replica completed a checkpoint."""

    node: int
    replica: int
    attempt: int
    step: int
    path: str
    took_s: float = 0.0
    size_bytes: int = 0
    """Of the files of all ranks; 0 if unknown."""


class FaultInjected(Event, frozen=True, kw_only=True):
    """A requested fault was injected; logged just before it takes effect. `requested_at` is the request's `at`."""

    node: int
    """The node of the fault; -1 for the controller."""
    requested_at: float
    target: str
    """The target as requested, with its number for a rank: `rank 3`."""
    action: str
    step: int = -1
