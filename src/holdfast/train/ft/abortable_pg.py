"""Abortable process groups between replicas, based on TorchFT's.

Unlike TorchFT's, they never make a replica wait for one that is gone. Who takes part, and when: replica_group.py; their
state: state_transport.py.
"""

from __future__ import annotations

import math
import socket
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from threading import Lock, Thread
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import AllreduceOptions, ReduceOp
from torchft.process_group import ProcessGroupWrapper, create_store_client

from holdfast.train.abortable_call import AbortableCall
from holdfast.train.ft.torchft_private import current_group, replace_group
from holdfast.train.torch_private import gloo_group, nccl_group, nccl_shrunk

LOSS_KNOWN_S = 0.2
"""Seconds until the quorum service knows of a loss as well; no lost replica returns sooner."""
CONNECT_S = 30.0
"""Seconds that the members of a quorum have to connect; all begin together. It bounds the wait for one that has died,
where no agent reports the loss; a new quorum follows."""

CLOSE_S = 10.0
"""Seconds that a new NCCL group waits for the end of the previous one."""
ABORTED_POLL_S = 0.005
"""Interval between checks for the end of aborted operations."""


class _Operation(Protocol):
    """An all-reduce in progress."""

    def done(self) -> bool:
        """Whether the result may be read, or there is an error."""
        ...

    def wait(self) -> object:
        """Raise the error of an operation that is done."""
        ...


