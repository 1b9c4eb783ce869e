"""Owns the judgement: given a failure and what went before, what is to be done and how it is said.

Pure. Rules are rows, asked in order; the first that applies decides. The machine acts on the verdict and knows no rule.
A long file, because it is a table of failures and one of rules, and what these ask.
"""

from __future__ import annotations

import errno
import math
import re
import signal
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from holdfast.control.error_signature import normalize_error
from holdfast.errors import ExitCode
from holdfast.findings import Finding, Owner, Severity, replica_suffix
from holdfast.host.processes import signal_name
from holdfast.job.spec import Recovery
from holdfast.job.step_timeouts import EARLY_STEPS
from holdfast.os_errors import resource_error_in

CRASH_LOOP_LENGTH = 3
"""Equal failures in a row, without a step between them, that are called a crash loop."""

CRASH_LOOP_HORIZON_S = 60.0
"""A program that reports no steps is taken to have made some in an attempt that lived longer than this, in seconds,
unless it ended by an error of its own: equal errors count however long it lived."""

FIRST_STEP_HORIZON_S = 30.0
"""A program that never opened its holdfast channel is taken to be before its first step for this long, in seconds."""

STOP_GRACE_S = 20.0
"""Seconds beyond the asked grace that a node may take to end its ranks before it counts as lost."""

HANG_VERDICT_S = 8.0
"""Seconds the other ranks get to report after the first reported a hang; longer than py-spy takes for a node."""


JOIN_TRIES = 3
"""Times in a row that a node is made again because it does not join."""

EXIT_GRACE_S = 5.0
"""Seconds that ranks which were asked to leave get for it after their checkpoint, before they are told to end."""

SCALE_UP_PAUSE_S = 60.0
"""Seconds between the first two times that a run grows; each later time waits twice as long as the one before."""


CRASH_SIGNALS = (
    signal.SIGSEGV,
    signal.SIGABRT,
    signal.SIGBUS,
    signal.SIGFPE,
    signal.SIGILL,
    signal.SIGTRAP,
    signal.SIGSYS,
)
"""Signals that a program brings upon itself."""

_SHELL_SIGNALS = range(129, 193)
"""Exit codes by which a shell says that a signal ended its program."""


FLAP_LIMIT = 3
"""Failures in a row, each soon after the last, with which a replica among several is given another node."""

FLAP_S = 60.0
"""A replica that lived this long, in seconds, does not flap."""

BACK_OFF_S, MAX_BACK_OFF_S = 1.0, 60.0
"""Seconds that a replica waits before its second try in a row, twice as long before each further one, up to so long."""

PROGRESS_STEPS = EARLY_STEPS
"""Steps of a replica's attempt after which it has been of use, and compiles no more: the next try waits for nothing."""


