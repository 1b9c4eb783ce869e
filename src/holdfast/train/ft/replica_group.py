"""Owns TorchFT as the session uses it, and what has to be mended of it; outer_sync.py and abortable_pg.py know it too.

Its manager finds who takes part in a step (a quorum), asks all ranks of this replica whether the step may be
committed, and lets a replica that is behind take what the others have from their memory. Refuses to own what that is,
and when it is asked for (replica_strategy.py). What differs from TorchFT 0.2.0, with the reason, stands at each place.
"""

from __future__ import annotations

import math
import os
import select
import socket
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from typing import Any, Protocol, cast

import torch
from torch.distributed import AllreduceOptions, ReduceOp
from torchft.manager import Manager

from holdfast.errors import ExitCode, failure
from holdfast.findings import Finding, Owner, Severity
from holdfast.protocol.rank_messages import Activity
from holdfast.train.ft.abortable_pg import TIMEOUT, AbortableGloo, AbortableNccl, StateTransport, make_store
from holdfast.train.ft.torchft_shims import DaemonExecutor, LocalCommitClient
from holdfast.train.session.control_group import ControlGroup
from holdfast.train.session.rank_config import RankConfig

State = dict[str, Any]
"""What a replica that is behind takes: anything that pickles, tensors in dicts."""

CONNECT_TIMEOUT = timedelta(seconds=60)
DONOR_TIMEOUT = timedelta(seconds=5)
"""Longest that a replica tries to reach its donor, which may have died since: all others wait for it meanwhile."""
QUORUM_TIMEOUT = timedelta(days=7)
"""Longest that a replica waits until enough of them are there: as long as a run may take."""
QUORUM_RETRIES = 6_000_000
"""Of a quorum service that does not answer, such as one that is being restarted: TorchFT spreads them over that."""
ACTIVITY_AFTER_S = 0.25
"""Seconds of waiting for other replicas after which the agent is told: the wait is none of a step's."""
WARN_AFTER_S = 10.0
"""The same, after which people are told."""
POLL_S = 0.1
"""Between two looks at the time while other replicas are waited for."""
LOSS_KNOWN_S = 0.2
"""Seconds after which the quorum service knows of a loss as well; no replica that is lost is back so soon."""
STATE_TIMEOUT_S = 5.0
"""Seconds that a state may still take to come when one of the quorum is lost: its donor may never get to give it."""


class _StopRequested(Exception):
    """This process was told to end, and the others do not come."""


class PeerEvents(Protocol):
    """Where a rank hears of other replicas, and says what it noticed (rank_coordinator.py)."""

    def fileno(self) -> int | None:
        """Readable when there may be something to hear; None where nobody tells anything."""
        ...

    def take_lost_replicas(self) -> frozenset[int]:
        """Replicas that were said to be lost since the last call."""
        ...

    def set_activity(self, to: Activity) -> None:
        """Say what follows."""
        ...

    def report_finding(self, finding: Finding) -> None: ...

    def wait_limit_s(self) -> float:
        """Seconds for which others may still be waited for, where this process is to leave; else without end."""
        ...


