"""A process group that fails like NCCL, on a machine without a GPU; Gloo carries its data.

What torch documents of ProcessGroupNCCL, and what stands for it here:

- An operation is enqueued on the group's stream: its future is done, and `wait` returns, immediately. A thread is
  the stream; it runs the operations in order.
- The result is in memory only when the operation is complete (`is_completed`); until then the output holds NaN, so that
  whoever reads it early has wrong weights, and not by chance the right ones.
- An operation with a dead or hung peer never completes, and never fails.
- A host call that waits for the device (`synchronize`) then blocks for ever.
- `abort`, from any thread, completes all operations with a result that means nothing, and releases such calls.
- With a timeout, a watchdog ends the process when an operation takes longer.

`install` makes the replicas of this process use it in place of NCCL. As a backend of torch.distributed (`register`),
`wait` blocks until the operation is complete: torch's own code reads the result next, and on a GPU the kernel that does
so would wait on the device. FSDP2 runs on that; DDP does not, whose C++ code needs a work of torch's.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from queue import SimpleQueue
from threading import Event, Lock, Thread
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves, tree_map

from holdfast.train.torch_private import gloo_group

FOR_GOOD = timedelta(days=7)
COLLECTIVES = (
    "allreduce",
    "broadcast",
    "reduce",
    "allgather",
    "_allgather_base",
    "all_gather_single",
    "reduce_scatter",
    "_reduce_scatter_base",
    "reduce_scatter_single",
    "alltoall_base",
    "gather",
    "scatter",
    "barrier",
    "recv",
)

_groups: WeakSet[NcclLike] = WeakSet()


class Operation(dist.Work):
    """An operation on a group's stream."""

    def __init__(self, call: Callable[[], dist.Work], copy_back: Callable[[], None], *, blocks: bool) -> None:
        super().__init__()
        self.call, self.copy_back = call, copy_back
        self.ended = Event()
        self._blocks = blocks
        self._enqueued = torch.futures.Future[None]()
        self._enqueued.set_result(None)

    def is_completed(self) -> bool:
        return self.ended.is_set()

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self._blocks:
            self.ended.wait()
        return True

    def get_future(self) -> torch.futures.Future[None]:
        return self._enqueued


class NcclLike(dist.ProcessGroup):
    """See the module."""

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world_size: int,
        *,
        wait_blocks: bool = False,
        timeout_s: float | None = None,
        end_process: Callable[[], None] = os.abort,
    ) -> None:
        """Blocks until all members have connected."""
        super().__init__(rank, world_size)
        self._gloo = gloo_group(store, rank, world_size, FOR_GOOD)
        self._wait_blocks = wait_blocks
        self._name, self._store = "", store
        self._lock = Lock()
        self._aborted = False
        self._pending = deque[Operation]()
        self._stream = SimpleQueue[Operation]()
        Thread(target=self._run, name="nccl-like stream", daemon=True).start()
        if timeout_s is not None:
            Thread(target=self._watch, args=(timeout_s, end_process), name="nccl-like watchdog", daemon=True).start()
        _groups.add(self)

    def getBackendName(self) -> str:
        return "nccl_like"

    @property
    def group_name(self) -> str:
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def abort(self) -> None:
        with self._lock:
            self._aborted = True
            for each in self._pending:
                each.ended.set()
            self._pending.clear()
        Thread(target=self._gloo.abort, daemon=True).start()

    def shrunk(self, excluded: list[int]) -> NcclLike:
        """Abort this group, and return one without these ranks; blocks until all others have called it."""
        self.abort()
        rest = [each for each in range(self.size()) if each not in excluded]
        store = dist.PrefixStore(f"without-{excluded}", self._store)
        return NcclLike(store, rest.index(self.rank()), len(rest), wait_blocks=self._wait_blocks)

    def synchronize(self) -> None:
        """Wait for everything that is enqueued."""
        for each in list(self._pending):
            each.ended.wait()

    def enqueue(self, name: str, given: tuple[Any, ...]) -> Operation:
        """Start Gloo's collective of this name on copies of the tensors; the first argument has the outputs."""
        copies = tree_map(lambda each: each.detach().clone() if isinstance(each, torch.Tensor) else each, given)
        outputs = [each for each in tree_leaves(given[:1]) if isinstance(each, torch.Tensor)]
        results = [each for each in tree_leaves(copies[:1]) if isinstance(each, torch.Tensor)]

        def copy_back() -> None:
            for output, result in zip(outputs, results, strict=True):
                output.detach().copy_(result)

        for each in outputs:
            each.detach().fill_(torch.nan if each.is_floating_point() else torch.iinfo(each.dtype).min)
        operation = Operation(lambda: getattr(self._gloo, name)(*copies), copy_back, blocks=self._wait_blocks)
        with self._lock:
            if self._aborted:
                raise RuntimeError("NCCL communicator was aborted")
            self._pending.append(operation)
        self._stream.put(operation)
        return operation

    def _run(self) -> None:
        while True:
            operation = self._stream.get()
            try:
                operation.call().wait()
            except RuntimeError:
                return  # a peer is gone: neither this operation nor any later one ever completes
            with self._lock:
                if self._aborted:
                    return
                operation.copy_back()
                self._pending.remove(operation)
                operation.ended.set()

    def _watch(self, timeout_s: float, end_process: Callable[[], None]) -> None:
        first, since = None, time.monotonic()
        while not self._aborted:
            now, oldest = time.monotonic(), next(iter(list(self._pending)), None)
            if oldest is not first or oldest is None:
                first, since = oldest, now
            elif now - since > timeout_s:
                end_process()
                return
            time.sleep(timeout_s / 10)


def _collective(name: str) -> Callable[..., Operation]:
    return lambda self, *given: self.enqueue(name, given)


for _name in COLLECTIVES:
    setattr(NcclLike, _name, _collective(_name))  # some names are only in newer versions of torch


def synchronize() -> None:
    """What every host call does that reads from a device: wait for all streams."""
    for each in list(_groups):
        each.synchronize()


def install() -> None:
    """Make replicas of this process communicate as on GPUs, and their code read results as from a device."""
    from torchft.manager import Manager

    from holdfast.train.ft import abortable_pg, device_sync, replica_strategy

    def connect(store: dist.Store, rank: int, world_size: int, *_: object) -> NcclLike:
        return NcclLike(store, rank, world_size)

    def synchronized(call: Callable[..., Any]) -> Callable[..., Any]:
        def after(*given: Any, **named: Any) -> Any:
            synchronize()
            return call(*given, **named)

        return after

    abortable_pg.nccl_group = connect
    abortable_pg.nccl_shrunk = lambda group, excluded, *_: group.shrunk(excluded)
    replica_strategy._uses_nccl = lambda *_: True
    device_sync.read_host = synchronized(device_sync.read_host)
    Manager.should_commit = synchronized(Manager.should_commit)
    Manager._async_quorum = synchronized(Manager._async_quorum)


def register() -> str:
    """Make it a backend of torch.distributed, for the ranks of one replica; returns its name."""

    def create(store: dist.Store, rank: int, world_size: int, _: timedelta) -> NcclLike:
        return NcclLike(store, rank, world_size, wait_blocks=True)

    dist.Backend.register_backend("nccl_like", create, devices=["cpu"])
    return "nccl_like"
