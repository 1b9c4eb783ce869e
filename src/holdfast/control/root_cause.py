"""Decides from a run's events which failure came first: the root cause of an attempt's end.

diagnose/precedence.py has the rules, and diagnose/flight_verdict.py those for flight recorders; both hold for logs too.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Sequence

from msgspec.structs import replace

from holdfast.control.policy import PROGRESS_STEPS, Failure, FailureKind, NodeBlame, node_blame
from holdfast.control.state import ReplicaState
from holdfast.diagnose.failure_classes import Confidence
from holdfast.diagnose.flight_verdict import HangKind, HangVerdict, find_culprits
from holdfast.diagnose.peer_symptoms import gave_up_waiting, peer_symptom
from holdfast.diagnose.precedence import Clocks, PeerSymptom, Suspect, first_cause
from holdfast.diagnose.structured.flight_summary import from_summary
from holdfast.events import DeviceFault, ExitReason, RankExited, RankHung
from holdfast.os_errors import resource_error_in
from holdfast.protocol.wait_frames import FOR_DEVICE, FOR_REPLICAS

_CLOCKS = Clocks(skew_s=0.0, report_lag_s=math.inf)
"""One clock orders all ends of an attempt; they belong together, since the first of them ends the attempt."""
_DEVICE, _PROCESS, _HANG = range(3)
"""Layers of causes: a failed device ends ranks, and their death leaves the other ranks waiting.

A hang never kills a rank before it is reported.
"""

# Frames a rank waits in because another is late.
_WAITING = re.compile(
    r"all_reduce|all_gather|reduce_scatter|broadcast|barrier|all_to_all|wait|recv|synchronize|backward|"
    rf"quorum|should_commit|{re.escape(FOR_REPLICAS)}|{re.escape(FOR_DEVICE)}"
)

_PROGRAM_HANGS = (HangKind.MISMATCH, HangKind.CROSSED, HangKind.ALL_WAITING)
"""Hangs in which ranks make calls that do not fit one another, or in which no rank is late."""

SHELL_SIGNAL = 128
"""Added to the signal that ended a rank of which a device failed: the exit code of a run that ends with it."""

_KINDS: dict[ExitReason, FailureKind] = {
    ExitReason.CODE: FailureKind.CRASHED,
    ExitReason.SIGNAL: FailureKind.KILLED,
    ExitReason.OUT_OF_MEMORY: FailureKind.OUT_OF_MEMORY,
    ExitReason.PORT_TAKEN: FailureKind.PORT_IN_USE,
    ExitReason.NOT_STARTED: FailureKind.NOT_STARTED,
    ExitReason.CODE_DELIVERY_FAILED: FailureKind.CODE_DELIVERY_FAILED,
    ExitReason.ORPHANED_RANKS: FailureKind.LAUNCHER_ORPHANED_RANKS,
}


def exited_on_request(replica: ReplicaState, exited: RankExited) -> bool:
    """Whether a rank exited because its replica was requested to: a checkpoint, then exit."""
    return replica.exit_requested and exited.exited_on_request


def first_failure(replica: ReplicaState, at: float, awaited_ranks: Collection[int] = ()) -> Failure:
    """The failure that began the end, at `at`, of an attempt that did not succeed.

    `awaited_ranks` are those of a hang for which the others wait by the stacks of all, where recorders name none.

    Ranks that end after a reported hang end because a hung replica is being stopped. If the ranks that ended only gave
    up waiting, the cause is the rank that was seen doing something else.
    """
    reported_at = min((hung.at for hung in replica.hangs), default=math.inf)
    ends = sorted((one for one in replica.rank_failures if one.failed and one.at <= reported_at), key=precedence)
    verdicts = hang_culprits(replica.hangs)
    named = verdicts or awaited_ranks
    awaited = [hung for hung in replica.hangs if hung.rank in verdicts or is_not_waiting(hung)]
    gave_up = bool(awaited and ends) and not replica.node_failures and all(map(timed_out_waiting, ends))
    suspects: list[Suspect[RankExited | RankHung | Failure]] = [
        Suspect(
            failure=one,
            at=one.at,
            layer=_HANG if isinstance(one, RankHung) else _DEVICE if _is_of_hardware(one) else _PROCESS,
            confidence=sure,
            ends_process=not isinstance(one, RankHung),
            symptom=exit_symptom(one) if isinstance(one, RankExited) else PeerSymptom.NONE,
        )
        for seen, sure in (
            (ends, Confidence.UNSURE if gave_up else Confidence.CERTAIN),
            (sorted(replica.node_failures, key=lambda lost: lost.at), Confidence.CERTAIN),
            (_origins(replica.observed), Confidence.CERTAIN),
            (by_hang_suspicion(awaited if gave_up else replica.hangs, named)[:1], Confidence.LIKELY),
        )
        for one in seen
    ]
    first = first_cause(suspects, _CLOCKS)
    match first and first.failure:
        case RankExited() as exited:
            return _from_exit(replica, exited)
        case RankHung() as hung:
            return _from_hang(replica, hung, verdicts.get(hung.rank), ends[0] if gave_up else None)
        case Failure() as seen:
            return _with_others(seen, replica.observed)
        case None:
            unknown = FailureKind.CAUSE_UNKNOWN
            return Failure(
                kind=unknown,
                at=at,
                node=None,
                attempt=replica.attempt,
                replica=replica.replica,
                step=replica.highest_step,
            )


def _origins(observed: Sequence[Failure]) -> Sequence[Failure]:
    """What was observed in running ranks, without its consequences.

    A failed device explains wrong numbers, and a rank that computed wrong numbers explains those that others received.
    """
    broken = [one for one in observed if _is_of_hardware(one)]
    return broken or [one for one in observed if one.is_origin] or observed


def _with_others(first: Failure, observed: Sequence[Failure]) -> Failure:
    """The failure of a rank, no longer sure to be the first if other ranks found the same in themselves."""
    others = sorted({one.rank for one in observed if one.kind is first.kind and one.is_origin and one.rank is not None})
    if first.rank not in others or len(others) == 1:
        return first
    numbers = ", ".join(str(rank) for rank in others)
    return replace(first, is_origin=False, evidence=(*first.evidence, f"ranks {numbers} report it at the same time"))


def precedence(exited: RankExited) -> tuple[PeerSymptom, bool, float]:
    """Smallest for the likeliest first failure: it does not only mention a lost peer, is of hardware, or is early."""
    return (exit_symptom(exited), not _is_of_hardware(exited), exited.at)


def exit_symptom(exited: RankExited) -> PeerSymptom:
    """How likely a rank's exit is a symptom of a failure elsewhere; a fault of hardware is none."""
    if _is_of_hardware(exited):
        return PeerSymptom.NONE
    of_nccl = {DeviceFault.NCCL_REMOTE: PeerSymptom.PEER, DeviceFault.NCCL_SYSTEM: PeerSymptom.NETWORK}
    reported = PeerSymptom.NONE if exited.device_fault is None else of_nccl.get(exited.device_fault, PeerSymptom.NONE)
    return max(peer_symptom(exited.error), reported)


def _is_of_hardware(one: RankExited | RankHung | Failure) -> bool:
    """Whether a rank ended by a fault of a device that a peer's end cannot cause."""
    match one:
        case RankExited(device_fault=DeviceFault() as fault):
            return node_blame(fault) is NodeBlame.CERTAIN
        case Failure(kind=kind):
            return node_blame(kind) is NodeBlame.CERTAIN
        case _:
            return False


def timed_out_waiting(exited: RankExited) -> bool:
    """Whether a rank ended because its wait for other ranks timed out."""
    return exited.reason in (ExitReason.CODE, ExitReason.SIGNAL) and gave_up_waiting(exited.error)


def is_not_waiting(hung: RankHung) -> bool:
    """Whether a rank was seen doing something other than waiting for other ranks."""
    return hung.process_state == "T" or bool(hung.top_frame and not _waits(hung))


def is_standstill(hangs: Collection[RankHung]) -> bool:
    """Whether ranks that all do nothing hang: one waits for others, or none has got as far as a step.

    If none does either, the program may rest, or wait for something outside it.
    """
    return any(hung.waits_for_peers or hung.process_state == "T" for hung in hangs) or not any(
        map(_reports_steps, hangs)
    )


def waits_inside_replica(hung: RankHung) -> bool:
    """Whether a rank was seen waiting, but not for other replicas."""
    return bool(hung.top_frame) and not waits_for_other_replicas(hung)


def waits_for_other_replicas(hung: RankHung) -> bool:
    """Whether a rank was seen waiting for other replicas, and not for its own."""
    return FOR_REPLICAS in hung.top_frame


def hang_culprits(hangs: Sequence[RankHung]) -> dict[int, HangVerdict]:
    """The ranks of one replica that hold up the others according to their flight recorders.

    A rank whose stack shows that it waits for other replicas is none: no recorder of its replica shows those.
    """
    dumps = [from_summary(hung.rank, hung.collectives) for hung in hangs if hung.collectives]
    if len(dumps) < 2:
        return {}
    excused = {hung.rank for hung in hangs if waits_for_other_replicas(hung)}
    found = find_culprits(dumps, {hung.rank for hung in hangs}, excused)
    return {verdict.rank: verdict for verdict in found if verdict.rank is not None and verdict.rank not in excused}