class FailureKind(StrEnum):
    """What ended an attempt; the value is the finding's code."""

    NOT_STARTED = "program-not-started"
    CODE_DELIVERY_FAILED = "code-not-delivered"
    CRASHED = "rank-crashed"
    TERMINATED_EXTERNALLY = "rank-terminated-externally"
    """Somebody else sent it SIGTERM: it saved, and left with the code for that."""
    KILLED = "rank-killed"
    OUT_OF_MEMORY = "rank-out-of-memory"
    LAUNCHER_ORPHANED_RANKS = "launcher-orphaned-ranks"
    DISK_FULL = "disk-full"
    READ_ONLY = "read-only-file-system"
    SPAWN_RESOURCES_EXHAUSTED = "spawn-resources-exhausted"
    """The node had no files, processes or memory to give."""
    PORT_IN_USE = "rendezvous-port-in-use"
    HUNG = "rank-hung"
    NODE_LOST = "node-lost"
    NODE_PREEMPTED = "node-preempted"
    NEVER_JOINED = "node-never-joined"
    CAUSE_UNKNOWN = "failure-cause-unknown"
    """It ended without any word of why: a log that lost a line can tell no more."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """What ended an attempt, as far as its evidence tells."""

    kind: FailureKind
    at: float
    """Unix seconds."""
    node: int
    attempt: int
    replica: int = 0
    rank: int | None = None
    log_owner_rank: int | None = None
    """The rank in whose file its output is, where that is another's."""
    code: int = 0
    """Exit code, or the signal's number."""
    error: str = ""
    """The rank's last error line, or the back end's reason."""
    evidence: tuple[str, ...] = ()
    where: str = ""
    step: int = 0
    """Highest step committed when it happened."""
    made_progress: bool = False
    """Whether its replica had committed as many steps in the attempt as make it of use."""
    has_session: bool = False
    uptime_s: float = 0.0
    is_peer_symptom: bool = False
    """Whether its error only speaks of a peer that went away."""
    is_network_error: bool = False
    """Whether its error speaks of a connection, which may be one to a server that will be there again."""
    evicted: bool = False
    """Whether the run's queue took the node back: that is no fault of the run's, and costs no restart."""
    waiting_rank: int | None = None
    """The rank that gave up waiting for this one."""

    @property
    def subject(self) -> str:
        """What it happened to."""
        whose = "" if self.rank is None else f"rank {self.rank}{replica_suffix(self.replica)} on "
        return f"{whose}node{self.node}"

    @property
    def is_program_error(self) -> bool:
        """Whether the program ended by an error of its own, for which no peer, node or person is needed."""
        if self.is_peer_symptom or self.kind not in (FailureKind.CRASHED, FailureKind.KILLED):
            return False
        number = self.code if self.kind is FailureKind.KILLED else self.code - 128
        by_signal = self.kind is FailureKind.KILLED or self.code in _SHELL_SIGNALS
        return not by_signal or number in CRASH_SIGNALS

    @property
    def signature(self) -> tuple[FailureKind, int | None, int, str]:
        """Equal for failures that are the same failure again; ports, addresses and pids in its words may differ.

        Which rank meets an error of the program first, or a full disk, is chance. What comes from outside, such as
        SIGKILL, a lost connection or a hang, is the same again only on the same rank; so is an error without words.
        """
        anywhere = (self.is_program_error and self.error != "") or self.kind in _OF_ANY_RANK
        return (self.kind, None if anywhere else self.rank, self.code, normalize_error(self.error))


@dataclass(frozen=True)
class _KindText:
    """What is said of a kind of failure, and how a run leaves that ends with it."""

    words: str
    """A clause about `who`."""
    owner: Owner
    exit_code: Callable[[int], int]
    """Given the failure's own."""


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
        "{who} was told to stop by somebody else, and left after a checkpoint", Owner.CLUSTER, _own
    ),
    FailureKind.KILLED: _KindText("{who} was ended by {signal}", Owner.CLUSTER, _signal_exit_code),
    FailureKind.OUT_OF_MEMORY: _KindText("{who} was ended for lack of memory", Owner.USER, _signal_exit_code),
    FailureKind.LAUNCHER_ORPHANED_RANKS: _KindText(
        "the launcher of {who} ended with code 0 and left ranks at work", Owner.CLUSTER, _always(1)
    ),
    FailureKind.PORT_IN_USE: _KindText(
        "{who} found the port taken at which its attempt was to meet", Owner.CLUSTER, _own
    ),
    FailureKind.HUNG: _KindText("{who} passed no step within its deadline", Owner.USER, _always(ExitCode.HUNG)),
    FailureKind.NODE_LOST: _KindText("{who} was lost", Owner.CLUSTER, _always(ExitCode.NODES_LOST)),
    FailureKind.NODE_PREEMPTED: _KindText("{who} is taken away", Owner.CLUSTER, _always(ExitCode.NODES_LOST)),
    FailureKind.NEVER_JOINED: _KindText("{who} has not joined", Owner.CLUSTER, _always(ExitCode.NODES_LOST)),
    FailureKind.DISK_FULL: _KindText(
        "{who} ended because a disk is full", Owner.CLUSTER, _always(ExitCode.STORAGE_FAILED)
    ),
    FailureKind.READ_ONLY: _KindText(
        "{who} ended because a file system is read-only", Owner.CLUSTER, _always(ExitCode.STORAGE_FAILED)
    ),
    FailureKind.SPAWN_RESOURCES_EXHAUSTED: _KindText(
        "{who} could not be started: its node has no files, processes or memory to give",
        Owner.CLUSTER,
        _always(ExitCode.CANNOT_RUN_HERE),
    ),
    FailureKind.CAUSE_UNKNOWN: _KindText(
        "attempt {failure.attempt} ended, and the log does not say why", Owner.CLUSTER, _always(ExitCode.STORAGE_FAILED)
    ),
}
_NEVER_ARRIVED = "{who} did not come where rank {failure.awaited_by} waited for it until its time was up"
"""Of one that hung, where another gave up."""

