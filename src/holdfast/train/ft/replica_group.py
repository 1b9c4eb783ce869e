"""Wraps TorchFT's manager for the session, and works around its limitations.

The manager finds who takes part in a step (a quorum), asks all ranks of this replica whether the step may be
committed, and lets a lagging replica receive state from the others' memory. What the state is, and when: see
replica_strategy.py. Deviations from TorchFT 0.2.0 are explained where they occur; abortable_pg.py,
state_transport.py and torchft_private.py use TorchFT as well. The file is long because joining a quorum, the step and
the waits share one state.
"""

from __future__ import annotations

import math
import os
import select
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, cast

import torch
from torchft.manager import Manager

from holdfast.errors import ExitCode, HoldfastError, failure
from holdfast.findings import Finding, Owner, Severity
from holdfast.protocol.rank_messages import Activity
from holdfast.protocol.wait_frames import FOR_REPLICAS, marked
from holdfast.train.ft import device_sync
from holdfast.train.ft.abortable_pg import CONNECT_S, AbortableGloo, AbortableNccl, make_store
from holdfast.train.ft.loss_watcher import LossWatcher
from holdfast.train.ft.state_transport import STATE_TIMEOUT_S, StateTransferError, StateTransport
from holdfast.train.ft.torchft_private import adjust_manager, is_behind, quorum_future, quorum_id
from holdfast.train.session.control_group import ControlGroup
from holdfast.train.session.rank_config import RankConfig
from holdfast.train.session.rank_coordinator import RankCoordinator
from holdfast.train.torch_private import NCCL_BLOCKING_WAIT, NCCL_CONNECT_TIMEOUT

State = dict[str, Any]
"""State for a lagging replica: anything that can be pickled, tensors in dicts."""

