"""The failure policy: decides what follows a failure, given earlier failures, and words the finding.

Pure. Rules are rows, tried in order; the first that applies decides. The machine executes the verdict and knows no
rule. One long file: a table of failure kinds, a table of rules, and their helpers.
"""

from __future__ import annotations

import errno
import math
import re
import signal
from collections.abc import Callable
from enum import IntEnum, StrEnum

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from holdfast.control.error_signature import normalize_error
from holdfast.errors import ExitCode
from holdfast.events import DeviceFault
from holdfast.findings import Finding, Owner, Severity, replica_suffix
from holdfast.host.processes import signal_name
from holdfast.job.quarantine import Certainty
from holdfast.job.spec import Recovery
from holdfast.job.step_timeouts import EARLY_STEPS
from holdfast.os_errors import resource_error_in

CRASH_LOOP_LENGTH = 3
"""Equal failures in a row, without a step between them, that count as a crash loop."""

CRASH_LOOP_HORIZON_S = 60.0
"""Seconds of running after which a program without reported steps is assumed to have made some.

Not if it ended with its own error: equal errors count however long the attempt ran.
"""

FIRST_STEP_HORIZON_S = 30.0
"""Seconds for which a program that never connected to its agent's socket is assumed to be before its first step."""

STOP_GRACE_S = 20.0
"""Seconds beyond the requested grace period that a node may take to stop its ranks before it counts as lost."""

HANG_VERDICT_S = 8.0
"""Seconds the other ranks have to report after the first reported a hang; longer than py-spy takes for a node."""

JOIN_TRIES = 3
"""Times in a row that a node is created again because it does not join."""

CHECK_TRIES = 2
"""Nodes in a row that may fail their checks in one slot: the second is often on another machine."""

EXIT_GRACE_S = 5.0
"""Seconds that ranks which must exit have after their checkpoint, before SIGTERM."""

SCALE_UP_PAUSE_S = 60.0
"""Seconds between the first two times that a run adds nodes; each later wait is twice as long."""


CRASH_SIGNALS = (
    signal.SIGSEGV,
    signal.SIGABRT,
    signal.SIGBUS,
    signal.SIGFPE,
    signal.SIGILL,
    signal.SIGTRAP,
    signal.SIGSYS,
)
"""Signals that a program causes itself."""

_MACHINE_SIGNALS = (signal.SIGBUS, signal.SIGSEGV, signal.SIGILL, signal.SIGABRT, signal.SIGKILL)
"""Signals that end ranks on a bad machine too; a kill for lack of memory is another kind of failure."""

_FAULT_HANDLER = "Fatal Python error:"
"""Begins the line that Python's faulthandler writes for a signal; it says no more than the signal."""

_SHELL_SIGNALS = range(129, 193)
"""Exit codes by which a shell reports that a signal killed its program."""


FLAP_LIMIT = 3
"""Failures in a row, each soon after the last, after which one of several replicas gets another node."""

FLAP_S = 60.0
"""A replica that ran this many seconds does not flap."""

BACK_OFF_S, MAX_BACK_OFF_S = 1.0, 60.0
"""Seconds that a replica waits before its second restart in a row, doubled before each further one, and the maximum."""

PROGRESS_STEPS = EARLY_STEPS
"""Steps of an attempt after which it made progress and no longer compiles: the next restart waits for nothing."""


class FailureKind(StrEnum):
    """What ended an attempt; the value is the finding's code."""

    NOT_STARTED = "program-not-started"
    CODE_DELIVERY_FAILED = "code-not-delivered"
    CRASHED = "rank-crashed"
    TERMINATED_EXTERNALLY = "rank-terminated-externally"
    """Another process sent it SIGTERM: it saved and exited with code 75."""
    KILLED = "rank-killed"
    OUT_OF_MEMORY = "rank-out-of-memory"
    LAUNCHER_ORPHANED_RANKS = "launcher-orphaned-ranks"
    DISK_FULL = "disk-full"
    READ_ONLY = "read-only-file-system"
    SPAWN_RESOURCES_EXHAUSTED = "spawn-resources-exhausted"
    """The node had no file descriptors, processes or memory left."""
    PORT_IN_USE = "rendezvous-port-in-use"
    HUNG = "rank-hung"
    NUMBERS_DAMAGED = "weights-not-finite"
    """Weights or optimizer state are NaN or infinite."""
    SPIKED = "loss-spike"
    """Its loss or gradient norm is far above its running median."""
    CORRUPTED = "silent-corruption"
    """It holds or computes other numbers than the ranks that must be equal to it."""
    DIVERGED = "ranks-diverged"
    """Ranks that must be equal differ, and none is proven to be wrong."""
    STRAGGLING = "straggler"
    """It computes slower than the other ranks, which wait for it."""
    NODE_LOST = "node-lost"
    NODE_PREEMPTED = "node-preempted"
    NEVER_JOINED = "node-never-joined"
    CHECK_FAILED = "node-check-failed"
    GPU_FAILED = DeviceFault.GPU.value
    GPU_MEMORY_FAILED = DeviceFault.MEMORY.value
    NVLINK_FAILED = DeviceFault.NVLINK.value
    GPU_NEEDS_RESET = DeviceFault.RESET.value
    NIC_FAILED = DeviceFault.NIC.value
    GPU_NOT_READY = DeviceFault.NOT_READY.value
    GPU_MEMORY_ERROR_CONTAINED = DeviceFault.CONTAINED.value
    NIC_LINK_DOWN = DeviceFault.NIC_LINK_DOWN.value
    GPU_ERROR_UNCLEAR = DeviceFault.UNCLEAR.value
    NCCL_SYSTEM_CALL_FAILED = DeviceFault.NCCL_SYSTEM.value
    NCCL_PEER_GONE = DeviceFault.NCCL_REMOTE.value
    CAUSE_UNKNOWN = "failure-cause-unknown"
    """It ended without evidence: the log may have lost a line."""