_OF_ANY_RANK = (
    FailureKind.OUT_OF_MEMORY,
    FailureKind.DISK_FULL,
    FailureKind.READ_ONLY,
    FailureKind.SPAWN_RESOURCES_EXHAUSTED,
)
"""Beside a program's own errors: what any rank may be the first to meet."""

_BEFORE_THE_PROGRAM = (
    FailureKind.NOT_STARTED,
    FailureKind.CODE_DELIVERY_FAILED,
    FailureKind.SPAWN_RESOURCES_EXHAUSTED,
    FailureKind.PORT_IN_USE,
    FailureKind.NEVER_JOINED,
)
"""What fails before the program has done any work."""

_OF_NODES = (FailureKind.NODE_LOST, FailureKind.NODE_PREEMPTED, FailureKind.NEVER_JOINED)

_WHERE_TO_LOOK = (
    "Its agent's own log says why, where the place keeps one: nodes/node{node}.*/agent.log in the run's folder."
)

_STARTS_OVER = (
    "Unless the program loads a checkpoint of its own, it repeats all it did: it reports no steps, so holdfast has no "
    "checkpoint of it."
)

_ADMITTED_AGAIN = (
    "Nothing: the run resumes when its queue admits it again. An eviction costs no restart of recovery.max_restarts."
)


_ERRNO = re.compile(r"\[Errno (\d+)\]")
_COMMAND = "Check the command and the working directory: `holdfast validate`."
_START_REMEDIES = {
    errno.ENOENT: "The program, its interpreter and the working directory must exist on every node: `holdfast render`.",
    errno.EACCES: "Make the program executable (`chmod +x`), or begin the command with its interpreter.",
    errno.ENOEXEC: "Begin the file with `#!` and its interpreter, or the command with that interpreter.",
    errno.E2BIG: "Write large values to a file and name it in the variable: Linux limits each to 128 KiB.",
}
"""By what the operating system said of a program that it did not start."""


class Action(StrEnum):
    """What is done about a failure."""

    RESTART = "restart in place"
    REPLACE_NODE = "replace the node and restart"
    PROMOTE = "put a standby in its place and restart"
    STOP = "stop"
    ROLL_BACK = "roll back to the code before the update"
    IGNORE = "ignore: another replica has finished"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """A judgement: what to do, what to tell, and the exit code if it ends the run."""

    action: Action
    finding: Finding
    exit_code: int = 0
    wait_s: float = 0.0
    """Seconds to wait before the next attempt."""
    replace_node: bool = False
    """Whether the node, which is there, is to be replaced nonetheless."""
    recomputed_s: float = 0.0
    """Seconds of running that the next attempt repeats, unless the program loads a checkpoint of its own; 0 where steps
    are reported, and where another replica has the state."""


def ignored(failure: Failure) -> Verdict:
    """A failure that matters no more, because another replica has come to the end of the training."""
    return Verdict(action=Action.IGNORE, finding=_finding(failure, "", "Nothing: another replica has finished."))


