"""Who failed first, by what was learnt and in whatever order it arrived."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from holdfast.control.policy import Failure, FailureKind
from holdfast.control.root_cause import (
    first_failure,
    hang_culprits,
    is_not_waiting,
    waits_for_other_replicas,
    waits_inside_replica,
)
from holdfast.control.state import ReplicaState
from holdfast.diagnose.peer_symptoms import GAVE_UP as GAVE_UP_LINES
from holdfast.events import CollectiveCall, ExitReason, GroupCollectives, RankExited, RankHung
from holdfast.protocol.wait_frames import FOR_DEVICE, FOR_REPLICAS

CLOSED = "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:293"


def exited(rank: int, at: float, *, how: ExitReason = ExitReason.CODE, code: int = 1, error: str = "") -> RankExited:
    return RankExited(at=at, node=rank, replica=0, attempt=0, rank=rank, reason=how, code=code, error=error)


def hung(rank: int, at: float = 50.0, **what: object) -> RankHung:
    known = {"last_step": 9, "last_step_at": 20.0, "waited_s": 30.0, "process_state": "S", **what}
    return RankHung(at=at, node=rank, replica=0, attempt=0, rank=rank, **known)  # type: ignore[arg-type]


def lost(node: int, at: float) -> Failure:
    return Failure(kind=FailureKind.NODE_LOST, at=at, node=node, attempt=0, error="its agent ended")


def root_cause(**learnt: object) -> Failure:
    return first_failure(ReplicaState(replica=0, attempt=0, started_at=1.0, highest_step=9, **learnt), at=99.0)  # type: ignore[arg-type]


def test_rank_that_hangs_is_told_with_its_replica() -> None:
    whole = ReplicaState(replica=1, attempt=0, started_at=1.0, highest_step=9, hangs=(replace(hung(2), replica=1),))
    assert first_failure(whole, at=99.0).subject == "rank 2 of replica 1 on node2"


@pytest.mark.parametrize(
    ("end", "fails"),
    [
        (exited(0, 1.0, code=0), False),
        (exited(0, 1.0, code=3), True),
        (exited(0, 1.0, how=ExitReason.SIGNAL, code=9), True),
        (exited(0, 1.0, how=ExitReason.NOT_STARTED, code=127), True),
        (RankExited(at=1, node=0, replica=0, attempt=0, rank=0, reason=ExitReason.SIGNAL, code=9, stopped=True), False),
    ],
)
def test_end_of_a_rank_fails_its_attempt_unless_good_or_asked_for(end: RankExited, fails: bool) -> None:
    assert end.failed is fails


def test_end_of_which_nothing_is_known_is_unexplained() -> None:
    failure = root_cause(rank_failures=(exited(0, 1.0, code=0),))
    assert (failure.kind, failure.at, failure.rank, failure.node) == (FailureKind.CAUSE_UNKNOWN, 99.0, None, None)


def test_rank_that_a_launcher_names_is_the_root_cause() -> None:
    named = RankExited(
        at=11.0, node=1, replica=0, attempt=0, rank=0, reason=ExitReason.SIGNAL, code=9, first_failed_rank=3
    )
    failure = root_cause(rank_failures=(named,))
    assert (failure.rank, failure.node, failure.log_owner_rank) == (3, 1, 0)
    assert root_cause(rank_failures=(exited(0, 11.0),)).log_owner_rank is None


def test_rank_without_a_message_is_the_root_cause_of_a_hang_before_waiting_ranks() -> None:
    mute = hung(1, last_step=-1, has_session=False, top_frame="read (nfs.py:1)")
    failure = root_cause(hangs=(hung(0, last_step=-1, top_frame="read (x.py:1)"), mute))
    assert (failure.kind, failure.rank, failure.has_session) == (FailureKind.HUNG, 1, False)
    assert failure.error == "it has not opened its Session"
    halted = root_cause(hangs=(mute, hung(2, last_step=-1, process_state="T")))
    assert halted.rank == 2


def test_earliest_exit_is_the_root_cause_whatever_arrived_first() -> None:
    failure = root_cause(rank_failures=(exited(1, 12.0), exited(0, 11.0)))
    assert failure is not None
    assert (failure.rank, failure.uptime_s, failure.step) == (0, 10.0, 9)


def test_vanished_peer_error_is_no_cause_while_another_is_known() -> None:
    failure = root_cause(rank_failures=(exited(1, 11.0, error=CLOSED), exited(0, 11.5, how=ExitReason.SIGNAL, code=11)))
    assert failure is not None
    assert (failure.kind, failure.rank) == (FailureKind.KILLED, 0)


def test_lost_node_is_the_cause_of_its_peers_errors() -> None:
    failure = root_cause(rank_failures=(exited(1, 11.0, error=CLOSED),), node_failures=(lost(0, 21.0),))
    assert failure is not None
    assert failure.kind is FailureKind.NODE_LOST


def test_vanished_peer_error_is_the_cause_when_nothing_else_is_known() -> None:
    failure = root_cause(rank_failures=(exited(1, 11.0, error=CLOSED),))
    assert failure is not None
    assert failure.kind is FailureKind.CRASHED


def test_end_after_a_reported_hang_is_its_consequence() -> None:
    failure = root_cause(
        hangs=(hung(0),), rank_failures=(exited(1, 50.1, error=CLOSED), exited(2, 50.2, error="RuntimeError: ?"))
    )
    assert failure is not None
    assert (failure.kind, failure.rank, failure.at) == (FailureKind.HUNG, 0, 20.0)


def test_end_before_a_reported_hang_is_its_cause_though_it_was_learnt_late() -> None:
    failure = root_cause(hangs=(hung(0),), rank_failures=(exited(1, 19.0, how=ExitReason.OUT_OF_MEMORY, code=9),))
    assert failure is not None
    assert (failure.kind, failure.rank) == (FailureKind.OUT_OF_MEMORY, 1)


def test_lost_node_is_the_cause_of_a_concurrent_hang() -> None:
    failure = root_cause(hangs=(hung(0),), node_failures=(lost(1, 58.0),))
    assert failure is not None
    assert failure.kind is FailureKind.NODE_LOST


@pytest.mark.parametrize(
    ("error", "secondary"),
    [
        ("torch.distributed.DistNetworkError: The client socket has timed out after 300000ms while trying to co", True),
        ("RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:5] Read error: Connection reset by peer", True),
        (
            "torch.distributed.DistStoreError: Timed out after 1801 seconds waiting for clients. 1/2 clients joined",
            True,
        ),
        ("RuntimeError: [..] Timed out waiting 1800000ms for recv operation to complete", True),
        ("torch.distributed.DistBackendError: NCCL error in: x.cpp:3: socketPoll: Connect to 10.0.0.2 timed out", True),
        ("RuntimeError: Broken pipe", True),
        ("terminate called after throwing 'std::system_error' what():  Connection reset by peer", True),
        ("TimeoutError: shard 3 of the data set timed out", False),
        ("requests.exceptions.ReadTimeout: HTTPSConnectionPool(host='data', port=443): Read timed out.", False),
        ("ConnectionRefusedError: [Errno 111] Connection refused", False),
        ("BrokenPipeError: [Errno 32] Broken pipe", False),
        ("subprocess.TimeoutExpired: Command 'aws s3 cp' timed out after 3 seconds", False),
    ],
)
def test_vanished_peer_error_is_distinguished_from_a_programs_own_connections(error: str, secondary: bool) -> None:
    failure = root_cause(rank_failures=(exited(1, 11.0, error=error),))
    assert (failure.is_peer_symptom, failure.is_network_error) == (secondary, not secondary)
    # Whatever speaks of a connection comes after what does not, and before what speaks of a peer.
    known = (exited(1, 11.0, error=error), exited(0, 11.5, error="ValueError: ?"))
    assert root_cause(rank_failures=known).rank == 0
    assert root_cause(rank_failures=(*known[:1], exited(2, 11.5, error=CLOSED))).rank == 1


def test_exit_code_75_is_a_programs_own_unless_its_session_left_with_it() -> None:
    own = exited(0, 11.0, code=75)
    assert root_cause(rank_failures=(own,)).kind is FailureKind.CRASHED
    assert root_cause(rank_failures=(replace(own, exited_on_request=True),)).kind is FailureKind.TERMINATED_EXTERNALLY


GAVE_UP = "RuntimeError: [..] Timed out waiting 2000ms for recv operation to complete"
ASLEEP = {"top_frame": "dream (sleeping_rank.py:20)", "has_session": False, "last_step": -1}
IN_A_SUM = {"top_frame": "all_reduce (torch/distributed/distributed_c10d.py:2841)"}


def test_rank_that_others_gave_up_waiting_for_is_the_cause_where_it_was_seen_elsewhere() -> None:
    failure = root_cause(
        rank_failures=(exited(0, 11.0, error=GAVE_UP),), hangs=(hung(2, **IN_A_SUM), hung(1, **ASLEEP))
    )
    assert (failure.kind, failure.rank, failure.waiting_rank) == (FailureKind.HUNG, 1, 0)
    assert f"rank 0 gave up waiting: {GAVE_UP}" in failure.evidence


@pytest.mark.parametrize("error", GAVE_UP_LINES.values())
def test_rank_whose_wait_timed_out_is_not_the_root_cause_of_the_hang(error: str) -> None:
    end = exited(0, 11.0, how=ExitReason.SIGNAL, code=6, error=error)
    assert root_cause(rank_failures=(end,), hangs=(hung(1, **ASLEEP),)).rank == 1


@pytest.mark.parametrize(
    ("end", "seen"),
    [
        (exited(0, 11.0, error=GAVE_UP), IN_A_SUM),
        (exited(0, 11.0, error=GAVE_UP), {}),
        (exited(0, 11.0, error="ValueError: ?"), ASLEEP),
        (exited(0, 11.0, how=ExitReason.OUT_OF_MEMORY, code=9), ASLEEP),
    ],
    ids=["it waits too", "its stack could not be taken", "an error of its own", "killed"],
)
def test_rank_whose_stacks_were_dumped_is_not_the_root_cause_of_another_exit(
    end: RankExited, seen: dict[str, object]
) -> None:
    failure = root_cause(rank_failures=(end,), hangs=(hung(1, **seen),))
    assert failure.rank == 0


@pytest.mark.parametrize(
    "culprit",
    [
        {"process_state": "T", "top_frame": "all_reduce (distributed_c10d.py:2841)"},
        {"last_step": 8},
        {"top_frame": "load_batch (data.py:7)"},
        {"last_step_at": 19.0},
        {"commit_line": 224, "last_step_at": 21.0},
    ],
    ids=["stopped by a signal", "a step behind", "not waiting for a peer", "silent for longest", "at its last's end"],
)
def test_root_cause_of_a_hang_is_the_rank_that_blocks_the_others(culprit: dict[str, object]) -> None:
    waiting = {"top_frame": "all_reduce (distributed_c10d.py:2841)"}
    failure = root_cause(hangs=(hung(0, **waiting), hung(1, **{**waiting, **culprit}), hung(2, **waiting)))
    assert failure is not None
    assert failure.rank == 1
    assert failure.error == f"no step after step {culprit.get('last_step', 9)}"


def in_group(enqueued: int, *, waits: bool = False) -> dict[str, object]:
    """What a rank's flight recorder shows."""
    calls = (CollectiveCall(seq=enqueued, op="all_reduce", sizes="[[4]] Float", done=not waits),)
    pending = enqueued if waits else 0
    position = GroupCollectives(group="0", enqueued=enqueued, completed=enqueued - waits, pending=pending, calls=calls)
    return {"collectives": (position,)}