class Failure(Struct, frozen=True, kw_only=True):
    """What ended an attempt, as far as its evidence shows."""

    kind: FailureKind
    at: float
    """Unix seconds."""
    node: int | None
    """None if unknown."""
    machine: str = ""
    """The machine of the node, or else the node and its generation: equal for failures of one machine."""
    attempt: int
    replica: int = 0
    rank: int | None = None
    log_owner_rank: int | None = None
    """The rank whose log file holds its output, if that is another rank."""
    code: int = 0
    """Exit code, or the signal's number."""
    error: str = ""
    """The rank's last error line, or the target's reason."""
    evidence: tuple[str, ...] = ()
    where: str = ""
    step: int = 0
    """Highest step committed when it happened; 0 without a Session, whose steps alone have numbers that last."""
    made_progress: bool = False
    """Whether its replica had committed `PROGRESS_STEPS` steps in the attempt."""
    has_session: bool = False
    uptime_s: float = 0.0
    is_peer_symptom: bool = False
    """Whether its error only reports that a peer is gone."""
    is_network_error: bool = False
    """Whether its error is about a connection, perhaps to a server that will return."""
    evicted: bool = False
    """Whether the queue or the cluster evicted the node: not a fault of the run, and it costs no restart."""
    no_replay: str = ""
    """Why its nodes cannot repeat its last steps; empty if they can."""
    waiting_rank: int | None = None
    """The rank that gave up waiting for this one."""
    holds_up_others: bool = False
    """Whether flight recorders show that this hung rank keeps the others waiting, and made no call that differs."""
    confirmed: bool = False
    """Whether a detector saw it often enough to be sure of the node."""
    is_origin: bool = True
    """Whether it began with this rank; False for wrong numbers that it may have received from another."""
    tainted_checkpoints: int = 0
    """Newest checkpoints that were taken after its numbers had become wrong."""
    was_updated: bool = False
    """Whether the run's code was updated, and the code before that update can run again."""
    excused: bool = False
    """Whether something else than its node explains it: a drill, or several nodes that were lost together."""

    @property
    def subject(self) -> str:
        """The rank and node it happened to, or the attempt if they are unknown."""
        if self.node is None:
            return f"attempt {self.attempt}{replica_suffix(self.replica)}"
        whose = "" if self.rank is None else f"rank {self.rank}{replica_suffix(self.replica)} on "
        return f"{whose}node{self.node}"

    @property
    def is_program_error(self) -> bool:
        """Whether the program ended with its own error, caused by no peer, node or user."""
        if self.is_peer_symptom or self.kind not in (FailureKind.CRASHED, FailureKind.KILLED):
            return False
        number = self.code if self.kind is FailureKind.KILLED else self.code - 128
        by_signal = self.kind is FailureKind.KILLED or self.code in _SHELL_SIGNALS
        return not by_signal or number in CRASH_SIGNALS

    @property
    def is_before_first_step(self) -> bool:
        """Whether the run had most likely made no step."""
        unseen = self.step == 0 and not self.made_progress
        return unseen and (self.has_session or self.uptime_s < FIRST_STEP_HORIZON_S)

    @property
    def signature(self) -> tuple[FailureKind, int | None, int, str]:
        """Equal for failures that are the same failure again; ports, addresses and pids in the text may differ.

        Which rank first meets a program error or a full disk is chance. External causes, such as SIGKILL, a lost
        connection or a hang, are the same only on the same rank; so is an error without text.
        """
        anywhere = (self.is_program_error and self.error != "") or self.kind in _OF_ANY_RANK
        return (self.kind, None if anywhere else self.rank, self.code, normalize_error(self.error))


class NodeBlame(IntEnum):
    """How far a kind of failure is the fault of its node's devices."""

    NONE = 0
    SUSPECTED = 1
    """The first restarts in place; the second on one node within `recovery.suspect_window_s` replaces it."""
    CERTAIN = 2
    """The first replaces the node: a restart in place would fail again, or compute wrong numbers."""


class _KindText(Struct, frozen=True):
    """The text for a kind of failure, the exit code of a run that ends with it, and how far its node is at fault."""

    words: str
    """A clause about `who`."""
    owner: Owner
    exit_code: Callable[[int], int]
    """Computed from the failure's own code."""
    blame: NodeBlame = NodeBlame.NONE
    repair: str = ""
    """What the machine needs before it is used again."""


def _own(code: int) -> int:
    return code


def _signal_exit_code(number: int) -> int:
    return 128 + number


def _always(code: int) -> Callable[[int], int]:
    return lambda _: code


_KINDS: dict[FailureKind, _KindText] = {
    FailureKind.NOT_STARTED: _KindText("{who} could not be started", Owner.USER, _own),
    FailureKind.CODE_DELIVERY_FAILED: _KindText(
        "{who} did not get its code", Owner.CLUSTER, _always(ExitCode.UNAVAILABLE)
    ),
    FailureKind.CRASHED: _KindText("{who} exited with code {failure.code}", Owner.USER, _own),
    FailureKind.TERMINATED_EXTERNALLY: _KindText(
        "{who} received SIGTERM from another process, and exited after a checkpoint", Owner.CLUSTER, _own
    ),
    FailureKind.KILLED: _KindText("{who} was ended by {signal}", Owner.CLUSTER, _signal_exit_code),
    FailureKind.OUT_OF_MEMORY: _KindText("{who} was ended for lack of memory", Owner.USER, _signal_exit_code),
    FailureKind.LAUNCHER_ORPHANED_RANKS: _KindText(
        "the launcher of {who} ended with code 0 and left ranks running", Owner.CLUSTER, _always(1)
    ),
    FailureKind.PORT_IN_USE: _KindText("{who} found its rendezvous port in use", Owner.CLUSTER, _own),
    FailureKind.HUNG: _KindText("{who} completed no step within its timeout", Owner.USER, _always(ExitCode.HUNG)),
    FailureKind.NUMBERS_DAMAGED: _KindText(
        "weights are no longer finite, and {who} was the first", Owner.USER, _always(ExitCode.CANNOT_RUN_HERE)
    ),
    FailureKind.SPIKED: _KindText(
        "the loss or gradient norm of {who} spiked", Owner.USER, _always(ExitCode.CANNOT_RUN_HERE)
    ),
    FailureKind.CORRUPTED: _KindText(
        "{who} held or computed wrong numbers, and nothing reported an error",
        Owner.CLUSTER,
        _always(ExitCode.NODES_LOST),
        NodeBlame.CERTAIN,
        "test its devices and memory; if it happens again, replace them",
    ),
    FailureKind.DIVERGED: _KindText(
        "ranks that must be equal differed, among them {who}", Owner.CLUSTER, _always(ExitCode.CANNOT_RUN_HERE)
    ),
    FailureKind.STRAGGLING: _KindText(
        "{who} was slower than the other ranks",
        Owner.CLUSTER,
        _always(ExitCode.NODES_LOST),
        NodeBlame.SUSPECTED,
        "compare clocks, temperature and power limit of its devices with other machines",
    ),
    FailureKind.NODE_LOST: _KindText("{who} was lost", Owner.CLUSTER, _always(ExitCode.NODES_LOST)),
    FailureKind.NODE_PREEMPTED: _KindText("{who} is taken away", Owner.CLUSTER, _always(ExitCode.NODES_LOST)),
    FailureKind.NEVER_JOINED: _KindText("{who} has not joined", Owner.CLUSTER, _always(ExitCode.NODES_LOST)),
    FailureKind.CHECK_FAILED: _KindText("{who} failed its checks", Owner.CLUSTER, _always(ExitCode.CANNOT_RUN_HERE)),
    FailureKind.GPU_FAILED: _KindText(
        "{who} lost its GPU",
        Owner.CLUSTER,
        _always(ExitCode.NODES_LOST),
        NodeBlame.CERTAIN,
        "power-cycle it; if the GPU fails again, replace the GPU",
    ),
    FailureKind.GPU_MEMORY_FAILED: _KindText(
        "{who} ended: a GPU's memory failed beyond correction",
        Owner.CLUSTER,
        _always(ExitCode.NODES_LOST),
        NodeBlame.CERTAIN,
        "reset the GPU so that the row is remapped; if it fails again, replace the GPU",
    ),
    FailureKind.NVLINK_FAILED: _KindText(
        "{who} ended: a link between GPUs failed",
        Owner.CLUSTER,
        _always(ExitCode.NODES_LOST),
        NodeBlame.CERTAIN,
        "reset its GPUs or reboot it; if the same link fails again, replace it",
    ),
    FailureKind.GPU_NEEDS_RESET: _KindText(
        "{who} ended: a GPU must be reset",
        Owner.CLUSTER,
        _always(ExitCode.NODES_LOST),
        NodeBlame.CERTAIN,
        "reset the GPU (`nvidia-smi --gpu-reset -i N`) or reboot it",
    ),
    FailureKind.NIC_FAILED: _KindText(
        "{who} ended: a network adapter failed",
        Owner.CLUSTER,
        _always(ExitCode.NODES_LOST),
        NodeBlame.CERTAIN,
        "power-cycle it, then check the adapter's firmware and cooling",
    ),
    FailureKind.GPU_NOT_READY: _KindText(
        "{who} ended: the GPUs of its node are not ready",
        Owner.CLUSTER,
        _always(ExitCode.NODES_LOST),
        NodeBlame.CERTAIN,
        "start nvidia-fabricmanager in the driver's version",
    ),
    FailureKind.GPU_MEMORY_ERROR_CONTAINED: _KindText(
        "{who} ended: a GPU's memory failed, which affected only this program",
        Owner.CLUSTER,
        _own,
        NodeBlame.SUSPECTED,
        "reset the GPU at the next pause so that the row is remapped",
    ),
    FailureKind.NIC_LINK_DOWN: _KindText(
        "{who} ended: a network adapter lost its link",
        Owner.CLUSTER,
        _own,
        NodeBlame.SUSPECTED,
        "check cable, transceiver and switch port",
    ),
    FailureKind.GPU_ERROR_UNCLEAR: _KindText(
        "{who} ended with a CUDA error of which program or GPU may be the cause",
        Owner.CLUSTER,
        _own,
        NodeBlame.SUSPECTED,
        "test the GPU (`dcgmi diag -r 3`)",
    ),
    FailureKind.NCCL_SYSTEM_CALL_FAILED: _KindText(
        "{who} ended: NCCL failed in a call to the system or the network",
        Owner.CLUSTER,
        _own,
        NodeBlame.SUSPECTED,
        "check its network adapters, /dev/shm and limits; NCCL_DEBUG=WARN names the call",
    ),
    FailureKind.NCCL_PEER_GONE: _KindText(
        "{who} ended: NCCL reports that a peer has gone, and no rank reports why", Owner.CLUSTER, _own
    ),
    FailureKind.DISK_FULL: _KindText(
        "{who} ended because a disk is full", Owner.CLUSTER, _always(ExitCode.STORAGE_FAILED)
    ),
    FailureKind.READ_ONLY: _KindText(
        "{who} ended because a file system is read-only", Owner.CLUSTER, _always(ExitCode.STORAGE_FAILED)
    ),
    FailureKind.SPAWN_RESOURCES_EXHAUSTED: _KindText(
        "{who} could not be started: its node has no file descriptors, processes or memory left",
        Owner.CLUSTER,
        _always(ExitCode.CANNOT_RUN_HERE),
    ),
    FailureKind.CAUSE_UNKNOWN: _KindText(
        "attempt {failure.attempt} ended, and the log does not say why", Owner.CLUSTER, _always(ExitCode.STORAGE_FAILED)
    ),
}
_NOT_TRACED = "weights are no longer finite; {who} is among the first"
"""For wrong numbers that ranks had already exchanged when they were seen."""