CONNECT_TIMEOUT = timedelta(seconds=60)
DONOR_TIMEOUT = timedelta(seconds=5)
"""Maximum time to connect to a donor, which may have died since: all other replicas wait meanwhile."""
QUORUM_TIMEOUT = timedelta(days=7)
"""Maximum wait until enough replicas are there: as long as a run may take."""
QUORUM_RETRIES = 6_000_000
"""Retries while the quorum service does not answer, for example restarts: TorchFT spreads them over the timeout."""
ACTIVITY_AFTER_S = 0.25
"""Seconds of waiting for other replicas before the agent is notified: the wait does not count as step time."""
WARN_AFTER_S = 10.0
"""Seconds of waiting before a warning is reported."""
POLL_S = 0.1
"""Poll interval while waiting for other replicas."""
DEVICE_POLL_S = 50e-6, 1e-3
"""Shortest and longest interval between two polls of an operation on a device; it grows with the wait."""
DEVICE_POLL_SHARE = 0.05
"""Part of a wait for a device that may pass between two polls."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 2.0
"""Pauses before the second and later retries of a quorum that a replica could not join; each doubles the last. The
first retry is immediate: usually a lost peer was the reason, and the next quorum is without it."""


class _StopRequested(Exception):
    """This process must exit, and the other replicas do not come."""


class ReplicaGroup:
    """The replicas that train together, and their current step."""

    def __init__(
        self,
        config: RankConfig,
        ranks: ControlGroup,
        events: RankCoordinator,
        *,
        nccl: bool,
        export_state: Callable[[], State],
        import_state: Callable[[State], None],
    ) -> None:
        """Called by all ranks of a replica; `export_state` and `import_state` transfer state between replicas."""
        self._ranks = ranks
        self._events = events
        self._replica = config.replica
        host = config.master_addr or socket.gethostname()
        here = _address_towards(host)
        # A separate store: a replica of one rank may have none, and all replicas may share torchrun's.
        self._store = make_store(here) if ranks.rank == 0 else None
        port = ranks.broadcast(self._store.port if self._store else 0)
        timeout = timedelta(seconds=config.peer_timeout_s)
        if nccl:
            # The launcher has set both, unless it is another, such as torchrun.
            os.environ.setdefault(NCCL_BLOCKING_WAIT, "0")
            os.environ.setdefault(NCCL_CONNECT_TIMEOUT, str(math.ceil(CONNECT_S)))
        self._group = AbortableNccl(timeout, shrinks=config.nccl_shrinks) if nccl else AbortableGloo(timeout)
        self._transport = StateTransport(here, timeout, lambda: quorum_id(self._manager))
        self._export_state = export_state
        self._export_error: Exception | None = None
        try:
            self._manager: Any = _ReplicaManager(
                pg=self._group,
                load_state_dict=self._receive_state,
                state_dict=self._exported_state,
                min_replica_size=config.min_replicas,
                init_sync=False,  # it would give the ranks of one replica the states of different ones
                use_async_quorum=False,  # it would read a donor's state during its next step, which crashes FSDP2
                timeout=timeout,
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
        adjust_manager(self._manager, only_rank=ranks.world_size == 1, donor_timeout=DONOR_TIMEOUT)
        self._manager.replica_group = self
        self._waiting_finding = _waiting_for_replicas(config)
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """Signalled when a transfer has completed or failed."""
        self._import_state = import_state
        self._received: State | None = None
        """State that another replica sent to this rank in the current quorum."""
        self._quorum_id = -1
        self._replica_count = config.replica_count
        self._committed = False
        """Whether the last step was committed."""
        events.on_replica_lost = self._on_replica_lost
        self._watcher = LossWatcher(events, self._close_if_overdue)

    @property
    def count(self) -> int:
        """Replicas that take part in the current step."""
        return self._manager.num_participants()

    @property
    def replica_index(self) -> int:
        """Index of this replica among them, from 0."""
        return self._manager.participating_rank()

    def barrier_if_unchanged(self, step: int) -> bool:
        """Whether all replicas of the last step are there for the next, so that no quorum request is needed.

        If all of them train, none can join, and a barrier among them takes a fraction of the time. It fails if one is
        lost, or could not commit the last step and has left the group. All ranks call it.
        """
        if not self._committed or self.count < self._replica_count or not isinstance(self._group, AbortableGloo):
            return False
        place = torch.tensor([step])
        self.start_allreduce(place)
        with suppress(_StopRequested):  # the quorum request still finds those that come in time
            self.wait_for_replicas(self._all_arrived, self._drain_wakes)
        together = (
            self._all_arrived()
            and self._healthy
            and device_sync.read_host(place) == [float(step * self._replica_count)]
        )
        if self._ranks.all(together):
            return True
        if self._healthy:
            self.fail(ConnectionError("not all replicas are there"))
        return self.should_commit()

    def join_quorum(self, step: int) -> bool:
        """Join the quorum of the next step; lagging replicas receive the others' state.

        Those at the highest step receive nothing, even at step 0. Waits until enough replicas are there; returns
        False if this process must exit first, after which no request to the others is possible. All ranks call it.
        """
        try:
            self._join_until_met(step)
        except _StopRequested:
            return False
        return True

    def abort_if_lost(self) -> None:
        """Process loss events while the replicas connect and catch up, and stop waiting for lost ones."""
        self._drain_wakes()
        if self._group.abort_connecting() > STATE_TIMEOUT_S:
            self._transport.receiving.abort(ConnectionError("a replica was lost, and its state has not come"))

    def _join_until_met(self, step: int) -> None:
        reported, pause_s = "", 0.0
        while not self._join_once(step):
            error = self._manager.errored()
            why = str(error.original_exception) if error else "another rank of this replica could not"
            if why != reported:
                self._events.report_finding(_not_joined(why))
                reported = why
            self._group.close(ConnectionError(why))  # before the manager waits for the device
            self._manager.should_commit()
            self._pause(pause_s)
            pause_s = min(LONGEST_PAUSE_S, 2 * pause_s + FIRST_PAUSE_S)

    def _pause(self, for_s: float) -> None:
        until = time.monotonic() + for_s
        self.wait_for_replicas(lambda: time.monotonic() >= until, self._drain_wakes)

    def _join_once(self, step: int) -> bool:
        self._manager.load_state_dict({"step": step, "batches_committed": 0})
        self._received = None
        self._manager.start_quorum()
        met, self._quorum_id = self._quorum_id, quorum_id(self._manager)
        # Otherwise no rank alone can have failed: none has connected or received a state.
        if (met != self._quorum_id or self._manager.behind) and not self._ranks.all(self._healthy):
            return False
        if self._received is not None:
            self._import_state(self._received)
        return True

    def _receive_state(self, state: State) -> None:
        self._received = state

    def _exported_state(self) -> State:
        try:
            device_sync.synchronize()  # TorchFT reads the state on its own stream, and waits only in a new quorum
            return self._export_state()
        except Exception as error:
            self._export_error = error
            raise

    def raise_state_error(self) -> None:
        """Raise the error with which this rank's state export, or its receipt of a state, has failed.

        It would come again. TorchFT mistakes it for a lost peer: the replicas would try forever.
        """
        if self._export_error is not None:
            raise self._export_error
        if self._transport.error is not None:
            raise _not_received(self._transport.error, f"rank {self._ranks.rank} of replica {self._replica}")

    def should_commit(self) -> bool:
        """Whether the current step may be committed: the same on all ranks of this replica; each calls it once."""
        self.wait_all()
        self._committed = self._manager.should_commit()
        return self._committed

    def leave_quorum(self) -> None:
        """Leave the quorum of a discarded step: close the connection, which notifies the replicas that committed."""
        self._group.close(ConnectionError("a step was discarded"))
        self._transport.leave()

    def exchange(self, own: Sequence[int], device: torch.device) -> list[list[int]] | None:
        """The integers of each replica of this step; None if one is lost: this one has left too. All ranks call it."""
        rows = torch.zeros(self.count, len(own), dtype=torch.int64, device=device)
        rows[self.replica_index] = torch.tensor(own)
        self.start_allreduce(rows)
        if self._ranks.all(self.wait_all()):
            return device_sync.read_host(rows)
        self.leave(ConnectionError("another rank of this replica has lost a replica"))
        return None

    def leave(self, error: Exception) -> None:
        """Leave the current quorum before its step; all ranks call it."""
        if self._healthy:
            self.fail(error)
        self.should_commit()

    def fail(self, error: Exception) -> None:
        """Fail the current step, and close the connection, so that the other replicas notice."""
        self._manager.report_error(error)
        self._group.close(error)

    def start_allreduce(self, tensor: torch.Tensor) -> None:
        """Start an in-place all-reduce that sums a tensor over the replicas; does nothing after the step has failed."""
        if not self._healthy:
            return
        try:
            self._group.start_allreduce(tensor, self.wake)
        except (RuntimeError, ConnectionError) as error:
            self.fail(error)

    def wait_all(self) -> bool:
        """Wait for all started operations; False if the step has failed: then this replica takes no part in it.

        TorchFT's hook waits for each bucket, and fails an assertion when a peer is gone. This one waits once, for
        completion or for the event that a replica is lost, whichever comes first. Their results may be read
        afterwards, and not before.
        """
        while not self._all_arrived():
            self._wait_arrival()
        return self._healthy

    def _all_arrived(self) -> bool:
        """Whether all operations are done, or the step has failed."""
        try:
            return not self._healthy or not self._group.is_waiting()
        except (RuntimeError, ConnectionError) as error:
            self.fail(error)
            return True

    @marked(FOR_REPLICAS)
    def wait_for_replicas(self, over: Callable[[], bool], process_events: Callable[[], None]) -> None:
        """Wait for other replicas and report it as non-step time. Raises _StopRequested if this replica must exit."""
        began = time.monotonic()
        aside_at, say_at, leave_at = began + ACTIVITY_AFTER_S, began + ACTIVITY_AFTER_S + WARN_AFTER_S, math.inf
        while not over():
            self._poller().poll(POLL_S * 1000)  # in this frame: a stack dump shows its mark
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
        """TorchFT's manager, for its other uses (semi_sync.py)."""
        return self._manager

    @marked(FOR_REPLICAS)
    def _wait_arrival(self) -> None:
        """Wait until an operation may be done, or the connection was closed."""
        if self._group.signals_completion:
            self._poller().poll()
            self._drain_wakes()
        else:
            shortest, longest = DEVICE_POLL_S
            time.sleep(min(longest, max(shortest, DEVICE_POLL_SHARE * self._group.waited_s)))

    def _drain_wakes(self) -> None:
        with suppress(BlockingIOError):
            os.eventfd_read(self._wake_fd)

    def _poller(self) -> select.poll:
        """Readable after a wake-up."""
        ears = select.poll()
        ears.register(self._wake_fd, select.POLLIN)
        return ears

    def _on_replica_lost(self, replica: int) -> None:
        """Close the connection to a lost replica; called in any thread."""
        self._group.lose(replica)
        self.wake(None)

    def _close_if_overdue(self) -> None:
        if self._group.close_if_overdue():
            self.wake(None)

    def wake(self, _: object) -> None:
        """Wake the waiting thread."""
        os.eventfd_write(self._wake_fd, 1)

    @property
    def _healthy(self) -> bool:
        return self._manager.errored() is None