def rolled_back(failure: Failure) -> Verdict:
    """A failure of code that was on trial, whose former code goes on."""
    told = "Mend the code and update again: the former goes on from what was handed over, or a newer checkpoint."
    return Verdict(action=Action.ROLL_BACK, finding=_finding(failure, "soon after it got other code", told))


def quorum_finding(at_work: int, replicas: int, least: int) -> Finding:
    """What there is to say when there begin to be too few replicas for a step, or enough again."""
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


def scale_up_due(growths: tuple[float, ...], at: float, restart_window_s: float) -> float:
    """When a run that has grown at these times may grow again, in Unix seconds: at once, unless it did so of late."""
    recent = [growth for growth in growths if growth > at - restart_window_s]
    return recent[-1] + SCALE_UP_PAUSE_S * 2 ** (len(recent) - 1) if recent else at


def decide(failure: Failure, earlier: tuple[Failure, ...], recovery: Recovery) -> Verdict:
    """Decide what follows from a failure, given those before it (oldest first) and the job's recovery settings."""
    for rule in _RULES:
        verdict = rule(failure, earlier, recovery)
        if verdict is not None:
            return verdict
    raise AssertionError("the last rule always applies")


def _not_started(failure: Failure, earlier: tuple[Failure, ...], recovery: Recovery) -> Verdict | None:
    if failure.kind is not FailureKind.NOT_STARTED:
        return None
    number = _ERRNO.search(failure.error)
    remedy = _START_REMEDIES.get(int(number[1]) if number else 0, _COMMAND)
    return _stop(failure, "the program could not be started", remedy)


def _error_before_first_step(failure: Failure, earlier: tuple[Failure, ...], recovery: Recovery) -> Verdict | None:
    """A program that fails by itself before it has done anything would fail again."""
    if recovery.replicas > 1 and failure.attempt > 0:
        return None
    young = all(one.uptime_s < FIRST_STEP_HORIZON_S for one in (*earlier, failure))
    before = failure.step == 0 and not failure.is_peer_symptom and (failure.has_session or young)
    if failure.kind is not FailureKind.CRASHED or not before:
        return None
    soon = "before its first step, so a restart would fail too"
    if not failure.has_session:  # nobody knows what it did in that time
        soon = f"within {max(1, math.ceil(failure.uptime_s))} s of its start, so a restart would most likely fail too"
    return _stop(
        failure,
        f"it failed by itself {soon}",
        f"Mend the error{f' ({failure.where})' if failure.where else ''} and run again.",
    )


def _crash_loop(failure: Failure, earlier: tuple[Failure, ...], recovery: Recovery) -> Verdict | None:
    """A program that reports no steps may have made progress between two signals, if it lived long enough.

    An error of its own, in its own words, is the same error again, however late it comes; one that speaks of a
    connection is not. A lost node and a taken port are nothing the program does again.
    """
    if failure.kind in (*_OF_NODES, FailureKind.PORT_IN_USE):
        return None
    unseen = not failure.has_session and failure.uptime_s > CRASH_LOOP_HORIZON_S
    if unseen and not (failure.is_program_error and failure.error and not failure.is_network_error):
        return None
    # Of several replicas one that fails so is given another node first.
    length = CRASH_LOOP_LENGTH if recovery.replicas == 1 else FLAP_LIMIT + CRASH_LOOP_LENGTH
    last = (*earlier, failure)[-length:]
    same = all(one.signature == failure.signature and one.step == failure.step for one in last)
    if len(last) < length or not same:
        return None
    stepless = failure.step == 0 and not any(one.has_session for one in last)
    between = "and no Session reports steps" if stepless else "without a step between"
    row = resource_error_in(failure.error)
    return _stop(
        failure,
        f"the same failure came {length} times in a row, {_on_whom(last)}, {between}, so the run stops",
        row.remedy if row else _ends_the_loop(last, stepless=stepless),
    )