_NEVER_ARRIVED = "{who} did not arrive before rank {failure.waiting_rank} timed out waiting for it"
"""For a rank that hung while another gave up waiting."""

_OF_ANY_RANK = (
    FailureKind.OUT_OF_MEMORY,
    FailureKind.DISK_FULL,
    FailureKind.READ_ONLY,
    FailureKind.SPAWN_RESOURCES_EXHAUSTED,
    FailureKind.GPU_ERROR_UNCLEAR,
    FailureKind.NCCL_SYSTEM_CALL_FAILED,
)
"""Besides program errors: failures that any rank may meet first."""

_LIKELY_SETTINGS_AT_FIRST = (FailureKind.GPU_ERROR_UNCLEAR, FailureKind.NCCL_SYSTEM_CALL_FAILED)
"""Device faults that before the run's first step are mostly errors of the program or its settings: a small /dev/shm."""

_OF_MACHINE_OR_PROGRAM = (FailureKind.HUNG, FailureKind.KILLED)
"""Failures without the trace of a device, of which a bad machine or the program may be the cause."""

_BEFORE_THE_PROGRAM = (
    FailureKind.NOT_STARTED,
    FailureKind.CODE_DELIVERY_FAILED,
    FailureKind.SPAWN_RESOURCES_EXHAUSTED,
    FailureKind.PORT_IN_USE,
    FailureKind.NEVER_JOINED,
    FailureKind.CHECK_FAILED,
)
"""Failures before the program has done any work."""

_OF_NODES = (FailureKind.NODE_LOST, FailureKind.NODE_PREEMPTED, FailureKind.NEVER_JOINED, FailureKind.CHECK_FAILED)

_OF_NUMBERS = (FailureKind.NUMBERS_DAMAGED, FailureKind.SPIKED, FailureKind.DIVERGED)
"""Failures of the training itself: ranks run, and what they compute is wrong."""

_WHERE_TO_LOOK = (
    "Its agent's own log says why, if the target keeps one: nodes/node{node}.*/agent.log in the run's folder."
)

_STARTS_OVER = (
    "Unless the program loads its own checkpoint, it repeats all it did: it has opened no Session, so holdfast has no "
    "checkpoint of it."
)

_STARTED_AGAIN = (
    "No standby is ready, so its target starts the node again, on the same machine unless it chooses another one. On "
    "Kubernetes without a volume or a URL, the checkpoints in its pod are lost."
)

_ADMITTED_AGAIN = (
    "Nothing: the run resumes when the cluster has room for it. An eviction costs no restart of recovery.max_restarts."
)


_ERRNO = re.compile(r"\[Errno (\d+)\]")
_COMMAND = "Check the command and the working directory: `holdfast validate`."
_START_REMEDIES = {
    errno.ENOENT: "The program, its interpreter and the working directory must exist on every node: `holdfast render`.",
    errno.EACCES: "Make the program executable (`chmod +x`), or begin the command with its interpreter.",
    errno.ENOEXEC: "Begin the file with `#!` and its interpreter, or the command with that interpreter.",
    errno.E2BIG: "Write large values to a file and name it in the variable: Linux limits each to 128 KiB.",
}
"""Remedies by the errno with which the operating system refused to start a program."""


class Action(StrEnum):
    """The action that follows a failure."""

    RESTART = "restart in place"
    CHECK_NODES = "check the nodes and restart"
    GO_BACK = "restart from an earlier checkpoint"
    REPLAY = "replay the last steps on groups of nodes and restart"
    REPLACE_NODE = "replace the node and restart"
    PROMOTE = "put a standby in its place and restart"
    STOP = "stop"
    ROLL_BACK = "roll back to the code before the update"
    IGNORE = "ignore: another replica has finished"


class Spare(StrEnum):
    """What takes the place of a node that is replaced; the value says what the run does meanwhile."""

    STANDBY = "A standby takes its place."
    FEWER_NODES = "No standby is ready, so the run continues with fewer nodes until its target has another one."
    OTHER_REPLICAS = "No standby is ready, so only the other replicas train until its target has another node."
    NONE = "No standby is ready: the run continues once its target has another node."


class Verdict(Struct, frozen=True, kw_only=True):
    """The decision on a failure: the action, the finding, and the exit code if it ends the run."""

    action: Action
    finding: Finding
    exit_code: int = 0
    wait_s: float = 0.0
    """Seconds to wait before the next attempt."""
    replace_node: bool = False
    """Whether `_recover` replaces the node although it is there; `lose_nodes` has already replaced a lost one."""
    avoid_machine: bool = False
    """Whether its machine is not to be used again, nor by other jobs where the run may have them avoid it."""
    certainty: Certainty = Certainty.NAMED
    """How sure it is that an avoided machine is at fault."""
    is_suspicion: bool = False
    """Whether the node is replaced because its machine may be the cause."""
    check_nodes: bool = False
    """Whether its nodes are checked and probe each other before the next attempt."""
    checkpoints_back: int = 0
    """Newest checkpoints that the next attempt sets aside."""
    replay_nodes: bool = False
    """Whether groups of its nodes repeat the last steps before the next attempt."""
    rolls_code_back: bool = False
    """Whether the next attempt runs the code before the last update."""
    recomputed_s: float = 0.0
    """Seconds of work that the next attempt repeats, unless the program loads its own checkpoint.

    0 if steps are reported, or if another replica has the state.
    """


def node_blame(fault: DeviceFault | FailureKind) -> NodeBlame:
    """How far a fault of a device, or a kind of failure, is its node's."""
    return _KINDS[FailureKind(fault.value)].blame


def ignored(failure: Failure) -> Verdict:
    """A failure that no longer matters, because another replica has finished the training."""
    return Verdict(action=Action.IGNORE, finding=_finding(failure, "", "Nothing: another replica has finished."))