class _ReplicaManager(Manager):
    """A manager that reports when it has to wait for other replicas, and leaves the quorum of a discarded step."""

    replica_group: ReplicaGroup
    behind = False
    """Whether this replica was behind the others when the last quorum formed."""

    def wait_quorum(self) -> None:  # pyright: ignore[reportIncompatibleVariableOverride] - theirs is decorated
        """Wait for others, for the event that one of them is lost, or for a stop request."""
        quorum = quorum_future(self)
        if not quorum.done():
            quorum.add_done_callback(self.replica_group.wake)
        self.replica_group.wait_for_replicas(quorum.done, self.replica_group.abort_if_lost)
        super().wait_quorum()
        self.behind = is_behind(self)
        self.replica_group.raise_state_error()

    def should_commit(  # pyright: ignore[reportIncompatibleVariableOverride] - theirs is decorated
        self, timeout: timedelta | None = None
    ) -> bool:
        """Also called by LocalSGD and DiLoCo."""
        committed = cast("bool", super().should_commit(timeout))
        if not committed:
            self.replica_group.leave_quorum()
        return committed

    def allreduce(  # pyright: ignore[reportIncompatibleVariableOverride] - theirs is decorated
        self, tensor: torch.Tensor, *_: Any, **__: Any
    ) -> _PendingMean:
        """For LocalSGD and DiLoCo: TorchFT's version does not notice a lost replica."""
        self.replica_group.start_allreduce(tensor)
        return _PendingMean(self.replica_group, tensor)