class AbortableGroup(ProcessGroupWrapper):
    """The connections of a quorum's replicas, which any thread can close at any moment.

    A closed connection stays closed: an operation counts only if it was done before `error` was set.
    """

    signals_completion = True
    """Whether an operation that is done calls `wake`; otherwise it has to be polled."""

    def __init__(self, timeout: timedelta) -> None:
        super().__init__(timeout=timeout)
        self.timeout = timeout
        self.members: frozenset[int] = frozenset()
        self._replicas: tuple[int, ...] = ()
        """The replica of each rank of the group: `members`, in order."""
        self.connecting_since = 0.0
        """Monotonic seconds at which the replicas began to connect."""
        self.connecting = AbortableCall()
        self.error: Exception | None = None
        """Why the connection was closed."""
        self._lock = Lock()
        self._lost_at: dict[int, float] = {}
        """When each replica was last reported lost, in monotonic seconds."""
        self._closing: Thread | None = None
        self._operations = deque[_Operation]()
        """Operations that are not known to be done, in order."""
        self._waiting_since = math.inf
        """Monotonic seconds at which the first of them was started."""

    def configure(self, *given: Any, **named: Any) -> None:
        """Connect the replicas of a new quorum; called by TorchFT, in a thread."""
        ranks_of_each, ranks = given[6:8]
        replicas = tuple(rank // ranks_of_each for rank in ranks)
        with self._lock:
            self._close()
            self._replicas, self.members = replicas, frozenset(replicas)
            self.connecting_since = time.monotonic()
            self.error, self._operations = None, deque[_Operation]()
        self.connect(*given, **named)

    def connect(self, *given: Any, **_: Any) -> None:
        """Connect as TorchFT does, but abortable: a replica that dies meanwhile leaves the others waiting."""
        store, _, rank, world_size = given[:4]
        try:
            group = self.connecting.run(partial(self._create, store, rank, world_size), CONNECT_S)
        except TimeoutError:
            raise ConnectionError(f"not all replicas connected within {CONNECT_S:g} s") from None
        with self._lock:
            replace_group(self, group)
            del group  # it closes with its last reference, and the traceback of the error below would be one
            if lost := self._lost():
                self._close(_lost_error(lost), lost)
        if lost:
            raise _lost_error(lost)

    def lose(self, replica: int) -> None:
        """Close the connection if it includes this replica, which is lost; called in any thread."""
        with self._lock:
            self._lost_at[replica] = time.monotonic()
            if replica in self.members and current_group(self) is not None:
                self._close(_lost_error((replica,)), (replica,))

    def abort_connecting(self) -> float:
        """Stop connecting to lost replicas; returns how many seconds ago the first of them was lost, or 0."""
        if not (lost := self._lost()):
            return 0.0
        self.connecting.abort(_lost_error(lost))
        return time.monotonic() - min(self._lost_at[each] for each in lost)

    def close(self, error: Exception) -> None:
        """Close the connections, so that replicas not adjacent to the lost one notice; called in any thread.

        TorchFT keeps them until the next quorum, so that such a replica waits for the group's timeout.
        """
        with self._lock:
            self._close(error)

    def start_allreduce(self, tensor: torch.Tensor, wake: Callable[[object], None]) -> None:
        """Start an in-place all-reduce that sums a tensor; raises RuntimeError or ConnectionError."""
        with self._lock:
            holder = [current_group(self)]
        if holder[0] is None:
            raise ConnectionError(str(self.error or "not connected"))
        # Without the lock: where the device hangs, NCCL blocks until another thread aborts.
        operation = self._start(holder[0], tensor, wake)
        with self._lock:
            if current_group(self) is holder[0]:
                holder.clear()
                if not self._operations:
                    self._waiting_since = time.monotonic()
                self._operations.append(operation)
                return
        # Closed meanwhile: an operation that began after the abort may wait for the group's timeout, and so would this
        # thread if it dropped the last reference.
        Thread(target=_close_group, args=(holder, _abort, (operation,)), name="close replicas", daemon=True).start()
        raise ConnectionError(str(self.error))

    def is_waiting(self) -> bool:
        """Whether an operation is not done yet; raises RuntimeError or ConnectionError if one failed."""
        # The error first: `done` waits for the abort or the shrink of an NCCL communicator, which holds its mutex.
        while self._operations and self.error is None and self._operations[0].done():
            # And after: an operation of a connection that is being aborted becomes done as well, with any result.
            if self.error is not None:  # another thread sets it
                break
            self._operations.popleft().wait()
        if not self._operations:
            self._waiting_since = math.inf
            return False
        if self.error is not None:
            raise ConnectionError(str(self.error))
        return True

    @property
    def waited_s(self) -> float:
        """Seconds since the first operation was started that is not known to be done; 0 if there is none."""
        return max(0.0, time.monotonic() - self._waiting_since)

    def close_if_overdue(self) -> bool:
        """Close the connection if an operation takes longer than any replica may; called in any thread."""
        overdue = self.waited_s > self.timeout.total_seconds()
        if overdue:
            self.close(ConnectionError(f"no answer from the other replicas in {self.timeout.total_seconds():g} s"))
        return overdue

    def _start(self, group: Any, tensor: torch.Tensor, wake: Callable[[object], None]) -> _Operation:
        future = group.allreduce([tensor], _sum_options()).get_future()
        future.add_done_callback(wake)
        return future

    def _lost(self) -> tuple[int, ...]:
        """Members lost since they began to connect, or just before: the quorum service learns of it a little later."""
        known = self.connecting_since - LOSS_KNOWN_S
        return tuple(sorted(each for each in self.members if self._lost_at.get(each, 0.0) > known))

    def _close(self, error: Exception | None = None, lost: Iterable[int] = ()) -> None:
        # The error first: see `is_waiting`.
        self.error = self.error or error
        self._waiting_since = math.inf
        holder = [replace_group(self, None)]
        if holder[0] is not None:
            # In a thread: closing waits for transfers to or from a peer that may hang.
            given = holder, self._release(lost), tuple(self._operations)
            self._closing = Thread(target=_close_group, args=given, name="close replicas", daemon=True)
            self._closing.start()

    def _release(self, lost: Iterable[int]) -> Callable[[Any], None]:
        """What ends all operations of a torch group that these replicas have left."""
        return _abort

    def _create(self, store: str, rank: int, world_size: int) -> dist.ProcessGroup:
        """Create torch's group; blocks until all members are there."""
        raise NotImplementedError


def _abort(group: Any) -> None:
    group.abort()


def _close_group(holder: list[Any], release: Callable[[Any], None], unfinished: Collection[_Operation]) -> None:
    """Close a group that has no other reference: the thread that drops the last reference waits as well.

    Unfinished operations, and thereby their tensors, are kept until they no longer write to them.
    """
    group = holder.pop()
    if group is not None:
        release(group)
    del group
    deadline = time.monotonic() + CONNECT_S
    while not all(each.done() for each in unfinished) and time.monotonic() < deadline:
        time.sleep(ABORTED_POLL_S)


def _lost_error(lost: Iterable[int]) -> ConnectionError:
    return ConnectionError(f"lost: replica {', '.join(map(str, lost))}")


def _sum_options() -> AllreduceOptions:
    options = AllreduceOptions()
    options.reduceOp = ReduceOp.SUM
    return options


class AbortableGloo(AbortableGroup):
    """Gloo group for CPUs."""

    def _create(self, store: str, rank: int, world_size: int) -> dist.ProcessGroup:
        # Without torch 2.15's warning about TorchFT's group: it numbers operations, which torch now does itself.
        return gloo_group(create_store_client(store, timeout=self.timeout), rank, world_size, self.timeout)


class AbortableNccl(AbortableGroup):
    """NCCL group for GPUs.

    An all-reduce with a replica that has died neither completes nor fails, and blocks every kernel and host call that
    waits for it, until the communicator is aborted. Nothing but this class aborts it: torch's watchdog does not run
    (torch_private.nccl_group), because it would end the process.
    """

    signals_completion = False

    def __init__(self, timeout: timedelta, *, shrinks: bool = False) -> None:
        """`shrinks`: after a loss the survivors shrink their communicator, where all of them can."""
        super().__init__(timeout)
        self._shrinks = shrinks
        self._device = torch.device("cuda", 0)
        self._shrunk: tuple[frozenset[int], Any] | None = None
        """A group that was shrunk, and its replicas."""

    def configure(self, *given: Any, **named: Any) -> None:
        if torch.cuda.is_available():
            self._device = torch.device("cuda", torch.cuda.current_device())  # of this thread
        super().configure(*given, **named)

    def _release(self, lost: Iterable[int]) -> Callable[[Any], None]:
        gone = frozenset(lost)
        excluded = [rank for rank, replica in enumerate(self._replicas) if replica in gone]
        remaining = self.members - gone
        return partial(self._shrink, remaining, excluded) if self._shrinks and excluded and remaining else _abort

    def _shrink(self, remaining: frozenset[int], excluded: list[int], group: Any) -> None:
        """Abort a group's operations, and make a group of the replicas that remain; blocks until all of them do."""
        with suppress(RuntimeError, ConnectionError):  # then the next quorum makes a new one
            self._shrunk = remaining, nccl_shrunk(group, excluded, self._device, CONNECT_S)
        group.abort()

    def _create(self, store: str, rank: int, world_size: int) -> dist.ProcessGroup:
        if self._closing is not None:  # NCCL creates and aborts communicators of one device one after the other
            self._closing.join(CLOSE_S)
        client = create_store_client(store, timeout=self.timeout)
        if self._shrinks and (shrunk := self._take_shrunk(client, rank, world_size)) is not None:
            return shrunk
        return nccl_group(client, rank, world_size, self.timeout, self._device, CONNECT_S)

    def _take_shrunk(self, store: dist.Store, rank: int, world_size: int) -> dist.ProcessGroup | None:
        """The group that was shrunk, if all replicas of this quorum have the same."""
        members, group = self._shrunk or (None, None)
        self._shrunk = None
        store.set(f"shrunk/{rank}", str(int(members == self.members)))
        if all(store.get(f"shrunk/{each}") == b"1" for each in range(world_size)):
            return group
        if group is not None:
            group.abort()
        return None

    def _start(self, group: Any, tensor: torch.Tensor, wake: Callable[[object], None]) -> _Operation:
        return _DeviceOperation(group.allreduce([tensor], _sum_options()))


class _DeviceOperation:
    """An operation whose future is done, and whose `wait` returns, as soon as it is enqueued on the device."""

    def __init__(self, work: dist.Work) -> None:
        self._work = work

    def done(self) -> bool:
        return self._work.is_completed()  # queries the CUDA event at its end

    def wait(self) -> object:
        return self._work.wait()


def make_store(address: str) -> dist.TCPStore:
    """A TCPStore that listens at one address of this machine; by default it would listen at all."""
    with socket.create_server((address, 0), family=address_family(address)) as ear:
        port = ear.getsockname()[1]
        return dist.TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=ear.detach())


def address_family(address: str) -> socket.AddressFamily:
    """Whether an IP address is IPv4 or IPv6."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET
