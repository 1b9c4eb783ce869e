"""Decides which failure came first: the root cause of an attempt's end."""

from __future__ import annotations

import math
import re
from enum import IntEnum

from holdfast.control.policy import PROGRESS_STEPS, Failure, FailureKind
from holdfast.control.state import ReplicaState
from holdfast.events import ExitReason, RankExited, RankHung
from holdfast.os_errors import resource_error_in

# Error lines of a rank whose peer is gone: never the cause while another failure is known.
#   RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:29318
#   torch.distributed.DistNetworkError: recvValueWithTimeout failed on SocketImpl(fd=3, ...): Connection reset by peer
#   torch.distributed.DistBackendError: NCCL communicator was aborted on rank 1.
#   ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.
#   torch.distributed.DistStoreError: Timed out after 1801 seconds waiting for clients. 1/2 clients joined.
#   RuntimeError: [../third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv
#   RuntimeError: Broken pipe
# (the store of torch before 2.1; Python's own error would be BrokenPipeError: [Errno 32] Broken pipe)
_OF_A_PEER = re.compile(
    r"closed by (?:remote )?peer|remote process exit|communicator was aborted|DistNetworkError|Socket recv failed|"
    r"Timed out waiting \d+ms for|Timed out after \d+ seconds waiting for clients|"
    r"(?:torch\.distributed|gloo|nccl|c10d|TCPStore|SocketImpl|XlaRuntimeError|JaxRuntimeError)\b.*"
    r"(?:reset by peer|broken pipe|connection refused|timed out)|"
    r"(?:RuntimeError: |what\(\): +)(?:Connection reset by peer|Broken pipe|Connection refused|Connection timed out)",
    re.IGNORECASE,
)

# Error lines that may mean a lost peer, or a lost data server: the cause if no better one is known.
#   ConnectionRefusedError: [Errno 111] Connection refused
#   requests.exceptions.ReadTimeout: HTTPSConnectionPool(host='data', port=443): Read timed out. (read timeout=10)
_OF_A_NETWORK = re.compile(r"reset by peer|broken pipe|connection refused|timed out", re.IGNORECASE)

# Error lines of a rank whose wait for its peers timed out:
#   RuntimeError: [../third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv
#   torch.distributed.DistBackendError: [Rank 2] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=19, ...
#   torch.distributed.DistStoreError: wait timeout after 300000ms, keys: /default_pg/0//cuda//0
#   torch.distributed.DistStoreError: Timed out after 1801 seconds waiting for clients. 1/2 clients joined.
_GAVE_UP = re.compile(
    r"Timed out waiting \d+ms for (?:recv|send)|collective operation timeout|wait timeout after \d+ms|"
    r"Timed out after \d+ seconds waiting for clients"
)

# Frames a rank waits in because another is late.
_WAITING = re.compile(
    r"all_reduce|all_gather|reduce_scatter|broadcast|barrier|all_to_all|wait|recv|synchronize|backward|"
    r"ReplicaGroup\._wait_arrival|_Bucket\.unpack|quorum|should_commit"
)

# A frame in which a replica waits for other replicas, and not for its own ranks.
_FOR_REPLICAS = re.compile(
    r"ReplicaGroup\._wait_arrival|ReplicaGroup\.wait_for_replicas|_Bucket\.unpack"
)  # _Bucket.unpack: on a GPU


class PeerSymptom(IntEnum):
    """How likely a rank's last error line is a symptom of a failure elsewhere."""

    NONE = 0
    NETWORK = 1
    """It mentions a connection, perhaps to a peer."""
    PEER = 2
    """It mentions a peer that is gone."""


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


def first_failure(replica: ReplicaState, at: float) -> Failure:
    """The failure that began the end, at `at`, of an attempt that did not succeed.

    Lost nodes and exits are ordered by time, with those that only mention a lost peer last. A hang is the cause only if
    no node was lost and no rank ended before it was reported: a death leaves the others waiting, while ranks that end
    after the report end because a hung replica is being stopped. If the ranks that ended only gave up waiting, the
    cause is the rank that was seen doing something else.
    """
    reported_at = min((hung.at for hung in replica.hangs), default=math.inf)
    ends = sorted((one for one in replica.rank_failures if one.failed and one.at <= reported_at), key=precedence)
    awaited = [hung for hung in replica.hangs if is_not_waiting(hung)]
    if awaited and ends and not replica.node_failures and all(map(timed_out_waiting, ends)):
        return _from_hang(replica, min(awaited, key=hang_suspicion), ends[0])
    lost = min(replica.node_failures, key=lambda loss: loss.at, default=None)
    if ends and (lost is None or precedence(ends[0]) <= (PeerSymptom.NONE, lost.at)):
        return _from_exit(replica, ends[0])
    if lost is not None:
        return lost
    if replica.hangs:
        return _from_hang(replica, min(replica.hangs, key=hang_suspicion))
    return Failure(kind=FailureKind.CAUSE_UNKNOWN, at=at, node=0, attempt=replica.attempt, step=replica.highest_step)


def precedence(exited: RankExited) -> tuple[PeerSymptom, float]:
    """Smallest for the likeliest first failure: it does not only mention a lost peer, and is early."""
    return (_peer_symptom(exited), exited.at)


def _peer_symptom(exited: RankExited) -> PeerSymptom:
    if _OF_A_PEER.search(exited.error):
        return PeerSymptom.PEER
    return PeerSymptom.NETWORK if _OF_A_NETWORK.search(exited.error) else PeerSymptom.NONE


def timed_out_waiting(exited: RankExited) -> bool:
    """Whether a rank ended because its wait for other ranks timed out."""
    return exited.reason in (ExitReason.CODE, ExitReason.SIGNAL) and bool(_GAVE_UP.search(exited.error))


def is_not_waiting(hung: RankHung) -> bool:
    """Whether a rank was seen doing something other than waiting for other ranks."""
    return hung.process_state == "T" or bool(hung.top_frame and not _waits(hung))


def waits_inside_replica(hung: RankHung) -> bool:
    """Whether a rank was seen waiting, but not for other replicas."""
    return bool(hung.top_frame) and not waits_for_other_replicas(hung)


def waits_for_other_replicas(hung: RankHung) -> bool:
    """Whether a rank was seen waiting for other replicas, and not for its own."""
    return bool(_FOR_REPLICAS.search(hung.top_frame))


HangSuspicion = tuple[bool, bool, int, float, bool, bool, float]


def hang_suspicion(hung: RankHung) -> HangSuspicion:
    """Smallest for the rank most likely to hold up the rest: stopped by a signal, behind, not waiting for a peer.

    Of ranks that reported the same step, one still in `Session.commit` is behind, the more so the earlier its line: the
    others have passed everything that it could wait in for them. Of waiting ranks, those that wait for other replicas
    are the least suspect: no rank waits for them there.
    """
    evidence = (hung.process_state != "T", hung.has_session, hung.last_step, hung.commit_line or math.inf)
    return (*evidence, _waits(hung), waits_for_other_replicas(hung), hung.last_step_at)


def _waits(hung: RankHung) -> bool:
    """Whether a rank is where ranks wait if another is late."""
    return bool(_WAITING.search(hung.top_frame))


def _kind(exited: RankExited) -> FailureKind:
    """The kind of a rank's exit: a full disk is not a program error, nor is an exit on SIGTERM."""
    if exited.exited_on_request:
        return FailureKind.TERMINATED_EXTERNALLY
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
        code=exited.code,
        error=exited.error,
        evidence=(exited.evidence,) if exited.evidence else (),
        where=exited.error_location,
        step=replica.highest_step,
        made_progress=replica.attempt_steps >= PROGRESS_STEPS,
        has_session=exited.has_session,
        uptime_s=exited.at - replica.started_at,
        is_peer_symptom=_peer_symptom(exited) is PeerSymptom.PEER,
        is_network_error=_peer_symptom(exited) is PeerSymptom.NETWORK,
    )


def _from_hang(replica: ReplicaState, hung: RankHung, waiter: RankExited | None = None) -> Failure:
    state = {"T": "stopped by a signal", "D": "waiting in the kernel", "R": "running", "S": "sleeping"}
    evidence = [
        f"waited {hung.waited_s:.1f} s",
        f"rank {hung.rank} is {state.get(hung.process_state, hung.process_state or 'in an unknown state')}",
    ]
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
        error=f"no step after step {max(hung.last_step, 0)}" if hung.has_session else "it has not opened its Session",
        evidence=tuple(evidence),
        step=replica.highest_step,
        made_progress=replica.attempt_steps >= PROGRESS_STEPS,
        has_session=hung.has_session,
        uptime_s=hung.at - replica.started_at,
    )