def rolled_back(failure: Failure) -> Verdict:
    """A failure of code on trial: the previous code runs again."""
    remedy = (
        "Fix the code and update again: the previous code resumes from the transferred state, or a newer checkpoint."
    )
    return Verdict(action=Action.ROLL_BACK, finding=_finding(failure, "soon after it got other code", remedy))


def quorum_finding(at_work: int, replicas: int, least: int) -> Finding:
    """The finding for when the quorum for a step is lost or restored."""
    few = at_work < least
    rest = f"no step is committed until {least} are" if few else "steps are committed again"
    return Finding(
        code="replica-quorum-lost" if few else "replica-quorum-regained",
        severity=Severity.WARNING if few else Severity.INFO,
        what=f"{at_work} of {replicas} replicas are at work, and {rest}",
        where="recovery.min_replicas" if few else "",
        remedy="Nothing: those that are lost are being started again." if few else "",
        owner=Owner.CLUSTER,
    )


def scale_up_due(scale_ups: tuple[float, ...], at: float, restart_window_s: float) -> float:
    """When a run that added nodes at these times may do so again, in Unix seconds."""
    recent = [scale_up for scale_up in scale_ups if scale_up > at - restart_window_s]
    return recent[-1] + SCALE_UP_PAUSE_S * 2 ** (len(recent) - 1) if recent else at


def decide(failure: Failure, earlier: tuple[Failure, ...], recovery: Recovery, spare: Spare = Spare.NONE) -> Verdict:
    """Decide what follows a failure, given earlier ones of all replicas (oldest first) and the recovery settings.

    `spare` is what would take the place of its node.
    """
    of_replica = tuple(one for one in earlier if one.replica == failure.replica)
    for rule in _RULES:
        verdict = rule(failure, earlier if rule in _ACROSS_REPLICAS else of_replica, recovery)
        if verdict is not None:
            return _with_spare(verdict, spare)
    raise AssertionError("the last rule always applies")


def _with_spare(verdict: Verdict, spare: Spare) -> Verdict:
    """The verdict on a node, with what takes its place; a machine that is only suspected may be used again."""
    if not (verdict.avoid_machine or verdict.is_suspicion):
        return verdict
    has_standby = spare is Spare.STANDBY
    instead = _STARTED_AGAIN if verdict.is_suspicion and not has_standby else spare
    return replace(
        verdict,
        action=Action.PROMOTE if has_standby else verdict.action,
        finding=msgspec.structs.replace(verdict.finding, remedy=f"{instead} {verdict.finding.remedy}"),
    )


def _not_started(failure: Failure, earlier: tuple[Failure, ...], recovery: Recovery) -> Verdict | None:
    if failure.kind is not FailureKind.NOT_STARTED:
        return None
    number = _ERRNO.search(failure.error)
    remedy = _START_REMEDIES.get(int(number[1]) if number else 0, _COMMAND)
    return _stop(failure, "a restart would fail too", remedy)


def _error_before_first_step(failure: Failure, earlier: tuple[Failure, ...], recovery: Recovery) -> Verdict | None:
    """A program that fails by itself before it has done anything would fail again."""
    if recovery.replicas > 1 and failure.attempt > 0:
        return None
    young = all(one.uptime_s < FIRST_STEP_HORIZON_S for one in (*earlier, failure))
    before = failure.step == 0 and not failure.is_peer_symptom and (failure.has_session or young)
    before = before and not failure.made_progress
    if failure.kind is not FailureKind.CRASHED or not before:
        return None
    soon = "before its first step, so a restart would fail too"
    if not failure.has_session:  # its progress in that time is unknown
        soon = f"within {max(1, math.ceil(failure.uptime_s))} s of its start, so a restart would most likely fail too"
    return _stop(
        failure,
        f"it failed by itself {soon}",
        f"Fix the error{f' ({failure.where})' if failure.where else ''} and run again.",
    )


def _crash_loop(failure: Failure, earlier: tuple[Failure, ...], recovery: Recovery) -> Verdict | None:
    """A program without reported steps may have made progress between two signals, if it ran long enough.

    Its own error, with the same text, is the same error again, however late it comes; one about a connection is not. A
    lost node and a used port are not repeated by the program.
    """
    if failure.kind in (*_OF_NODES, *_OF_NUMBERS, FailureKind.PORT_IN_USE):
        return None
    unseen = not failure.has_session and failure.uptime_s > CRASH_LOOP_HORIZON_S
    if unseen and not (failure.is_program_error and failure.error and not failure.is_network_error):
        return None
    # One of several replicas gets another node first.
    length = CRASH_LOOP_LENGTH if recovery.replicas == 1 else FLAP_LIMIT + CRASH_LOOP_LENGTH
    last = (*earlier, failure)[-length:]
    same = all(one.signature == failure.signature and one.step == failure.step for one in last)
    if len(last) < length or not same:
        return None
    stepless = failure.step == 0 and not any(one.has_session for one in last)
    between = "and no Session reports steps" if stepless else "without a step between"
    row = resource_error_in(failure.error)
    came = ", ".join(filter(None, (f"the same failure came {length} times in a row", _on_whom(last), between)))
    return _stop(
        failure,
        f"{came}, so the run stops",
        row.remedy if row else _ends_the_loop(last, stepless=stepless),
    )


def _on_whom(last: tuple[Failure, ...]) -> str:
    """Whether equal failures keep to one rank, which a bad node would explain, or hit different ranks; if known."""
    if last[-1].node is None:
        return ""
    ranks = [one.rank for one in last if one.rank is not None]
    if len(set(ranks)) < 2:
        return "each time on the same rank"
    return f"on ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def _ends_the_loop(last: tuple[Failure, ...], *, stepless: bool) -> str:
    if last[-1].node is None:
        return "Check the disk of the run's folder: a line of the log is missing. `holdfast events` shows the rest."
    if all(_KINDS[one.kind].blame for one in last) and len({_machine(one) for one in last}) == len(last):
        return "Each was on another machine: look at what they share, such as image, driver, power or switch."
    if stepless:
        lived = ", ".join(f"{one.uptime_s:.0f} s" for one in last)
        return (
            f"Fix what ends it; the attempts lasted {lived}. If the program does get further each time, have it open a "
            "Session (holdfast.train): then only failures without a step between count."
        )
    remedy = "It does not depend on chance: look at the step after the last checkpoint and at that rank's log."
    if len({one.rank for one in last}) > 1:
        return f"{remedy} No single rank or node causes it."
    if len({_machine(one) for one in last}) > 1:
        return remedy
    return f"{remedy} If the other ranks do the same and never fail, suspect node{last[-1].node}."