INSIDE, OUTSIDE = in_group(41, waits=True), in_group(40)


@pytest.mark.parametrize(
    ("reports", "rank"),
    [
        ([hung(0, **INSIDE), hung(1, **OUTSIDE), hung(2, **INSIDE)], 1),
        ([hung(0, **INSIDE, last_step=8), hung(1, **OUTSIDE), hung(2, **INSIDE, top_frame="load (x.py:1)")], 1),
        ([hung(0, **INSIDE), hung(1, **OUTSIDE), hung(2, process_state="T")], 2),
        ([hung(0, **INSIDE), hung(1), hung(2, **INSIDE)], 1),
        ([hung(0, **INSIDE, **IN_A_SUM), hung(1, **INSIDE, **IN_A_SUM), hung(2, **INSIDE, top_frame="f (x.py:1)")], 2),
    ],
    ids=[
        "it never entered",
        "recorders outweigh steps and stacks",
        "nothing outweighs a signal",
        "no answer from its recorder",
        "all wait: stacks decide",
    ],
)
def test_root_cause_of_a_hang_is_the_rank_that_the_flight_recorders_show(reports: list[RankHung], rank: int) -> None:
    for order in (reports, reports[::-1]):
        assert root_cause(hangs=tuple(order)).rank == rank


def test_what_the_flight_recorders_show_is_the_evidence() -> None:
    failure = root_cause(hangs=(hung(0, **INSIDE), hung(1, **OUTSIDE)))
    assert (
        "flight recorders: rank 0 in collective 41 of group 0 (all_reduce [[4]] Float); rank 1 never entered it; "
        "its last was 40 (all_reduce [[4]] Float)"
    ) in failure.evidence