class ReplicaGroup:
    """The replicas that train together, and the step that they have in hand."""

    def __init__(
        self,
        config: RankConfig,
        ranks: ControlGroup,
        events: PeerEvents,
        *,
        nccl: bool,
        export_state: Callable[[], State],
        import_state: Callable[[State], None],
    ) -> None:
        """Called by all ranks of a replica; `give` and `take` are called for those of other replicas and for this."""
        self._ranks = ranks
        self._events = events
        host = config.master_addr or socket.gethostname()
        here = _address_towards(host)
        # A store of its own: a replica of one rank may have none, and torchrun's may be shared by all replicas.
        self._store = make_store(here) if ranks.rank == 0 else None
        port = ranks.broadcast(self._store.port if self._store else 0)
        self._group = AbortableNccl(timeout=TIMEOUT) if nccl else AbortableGloo(timeout=TIMEOUT)
        self._transport = StateTransport(here)
        try:
            self._manager: Any = _ReplicaManager(
                pg=self._group,
                load_state_dict=self._receive_state,
                state_dict=export_state,
                min_replica_size=config.min_replicas,
                use_async_quorum=False,  # it would read the state of a donor that computes on, and FSDP2 dies of that
                timeout=TIMEOUT,
                quorum_timeout=QUORUM_TIMEOUT,
                connect_timeout=CONNECT_TIMEOUT,
                rank=ranks.rank,
                world_size=ranks.world_size,
                store_addr=host,
                store_port=port,
                lighthouse_addr=config.lighthouse,
                replica_id=str(config.replica),
                hostname=host,
                checkpoint_transport=self._transport,
                quorum_retries=QUORUM_RETRIES,
            )
        except RuntimeError as error:
            raise failure(
                "quorum-service-unreachable",
                f"the quorum service at {config.lighthouse} does not answer",
                exit_code=ExitCode.STORAGE_FAILED,
                where="TORCHFT_LIGHTHOUSE",
                evidence=(str(error),),
                remedy="see whether it runs, and whether this node reaches it",
                owner=Owner.CLUSTER,
            ) from error
        if ranks.world_size == 1:
            self._manager._client = LocalCommitClient(self._manager._client)
        self._manager._executor = DaemonExecutor()
        self._manager._connect_timeout = DONOR_TIMEOUT  # from here on it is for donors alone
        self._manager.peers = self
        self._waiting_finding = _waiting_for_replicas(config)
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """Rings when something that was sent has arrived, or cannot."""
        self._in_flight: list[torch.futures.Future[Any]] = []
        self._import_state = import_state
        self._received: State | None = None
        """What another replica gave this rank in the meeting in hand."""
        self._quorum_id = -1
        self._replica_count = config.replica_count
        self._committed = False
        """Whether the last step was committed."""
        self._lost_at: dict[int, float] = {}
        """When each replica was last said to be lost, in monotonic seconds."""

    @property
    def count(self) -> int:
        """Replicas that take part in the step in hand."""
        return self._manager.num_participants()

    @property
    def replica_index(self) -> int:
        """Of this replica among them, from 0."""
        return self._manager.participating_rank()

    def barrier_if_unchanged(self, step: int) -> bool:
        """Whether the replicas of the last step are all there for the next: then the quorum service is not asked.

        Where all of them train nobody can join, and a word among themselves takes a fraction of the time. It fails
        where one is lost, or could not commit the last step and has left the group. All ranks call it.
        """
        if not self._committed or self.count < self._replica_count or not isinstance(self._group, AbortableGloo):
            return False
        place = torch.tensor([step])
        self.start_allreduce(place)
        with suppress(_StopRequested):  # the others are still met where they come in time
            self.wait_for_replicas(self._all_arrived, self._process_events)
        together = self._all_arrived() and self._healthy and place.item() == step * self._replica_count
        self._in_flight = []
        if self._ranks.all(together):
            return True
        if self._healthy:
            self._fail(ConnectionError("not all replicas are there"))
        return self.should_commit()

    def join_quorum(self, step: int) -> bool:
        """Find who takes part in the step that follows; who stands behind others takes what they have.

        Where all stand at 0, they take what one of them has. Waits until enough replicas are there: False where this
        process is told to end first, after which nothing more can be asked of the others. All ranks call it.
        """
        try:
            self._join_until_met(step)
        except _StopRequested:
            return False
        return True

    def abort_if_lost(self) -> None:
        """Hear who is lost while the replicas of a step connect and catch up, and do not wait for what cannot come."""
        with suppress(BlockingIOError):
            os.eventfd_read(self._wake_fd)
        now = time.monotonic()
        self._lost_at.update(dict.fromkeys(self._events.take_lost_replicas(), now))
        known = self._group.connecting_since - LOSS_KNOWN_S
        lost = {each: at for each in self._group.members if (at := self._lost_at.get(each, 0.0)) > known}
        if lost:
            error = ConnectionError(f"lost: replica {', '.join(map(str, sorted(lost)))}")
            self._group.connecting.abort(error)
            if now - min(lost.values()) > STATE_TIMEOUT_S:
                self._transport.receiving.abort(error)

    def _join_until_met(self, step: int) -> None:
        said = ""
        while not self._join_once(step):
            why = str(self._manager.errored() or "another rank of this replica could not")
            if why != said:
                self._events.report_finding(_not_joined(why))
                said = why
            self._group.abandon()
            self._manager.should_commit()

    def _join_once(self, step: int) -> bool:
        self._events.take_lost_replicas()  # what is heard before belongs to a quorum that is no more
        self._manager.load_state_dict({"step": step, "batches_committed": 0})
        self._received = None
        self._manager.start_quorum()
        met, self._quorum_id = self._quorum_id, self._manager._quorum_id
        # Only where something has changed could one rank have failed to connect, or to be brought its state, alone.
        if met != self._quorum_id and not self._ranks.all(self._healthy):
            return False
        if self._received is not None:
            self._import_state(self._received)
        return True

    def _receive_state(self, state: State) -> None:
        self._received = state

    def should_commit(self) -> bool:
        """Whether the step in hand may be committed: the same on all ranks of this replica, which all ask, once."""
        self._committed = self._manager.should_commit()
        if not self._committed:
            self._group.abandon()  # so that those who committed learn of it
        return self._committed

    def start_allreduce(self, tensor: torch.Tensor) -> None:
        """Begin to replace a tensor by its sum over the replicas; nothing happens once the step has failed."""
        if not self._healthy:
            return
        options = AllreduceOptions()
        options.reduceOp = ReduceOp.SUM
        try:
            work: Any = self._group.allreduce([tensor], options)
        except RuntimeError as error:
            self._fail(error)
            return
        arriving = work.get_future()
        arriving.add_done_callback(self.wake)
        self._in_flight.append(arriving)

    def wait_all(self) -> bool:
        """Wait for all that was sent; False where the step has failed: then this replica takes no part in it.

        TorchFT's hook waits for each bucket, and fails an assertion when a peer is gone. This one waits once, for
        the peers or for the word that one of them is lost, whichever comes first.
        """
        while not self._all_arrived():
            self._wait_arrival()
        self._in_flight = []
        return self._healthy

    def _all_arrived(self) -> bool:
        """Whether all that was sent has arrived, or the step has failed."""
        try:
            for each in self._in_flight:
                if each.done():
                    each.wait()  # raises what went wrong; of NCCL's, the stream waits and not this thread
        except RuntimeError as error:
            self._fail(error)
        return not self._healthy or all(each.done() for each in self._in_flight)

    def wait_for_replicas(self, over: Callable[[], bool], process_events: Callable[[], None]) -> None:
        """Wait for other replicas, and say so: it is none of a step's time. Raises _Told where this one is to leave."""
        began = time.monotonic()
        aside_at, say_at, leave_at = began + ACTIVITY_AFTER_S, began + ACTIVITY_AFTER_S + WARN_AFTER_S, math.inf
        while not over():
            self._poller().poll(POLL_S * 1000)  # in this frame: stacks tell by its name what is waited for
            now = time.monotonic()
            process_events()
            if now >= aside_at:
                aside_at = math.inf
                self._events.set_activity(Activity.BETWEEN_STEPS)
            if now >= say_at:
                say_at = math.inf
                self._events.report_finding(self._waiting_finding)
            leave_at = min(leave_at, now + self._events.wait_limit_s())
            if now >= leave_at:
                raise _StopRequested
        if aside_at == math.inf:
            self._events.set_activity(Activity.STEPPING)

    @property
    def manager(self) -> Any:
        """TorchFT's, for what else of it is used (outer_sync.py)."""
        return self._manager

    def _wait_arrival(self) -> None:
        """Wait until something has arrived or a replica of this step is said to be lost."""
        self._poller().poll()
        self._process_events()

    def _process_events(self) -> None:
        """Take in what is said of the replicas of this step."""
        with suppress(BlockingIOError):
            os.eventfd_read(self._wake_fd)
        if lost := self._events.take_lost_replicas() & self._group.members:
            self._fail(ConnectionError(f"lost: replica {', '.join(map(str, sorted(lost)))}"))

    def _poller(self) -> select.poll:
        """Readable when something was rung for, or the agent may have said something."""
        ears = select.poll()
        for source in (self._wake_fd, self._events.fileno()):
            if source is not None:
                ears.register(source, select.POLLIN)
        return ears

    def wake(self, _: object) -> None:
        """Have whoever waits look."""
        os.eventfd_write(self._wake_fd, 1)

    @property
    def _healthy(self) -> bool:
        return self._manager.errored() is None

    def _fail(self, error: Exception) -> None:
        self._manager.report_error(error)
        self._group.abandon()