class _PendingMean:
    """A tensor whose all-reduce to the mean over the replicas is in progress."""

    def __init__(self, replica_group: ReplicaGroup, tensor: torch.Tensor) -> None:
        self._replica_group = replica_group
        self._tensor = tensor

    def wait(self, *_: Any) -> bool:
        if self._replica_group.wait_all():
            self._tensor.div_(self._replica_group.count)
        return True


def _address_towards(host: str) -> str:
    """This machine's address in the network of `host`; sends nothing."""
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


def _not_received(error: StateTransferError, where: str) -> HoldfastError:
    evidence = (str(error), f"donor: {error.donor}")
    if error.sent:
        return failure(
            "replica-state-unreadable",
            "this rank received the state of another replica and cannot load it",
            exit_code=ExitCode.CANNOT_RUN_HERE,
            where=where,
            evidence=evidence,
            remedy="install the same versions of Python, torch and the program's packages on all nodes, and let the "
            "state_dict of the model and the optimizer hold only what can be unpickled in any process",
        )
    return failure(
        "replica-state-unsendable",
        "the replica that has the state cannot send it to this rank",
        exit_code=ExitCode.USAGE,
        where=where,
        evidence=evidence,
        remedy="keep what cannot be pickled, such as functions, locks and open files, out of the state_dict of the "
        "model and the optimizer",
    )


def _waiting_for_replicas(config: RankConfig) -> Finding:
    return Finding(
        code="waiting-for-replicas",
        severity=Severity.WARNING,
        what="fewer replicas are present than training needs, or one of them is slow to join",
        where="recovery.min_replicas",
        evidence=(f"it needs {config.min_replicas} of {config.replica_count}",),
        remedy="Nothing: training continues by itself once enough replicas are present.",
        owner=Owner.CLUSTER,
    )