def test_rank_that_waits_for_other_replicas_is_no_culprit_by_its_recorder() -> None:
    waits = f"ReplicaGroup._wait_arrival{FOR_REPLICAS} (holdfast/train/ft/replica_group.py:2)"
    assert hang_culprits([hung(0, **INSIDE), hung(1, **OUTSIDE)]).keys() == {1}
    assert hang_culprits([hung(0, **INSIDE), hung(1, **OUTSIDE, top_frame=waits)]) == {}


@pytest.mark.parametrize(
    ("top_frame", "waits", "for_replicas"),
    [
        (f"f{FOR_REPLICAS} (x.py:1)", True, True),
        (f"f{FOR_DEVICE} (x.py:1)", True, False),
        ("all_reduce (x.py:1)", True, False),
        ("f (x.py:1)", False, False),
    ],
)
def test_mark_of_a_frame_shows_what_its_rank_waits_for(top_frame: str, waits: bool, for_replicas: bool) -> None:
    seen = hung(0, top_frame=top_frame)
    assert is_not_waiting(seen) is not waits
    assert waits_for_other_replicas(seen) is for_replicas
    assert waits_inside_replica(seen) is not for_replicas


def test_of_ranks_at_the_end_of_one_step_the_one_higher_up_there_is_behind() -> None:
    failure = root_cause(hangs=(hung(0, commit_line=232), hung(1, commit_line=224, last_step_at=21.0)))
    assert failure.rank == 1