class _ReplicaManager(Manager):
    """A manager that says when it has to wait for other replicas."""

    replica_group: ReplicaGroup

    def wait_quorum(self) -> None:  # pyright: ignore[reportIncompatibleVariableOverride] - theirs is decorated
        """Wait for others, also for the word that one of them is lost, or that this process is to end."""
        quorum = cast("Future[None]", self._quorum_future)
        if not quorum.done():
            quorum.add_done_callback(self.replica_group.wake)
        self.replica_group.wait_for_replicas(quorum.done, self.replica_group.abort_if_lost)
        super().wait_quorum()

    def allreduce(  # pyright: ignore[reportIncompatibleVariableOverride] - theirs is decorated
        self, tensor: torch.Tensor, *_: Any, **__: Any
    ) -> _PendingMean:
        """For LocalSGD and DiLoCo: theirs would not hear that a replica is lost."""
        self.replica_group.start_allreduce(tensor)
        return _PendingMean(self.replica_group, tensor)


class _PendingMean:
    """A tensor that is on its way to become the mean over the replicas."""

    def __init__(self, replica_group: ReplicaGroup, tensor: torch.Tensor) -> None:
        self._replica_group = replica_group
        self._tensor = tensor

    def wait(self, *_: Any) -> bool:
        if self._replica_group.wait_all():
            self._tensor.div_(self._replica_group.count)
        return True


def _address_towards(host: str) -> str:
    """This machine's address in the network where a host is; nothing is sent."""
    family, _, _, _, there = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(there)
        return probe.getsockname()[0]


def _not_joined(why: str) -> Finding:
    return Finding(
        code="replica-connect-failed",
        severity=Severity.WARNING,
        what="this replica could not join the others, or not take their state, and tries again",
        evidence=(why,),
        remedy="Nothing, if one was lost just now. Else see whether each node reaches the others at any port.",
        owner=Owner.CLUSTER,
    )


def _waiting_for_replicas(config: RankConfig) -> Finding:
    return Finding(
        code="waiting-for-replicas",
        severity=Severity.WARNING,
        what="fewer replicas are there than training goes on with, or one of them is slow to come",
        where="recovery.min_replicas",
        evidence=(f"it needs {config.min_replicas} of {config.replica_count}",),
        remedy="Nothing: it goes on by itself once enough of them are there.",
        owner=Owner.CLUSTER,
    )