def _never_joins(failure: Failure, earlier: tuple[Failure, ...], recovery: Recovery) -> Verdict | None:
    """A node that did not join after repeated tries will not join the next time."""
    if failure.kind is not FailureKind.NEVER_JOINED:
        return None
    tries = [one for one in (*earlier, failure) if (one.kind, one.node) == (failure.kind, failure.node)]
    if len([one for one in tries if one.attempt == failure.attempt]) < JOIN_TRIES:
        return None
    return _stop(failure, f"it was made {JOIN_TRIES} times", _WHERE_TO_LOOK.format(node=failure.node))


def _budget_spent(failure: Failure, earlier: tuple[Failure, ...], recovery: Recovery) -> Verdict | None:
    recent = [one for one in earlier if one.at > failure.at - recovery.restart_window_s and not one.evicted]
    if failure.evicted or len(recent) < recovery.max_restarts:
        return None
    window_s, allowed = recovery.restart_window_s, recovery.max_restarts
    why = f"{len(recent)} restarts within {window_s:g} s, and recovery.max_restarts is {allowed}"
    if recovery.max_restarts == 0:
        why = "recovery.max_restarts is 0"
    return _stop(failure, why, "If these failures are expected, raise recovery.max_restarts.")


def _replace(failure: Failure, earlier: tuple[Failure, ...], recovery: Recovery) -> Verdict | None:
    if failure.kind not in _OF_NODES:
        return None
    repeats_s = _repeats_s(failure, earlier, recovery)
    remedy = _ADMITTED_AGAIN if failure.evicted else "Nothing: the node is replaced."
    if repeats_s:
        remedy = f"{remedy if failure.evicted else 'The node is replaced.'} {_STARTS_OVER}"
    return Verdict(action=Action.REPLACE_NODE, finding=_finding(failure, "", remedy), recomputed_s=repeats_s)


def _device_failed(failure: Failure, earlier: tuple[Failure, ...], recovery: Recovery) -> Verdict | None:
    """A node is replaced at the first fault of its hardware, and at the second fault that may be of its hardware."""
    if not _has_device_fault(failure):
        return None
    kind = _KINDS[failure.kind]
    since = failure.at - recovery.suspect_window_s
    before = [one for one in earlier if one.at > since and _on_one_machine(one, failure) and _has_device_fault(one)]
    if not (kind.blame is NodeBlame.CERTAIN or failure.confirmed or before):
        return None
    window = f"of this node within recovery.suspect_window_s, {recovery.suspect_window_s:g} s"
    because = f"fault {len(before) + 1} {window}" if before else ""
    repeats_s = _repeats_s(failure, earlier, recovery)
    remedy = f"Before node{failure.node}'s machine is used again: {kind.repair}."
    return Verdict(
        action=Action.REPLACE_NODE,
        finding=_finding(failure, because, f"{remedy} {_STARTS_OVER}" if repeats_s else remedy),
        replace_node=True,
        avoid_machine=True,
        certainty=Certainty.CERTAIN if kind.blame is NodeBlame.CERTAIN else Certainty.NAMED,
        recomputed_s=repeats_s,
    )


def _suspect_node(failure: Failure, earlier: tuple[Failure, ...], recovery: Recovery) -> Verdict | None:
    """A node is replaced at the second failure that its machine may have caused, if no other machine had one alike.

    Failures of other replicas count only if they acquit it. One of several replicas that fails soon after it started
    flaps, which is another rule's.
    """
    if recovery.replicas > 1 and failure.uptime_s < FLAP_S:
        return None
    recent = [one for one in (*earlier, failure) if one.at > failure.at - recovery.suspect_window_s]
    elsewhere = {_ending(one) for one in recent if not one.excused and not _on_one_machine(one, failure)}
    own = [
        one
        for one in recent
        if one.replica == failure.replica
        and _on_one_machine(one, failure)
        and _may_be_of_machine(one)
        and (one.kind not in _OF_MACHINE_OR_PROGRAM or _ending(one) not in elsewhere)
    ]
    if len(own) < 2 or own[-1] is not failure:
        return None
    unlike = "" if _ending(failure) in elsewhere else ", and none like it elsewhere"
    because = (
        f"failure {len(own)} of this node within recovery.suspect_window_s, {recovery.suspect_window_s:g} s{unlike}"
    )
    repair, machine = _KINDS[failure.kind].repair, f"node{failure.node}'s machine"
    remedy = f"On {machine}: {repair}." if repair else f"Test {machine}."
    remedy = f"{remedy} If the same happens on another one, the program is the cause."
    repeats_s = _repeats_s(failure, earlier, recovery)
    finding = _finding(failure, because, f"{remedy} {_STARTS_OVER}" if repeats_s else remedy)
    before = tuple(f"{failure.at - one.at:.0f} s before: {_describe(one)}" for one in own[-4:-1])
    return Verdict(
        action=Action.REPLACE_NODE,
        finding=msgspec.structs.replace(finding, evidence=(*finding.evidence, *before), owner=Owner.CLUSTER),
        replace_node=True,
        is_suspicion=True,
        recomputed_s=repeats_s,
    )


class _Level(Struct, frozen=True, kw_only=True):
    """What follows a failure without a culprit, the more often it has come."""

    words: str
    action: Action
    check_nodes: bool = False
    checkpoints_back: int = 0
    rolls_code_back: bool = False
    """If the code was updated."""
    replay_nodes: bool = False
    """The run stops instead if its nodes cannot."""


_CHECK_NODES = _Level(
    words="Its nodes are checked, then all ranks restart from the last checkpoint.",
    action=Action.CHECK_NODES,
    check_nodes=True,
)
_GO_BACK = _Level(
    words="All ranks restart from the checkpoint before the last one.",
    action=Action.GO_BACK,
    checkpoints_back=1,
    rolls_code_back=True,
)
_CHECK_AND_GO_BACK = _Level(
    words="Its nodes are checked again, then all ranks restart from one more checkpoint before.",
    action=Action.GO_BACK,
    check_nodes=True,
    checkpoints_back=1,
)
_REPLAY = _Level(
    words="Groups of its nodes repeat the steps after the checkpoint before the last one, to find a bad node; then all "
    "ranks restart from there.",
    action=Action.REPLAY,
    checkpoints_back=1,
    replay_nodes=True,
)
_ALL_LEVELS = (_CHECK_NODES, _GO_BACK, _CHECK_AND_GO_BACK, _REPLAY)
_CHECKED_WITHOUT_SESSION = f"Its nodes are checked, then all ranks restart. {_STARTS_OVER}"
_WITH_EARLIER_CODE = "All ranks restart with the code before the last update, from the checkpoint before the last one."


class _Unexplained(Struct, frozen=True, kw_only=True):
    """Failures that neither a device nor the program explains, and what follows each in a row."""

    applies: Callable[[Failure], bool]
    tolerated: int
    """The first so many restart as usual."""
    levels: tuple[_Level, ...]
    window_s: float | None = None
    """Seconds in which they count; None means `recovery.restart_window_s`."""
    is_last_repeated: bool = False
    """Whether the last level follows all further ones too; else the run stops."""

    def counts(self, failure: Failure) -> bool:
        """Whether a failure is one of these."""
        unknown = not failure.excused and not failure.is_before_first_step
        return unknown and self.applies(failure)


def _has_wrong_numbers(failure: Failure) -> bool:
    return failure.kind in _OF_NUMBERS


def _hangs_without_culprit(failure: Failure) -> bool:
    return failure.kind is FailureKind.HUNG and not failure.holds_up_others


def _crashed_silently(failure: Failure) -> bool:
    silent = not failure.error or failure.error.startswith(_FAULT_HANDLER)
    return failure.kind is FailureKind.KILLED and failure.code in CRASH_SIGNALS and silent


def _lost_a_connection(failure: Failure) -> bool:
    return failure.kind is FailureKind.CRASHED and failure.is_network_error


_UNEXPLAINED = (
    _Unexplained(applies=_has_wrong_numbers, tolerated=0, levels=_ALL_LEVELS),
    _Unexplained(applies=_hangs_without_culprit, tolerated=1, levels=_ALL_LEVELS),
    _Unexplained(applies=_crashed_silently, tolerated=1, levels=_ALL_LEVELS),
    _Unexplained(
        applies=_lost_a_connection, tolerated=2, levels=(_CHECK_NODES,), window_s=300.0, is_last_repeated=True
    ),
)
"""The stop-diagnose flow: the first row that applies counts the failures like it, and takes the level for that number.

docs/watch.md explains it for users.
"""


def _without_culprit(failure: Failure, earlier: tuple[Failure, ...], recovery: Recovery) -> Verdict | None:
    """A failure that neither a device nor the program explains: check the nodes, then go back further each time."""
    row = next((row for row in _UNEXPLAINED if row.counts(failure)), None)
    if row is None:
        return None
    window_s = recovery.restart_window_s if row.window_s is None else row.window_s
    like = [one for one in earlier if one.at > failure.at - window_s and row.counts(one)]
    number = len(like) - row.tolerated
    has_session = _has_reported(failure, earlier)
    if number < 0 or (number > 0 and not has_session and not row.is_last_repeated):
        return None  # without a Session there is no known checkpoint to go back to
    window = "recovery.restart_window_s" if row.window_s is None else f"{window_s:g} s"
    because = f"failure {len(like) + 1} of this kind within {window}" if like else ""
    level = row.levels[min(number, len(row.levels) - 1)]
    over = number >= len(row.levels) and not row.is_last_repeated
    if over or (level.replay_nodes and failure.no_replay):
        no_replay = "" if over else f"; no replay is possible: {failure.no_replay}"
        because = f"{because}, whatever its nodes' checks and earlier checkpoints{no_replay}"
        return _stop(failure, because, "Resume from an older checkpoint, or change the program or its data.")
    rolls_back = level.rolls_code_back and failure.was_updated
    words = _WITH_EARLIER_CODE if rolls_back else level.words if has_session else _CHECKED_WITHOUT_SESSION
    return Verdict(
        action=Action.ROLL_BACK if rolls_back else level.action,
        finding=_finding(failure, because, words),
        check_nodes=level.check_nodes,
        checkpoints_back=level.checkpoints_back,
        replay_nodes=level.replay_nodes,
        rolls_code_back=rolls_back,
        recomputed_s=_repeats_s(failure, earlier, recovery),
    )


def _may_be_of_machine(failure: Failure) -> bool:
    """Whether its machine may have caused a failure: nothing that the program reports, and no setting, explains it."""
    if failure.excused or failure.evicted or failure.node is None:
        return False
    if failure.kind is FailureKind.NODE_LOST:
        return True
    if failure.kind not in _OF_MACHINE_OR_PROGRAM:
        return _has_device_fault(failure)
    if failure.is_before_first_step or failure.is_peer_symptom or failure.is_network_error:
        return False
    if failure.kind is FailureKind.HUNG:
        return failure.holds_up_others
    silent = not failure.error or failure.error.startswith(_FAULT_HANDLER)
    return failure.code in _MACHINE_SIGNALS and (silent or failure.code == signal.SIGKILL)