def by_hang_suspicion(hangs: Sequence[RankHung], culprits: Collection[int]) -> list[RankHung]:
    """Hung ranks, the likeliest to hold up the others first.

    A rank that a signal stopped answers no request, so its recorder shows nothing; else the recorders outweigh stacks.
    """
    return sorted(hangs, key=lambda hung: (hung.process_state != "T", hung.rank not in culprits, hang_suspicion(hung)))


HangSuspicion = tuple[bool, bool, int, float, bool, bool, float]


def hang_suspicion(hung: RankHung) -> HangSuspicion:
    """Smallest for the rank most likely to hold up the rest by its own report alone.

    It is stopped by a signal, behind, or not waiting for a peer.

    Of ranks that reported the same step, one still in `Session.commit` is behind, the more so the earlier its line: the
    others have passed everything that it could wait in for them. Of waiting ranks, those that wait for other replicas
    are the least suspect: no rank waits for them there.
    """
    evidence = (hung.process_state != "T", _reports_steps(hung), hung.last_step, hung.commit_line or math.inf)
    return (*evidence, _waits(hung), waits_for_other_replicas(hung), hung.last_step_at)


def _reports_steps(hung: RankHung) -> bool:
    """Whether a rank has a Session, or a step clock, which connects at the first step."""
    return hung.has_session or hung.last_step > 0


def _waits(hung: RankHung) -> bool:
    """Whether a rank is where ranks wait if another is late."""
    return bool(_WAITING.search(hung.top_frame))


def _kind(exited: RankExited) -> FailureKind:
    """The kind of a rank's exit: a full disk is not a program error, nor is an exit on SIGTERM."""
    if exited.exited_on_request:
        return FailureKind.TERMINATED_EXTERNALLY
    if exited.device_fault is not None:
        return FailureKind(exited.device_fault.value)
    row = resource_error_in(exited.error) if exited.reason in (ExitReason.CODE, ExitReason.NOT_STARTED) else None
    if row is None:
        return _KINDS[exited.reason]
    if row.code in (FailureKind.DISK_FULL, FailureKind.READ_ONLY):
        return FailureKind(row.code)
    return FailureKind.SPAWN_RESOURCES_EXHAUSTED if exited.reason is ExitReason.NOT_STARTED else _KINDS[exited.reason]


def _from_exit(replica: ReplicaState, exited: RankExited) -> Failure:
    named = exited.first_failed_rank >= 0
    return Failure(
        kind=_kind(exited),
        at=exited.at,
        node=exited.node,
        attempt=exited.attempt,
        replica=exited.replica,
        rank=exited.first_failed_rank if named else exited.rank,
        log_owner_rank=exited.rank if named else None,
        code=exited.code + SHELL_SIGNAL * (exited.device_fault is not None and exited.reason is ExitReason.SIGNAL),
        error=exited.error,
        evidence=(exited.evidence,) if exited.evidence else (),
        where=exited.error_location,
        step=replica.highest_step,
        made_progress=replica.attempt_steps >= PROGRESS_STEPS,
        has_session=exited.has_session,
        uptime_s=exited.at - replica.started_at,
        is_peer_symptom=exit_symptom(exited) is PeerSymptom.PEER,
        is_network_error=exit_symptom(exited) is PeerSymptom.NETWORK,
    )


def _from_hang(
    replica: ReplicaState, hung: RankHung, verdict: HangVerdict | None, waiter: RankExited | None
) -> Failure:
    state = {"T": "stopped by a signal", "D": "waiting in the kernel", "R": "running", "S": "sleeping"}
    evidence = [
        f"waited {hung.waited_s:.1f} s",
        f"rank {hung.rank} is {state.get(hung.process_state, hung.process_state or 'in an unknown state')}"
        + (f", system call: {hung.system_call}" if hung.system_call else ""),
    ]
    if verdict is not None:
        evidence.append(f"flight recorders: {verdict.text}")
    if hung.top_frame:
        evidence.append(f"innermost frame: {hung.top_frame}")
    if hung.stacks:
        evidence.append(f"stacks: {hung.stacks}")
    if waiter is not None:
        evidence.append(f"rank {waiter.rank} gave up waiting: {waiter.error}")
    return Failure(
        kind=FailureKind.HUNG,
        at=hung.last_step_at,
        node=hung.node,
        attempt=hung.attempt,
        replica=hung.replica,
        rank=hung.rank,
        waiting_rank=waiter.rank if waiter else None,
        holds_up_others=verdict is not None and verdict.kind not in _PROGRAM_HANGS and hung.process_state != "T",
        error=f"no step after step {max(hung.last_step, 0)}"
        if _reports_steps(hung)
        else "it has not opened its Session",
        evidence=tuple(evidence),
        step=replica.highest_step,
        made_progress=replica.attempt_steps >= PROGRESS_STEPS,
        has_session=hung.has_session,
        uptime_s=hung.at - replica.started_at,
    )