def _on_whom(last: tuple[Failure, ...]) -> str:
    """Whether equal failures keep to one rank, which a bad node would explain, or come wherever chance has it."""
    ranks = [one.rank for one in last if one.rank is not None]
    if len(set(ranks)) < 2:
        return "each time on the same rank"
    return f"on ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def _ends_the_loop(last: tuple[Failure, ...], *, stepless: bool) -> str:
    if stepless:
        lived = ", ".join(f"{one.uptime_s:.0f} s" for one in last)
        return (
            f"Fix what ends it; the attempts lasted {lived}. If the program does get further each time, have it open a "
            "Session (holdfast.train): then only failures without a step between count."
        )
    remedy = "It does not depend on chance: look at the step after the last checkpoint and at that rank's log."
    if len({one.rank for one in last}) > 1:
        return f"{remedy} No single rank or node causes it."
    if len({one.node for one in last}) > 1:
        return remedy
    return f"{remedy} If the other ranks do the same and never fail, suspect node{last[-1].node}."


def _never_joins(failure: Failure, earlier: tuple[Failure, ...], recovery: Recovery) -> Verdict | None:
    """A node that does not join however often it is made will not do so the next time."""
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
    why = f"{len(recent)} restarts within {recovery.restart_window_s:g} s, and recovery.max_restarts is {recovery.max_restarts}"
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


def _flapping(failure: Failure, earlier: tuple[Failure, ...], recovery: Recovery) -> Verdict | None:
    """Of several replicas one that fails again and again disturbs the others each time: it waits, then moves.

    One that makes steps in between pays for that with them, and only moves.
    """
    known = (*earlier, failure)
    tries = _in_a_row(known, lambda one: one.uptime_s < FLAP_S)
    vain = _in_a_row(known, lambda one: one.uptime_s < FLAP_S and not one.made_progress)
    renews = tries > 0 and tries % FLAP_LIMIT == 0
    if recovery.replicas == 1 or (vain < 2 and not renews):
        return None
    wait_s = min(MAX_BACK_OFF_S, BACK_OFF_S * 2.0 ** (vain - 2)) if vain > 1 else 0.0
    told = f"Nothing: it is tried again {f'in {wait_s:g} s' if wait_s else 'at once'}{', on another node' * renews}."
    action = Action.REPLACE_NODE if renews else Action.RESTART
    return Verdict(action=action, finding=_finding(failure, "", told), wait_s=wait_s, replace_node=renews)


def _in_a_row(known: tuple[Failure, ...], holds: Callable[[Failure], bool]) -> int:
    """How many of the latest failures it holds for."""
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
    return Verdict(action=Action.RESTART, finding=_finding(failure, "", remedy), recomputed_s=repeats_s)


def _has_reported(failure: Failure, earlier: tuple[Failure, ...]) -> bool:
    """Whether the program is known to have a Session."""
    return any(one.has_session or one.step > 0 for one in (*earlier, failure))


def _repeats_s(failure: Failure, earlier: tuple[Failure, ...], recovery: Recovery) -> float:
    """Seconds that ranks of a program without a Session ran in the attempt that failed; 0 where that is not known."""
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
    _replace,
    _flapping,
    _restart,
)


def _stop(failure: Failure, why: str, remedy: str) -> Verdict:
    exit_code = _KINDS[failure.kind].exit_code(failure.code)
    return Verdict(action=Action.STOP, finding=_finding(failure, why, remedy), exit_code=exit_code)


def never_joined_finding(node: int, reason: str) -> Finding:
    """What there is to say of a node that was waited for in vain, whether or not it was needed."""
    return Finding(
        code=FailureKind.NEVER_JOINED.value,
        severity=Severity.WARNING,
        what=f"node{node} has not joined and is made again",
        where=f"node{node}",
        evidence=(reason,),
        remedy=_WHERE_TO_LOOK.format(node=node),
        owner=Owner.CLUSTER,
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
    return words.format(who=failure.subject, signal=signal_name(failure.code), failure=failure)