def _has_device_fault(failure: Failure) -> bool:
    """Whether a device of its node may have failed, and no setting explains it."""
    is_setting = failure.kind in _LIKELY_SETTINGS_AT_FIRST and failure.is_before_first_step
    return _KINDS[failure.kind].blame is not NodeBlame.NONE and not is_setting


def _ending(failure: Failure) -> tuple[FailureKind, int]:
    """How an attempt ended, equal for failures that one cause in the program would explain."""
    return failure.kind, failure.code


def _machine(failure: Failure) -> str | int | None:
    return failure.machine or failure.node


def _on_one_machine(one: Failure, other: Failure) -> bool:
    return _machine(one) == _machine(other)


def _flapping(failure: Failure, earlier: tuple[Failure, ...], recovery: Recovery) -> Verdict | None:
    """A replica among several that fails repeatedly disturbs the others: it waits, then moves to another node.

    One that makes progress in between only moves.
    """
    known = (*earlier, failure)
    tries = _in_a_row(known, lambda one: one.uptime_s < FLAP_S)
    no_progress = _in_a_row(known, lambda one: one.uptime_s < FLAP_S and not one.made_progress)
    renews = tries > 0 and tries % FLAP_LIMIT == 0 and failure.node is not None
    if recovery.replicas == 1 or (no_progress < 2 and not renews):
        return None
    wait_s = min(MAX_BACK_OFF_S, BACK_OFF_S * 2.0 ** (no_progress - 2)) if no_progress > 1 else 0.0
    remedy = (
        f"Nothing: it is tried again {f'in {wait_s:g} s' if wait_s else 'immediately'}{', on another node' * renews}."
    )
    action = Action.REPLACE_NODE if renews else Action.RESTART
    return Verdict(action=action, finding=_finding(failure, "", remedy), wait_s=wait_s, replace_node=renews)


def _in_a_row(known: tuple[Failure, ...], holds: Callable[[Failure], bool]) -> int:
    """Number of latest failures for which `holds` is true."""
    return next((number for number, one in enumerate(reversed(known)) if not holds(one)), len(known))


def _restart(failure: Failure, earlier: tuple[Failure, ...], recovery: Recovery) -> Verdict | None:
    repeats_s = _repeats_s(failure, earlier, recovery)
    if recovery.replicas > 1:
        remedy = "Nothing: its replica alone restarts, and catches up from another."
    elif repeats_s:
        remedy = f"All ranks restart. {_STARTS_OVER}"
    elif _has_reported(failure, earlier):
        remedy = "Nothing: all ranks restart from the last checkpoint."
    else:
        remedy = "Nothing: all ranks restart."
    if _has_device_fault(failure):
        remedy = f"{remedy} A second fault of node{failure.node} within recovery.suspect_window_s replaces it."
    return Verdict(action=Action.RESTART, finding=_finding(failure, "", remedy), recomputed_s=repeats_s)


def _has_reported(failure: Failure, earlier: tuple[Failure, ...]) -> bool:
    """Whether the program is known to have a Session."""
    return any(one.has_session or one.step > 0 for one in (*earlier, failure))


def _repeats_s(failure: Failure, earlier: tuple[Failure, ...], recovery: Recovery) -> float:
    """Seconds that ranks of a program without a Session ran in the failed attempt; 0 if unknown."""
    judged = any(one.attempt == failure.attempt for one in earlier)
    ran = failure.attempt >= 0 and not judged and failure.kind not in _BEFORE_THE_PROGRAM
    known = recovery.replicas == 1 and not _has_reported(failure, earlier)
    return max(0.0, failure.uptime_s) if ran and known else 0.0


_RULES: tuple[Callable[[Failure, tuple[Failure, ...], Recovery], Verdict | None], ...] = (
    _not_started,
    _error_before_first_step,
    _crash_loop,
    _never_joins,
    _budget_spent,
    _device_failed,
    _suspect_node,
    _without_culprit,
    _replace,
    _flapping,
    _restart,
)
_ACROSS_REPLICAS = (_suspect_node,)
"""Rules that are given the failures of all replicas; a replica's own decide for the others."""


def _stop(failure: Failure, why: str, remedy: str) -> Verdict:
    exit_code = _KINDS[failure.kind].exit_code(failure.code)
    return Verdict(action=Action.STOP, finding=_finding(failure, why, remedy), exit_code=exit_code)


def never_joined_finding(node: int, reason: str) -> Finding:
    """The finding for a node that did not join in time, whether or not it was needed."""
    return Finding(
        code=FailureKind.NEVER_JOINED.value,
        severity=Severity.WARNING,
        what=f"node{node} has not joined and is replaced",
        where=f"node{node}",
        evidence=(reason,),
        remedy=_WHERE_TO_LOOK.format(node=node),
        owner=Owner.CLUSTER,
    )


def check_failed_finding(node: int, problem: Finding) -> Finding:
    """The finding of a node's check, which costs the node its place."""
    return msgspec.structs.replace(
        problem,
        severity=Severity.WARNING,
        what=f"node{node} gets no ranks: {problem.what}",
        where=f"{problem.where} on node{node}" if problem.where else f"node{node}",
    )


def _finding(failure: Failure, because: str, remedy: str) -> Finding:
    what = _describe(failure)
    return Finding(
        code=failure.kind.value,
        what=f"{what}; {because}" if because else what,
        where=failure.where or failure.subject,
        evidence=tuple(line for line in (failure.error, *failure.evidence) if line),
        remedy=remedy,
        owner=_KINDS[failure.kind].owner,
    )


def _describe(failure: Failure) -> str:
    """One plain clause: who, and what happened to it."""
    words = _KINDS[failure.kind].words if failure.waiting_rank is None else _NEVER_ARRIVED
    if failure.kind is FailureKind.NUMBERS_DAMAGED and not failure.is_origin:
        words = _NOT_TRACED
    return words.format(who=failure.subject, signal=signal_name(failure.code), failure=failure)