@pytest.mark.parametrize(
    ("how", "error", "kind"),
    [
        (ExitReason.CODE, "OSError: [Errno 28] No space left on device", FailureKind.DISK_FULL),
        (ExitReason.CODE, "terminate called: write: Disk quota exceeded", FailureKind.DISK_FULL),
        (ExitReason.NOT_STARTED, "python: [Errno 30] Read-only file system: 'logs'", FailureKind.READ_ONLY),
        (ExitReason.NOT_STARTED, "python: [Errno 24] Too many open files", FailureKind.SPAWN_RESOURCES_EXHAUSTED),
        (
            ExitReason.NOT_STARTED,
            "python: [Errno 11] Resource temporarily unavailable",
            FailureKind.SPAWN_RESOURCES_EXHAUSTED,
        ),
        (ExitReason.CODE, "OSError: [Errno 24] Too many open files", FailureKind.CRASHED),
        (ExitReason.NOT_STARTED, "python: [Errno 2] No such file or directory", FailureKind.NOT_STARTED),
    ],
)
def test_what_a_rank_ran_out_of_is_told_from_an_error_of_its_own(
    how: ExitReason, error: str, kind: FailureKind
) -> None:
    assert root_cause(rank_failures=(exited(0, 1.0, how=how, code=1, error=error),)).kind is kind
