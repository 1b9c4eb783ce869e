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
- The groups of torch.distributed are recorded, and a write to a rank's pipe makes it dump what was recorded, in the
  format of torch's flight recorder. Torch has no recorder for a group that is written in Python.

`install` makes the replicas of this process use it in place of NCCL. As a backend of torch.distributed (`register`),
`wait` blocks, and the future is done, once the operation is complete: torch's own code reads the result next, and on a
GPU the kernel that does so would wait on the device. DDP and FSDP2 run on that.
"""

from __future__ import annotations

import os
import pickle
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Lock, Thread
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves, tree_map

from holdfast.host.files import atomic_write
from holdfast.protocol.flight_recorder_files import DUMP_PREFIX, ENTRIES, NCCL_PIPE_PREFIX, dump_path, nccl_pipe
from holdfast.train.torch_private import gloo_group

FOR_GOOD = timedelta(days=7)
COLLECTIVES = {
    "allreduce": "all_reduce",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "allgather": "all_gather",
    "_allgather_base": "_all_gather_base",
    "all_gather_single": "_all_gather_base",
    "allgather_into_tensor_coalesced": "all_gather_into_tensor_coalesced",
    "all_gather_single_coalesced": "all_gather_into_tensor_coalesced",
    "reduce_scatter": "reduce_scatter",
    "_reduce_scatter_base": "_reduce_scatter_base",
    "reduce_scatter_single": "_reduce_scatter_base",
    "alltoall_base": "all_to_all",
    "gather": "gather",
    "scatter": "scatter",
    "barrier": "all_reduce_barrier",
    "recv": "recv",
}
"""The methods of a group, and what torch's flight recorder calls each on NCCL."""

_groups: WeakSet[NcclLike] = WeakSet()


def tensors_of(given: object) -> list[torch.Tensor]:
    return [each for each in tree_leaves(given) if isinstance(each, torch.Tensor)]


class Operation(dist.Work):
    """An operation on a group's stream."""

    def __init__(
        self, call: Callable[[], dist.Work], outputs: list[torch.Tensor], results: list[torch.Tensor], *, blocks: bool
    ) -> None:
        super().__init__()
        self.call = call
        self.ended = Event()
        self._outputs, self._results = outputs, results
        self._blocks = blocks
        self._future = torch.futures.Future[list[torch.Tensor]]()
        if not blocks:
            self._future.set_result(outputs)

    def copy_back(self) -> None:
        for output, result in zip(self._outputs, self._results, strict=True):
            output.detach().copy_(result)

    def release(self) -> None:
        """Complete the future; without the group's lock, because DDP continues in this thread."""
        if self._blocks:
            self._future.set_result(self._outputs)

    def is_completed(self) -> bool:
        return self.ended.is_set()

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self._blocks:
            self.ended.wait()
        return True

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        return self._future


class FlightRecorder:
    """The operations of this process, which a thread dumps whenever something is written to the rank's pipe."""

    def __init__(self, rank: int) -> None:
        self._lock = Lock()
        self._entries = deque[tuple[dict[str, Any], Event]](maxlen=int(os.environ.get(ENTRIES, "0")))
        self._groups: dict[str, Sequence[int]] = {}
        self._enqueued: dict[str, list[Event]] = {}
        pipes, dumps = os.environ.get(NCCL_PIPE_PREFIX), os.environ.get(DUMP_PREFIX)
        if pipes and dumps and self._entries.maxlen:
            pipe = nccl_pipe(pipes, rank)
            pipe.unlink(missing_ok=True)
            os.mkfifo(pipe)
            given = os.open(pipe, os.O_RDWR | os.O_CLOEXEC), dump_path(dumps, rank)
            Thread(target=self._serve, args=given, name="nccl-like flight recorder", daemon=True).start()

    def add_group(self, name: str, ranks: Sequence[int]) -> None:
        with self._lock:
            self._groups[name], self._enqueued[name] = ranks, []

    def record(self, group: str, operation: str, given: tuple[Any, ...], ended: Event) -> None:
        outputs = tensors_of(given[:1])
        inputs = tensors_of(given[1:2]) or outputs
        with self._lock:
            self._enqueued[group].append(ended)
            entry = {
                "pg_id": [*self._groups].index(group),
                "process_group": (group, ""),
                "collective_seq_id": len(self._enqueued[group]),
                "profiling_name": f"nccl:{operation}",
                "time_created_ns": time.time_ns(),
                "input_sizes": [[*each.shape] for each in inputs],
                "input_dtypes": [each.type().split(".")[-1].removesuffix("Tensor") for each in inputs],
                "output_sizes": [[*each.shape] for each in outputs],
                "output_dtypes": [each.type().split(".")[-1].removesuffix("Tensor") for each in outputs],
                "is_p2p": operation == "recv",
            }
            self._entries.append((entry, ended))

    def dump(self) -> bytes:
        with self._lock:
            entries, groups = [*self._entries], [*self._groups.items()]
            completed = [sum(each.is_set() for each in ended) for ended in self._enqueued.values()]
            enqueued = [len(ended) for ended in self._enqueued.values()]
        states = {False: {"state": "scheduled", "retired": False}, True: {"state": "completed", "retired": True}}
        return pickle.dumps(
            {
                "version": "2.10",
                "pg_config": {name: {"name": name, "desc": "", "ranks": str([*ranks])} for name, ranks in groups},
                "pg_status": {
                    str(number): {"last_enqueued_collective": enqueued[number], "last_completed_collective": done}
                    for number, done in enumerate(completed)
                },
                "entries": [entry | states[ended.is_set()] for entry, ended in entries],
            },
            protocol=2,
        )

    def _serve(self, pipe: int, file: Path) -> None:
        while os.read(pipe, 4096):
            atomic_write(file, self.dump())  # torch writes it in place, where a drill could read a part


flight_recorder = cache(FlightRecorder)
"""That of this process, which has one rank."""


class NcclLike(dist.ProcessGroup):
    """See the module."""

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world_size: int,
        *,
        wait_blocks: bool = False,
        record: Callable[[str, tuple[Any, ...], Event], None] = lambda *_: None,
        timeout_s: float | None = None,
        end_process: Callable[[], None] = os.abort,
    ) -> None:
        """Blocks until all members have connected."""
        super().__init__(rank, world_size)
        self._gloo = gloo_group(store, rank, world_size, FOR_GOOD)
        self._wait_blocks, self._record = wait_blocks, record
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
            unfinished = [*self._pending]
            self._pending.clear()
            for each in unfinished:
                each.ended.set()
        for each in unfinished:
            each.release()
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
        outputs, results = tensors_of(given[:1]), tensors_of(copies[:1])
        call = partial(getattr(self._gloo, name), *copies)
        operation = Operation(call, outputs, results, blocks=self._wait_blocks)
        with self._lock:
            if self._aborted:
                raise RuntimeError("NCCL communicator was aborted")
            self._pending.append(operation)
            self._record(COLLECTIVES[name], given, operation.ended)
            for each in outputs:
                each.detach().fill_(torch.nan if each.is_floating_point() else torch.iinfo(each.dtype).min)
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
            operation.release()

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
    return lambda self, *given, **named: self.enqueue(name, (*given, *named.values()))


for _name in COLLECTIVES:
    setattr(NcclLike, _name, _collective(_name))  # torch has renamed some, and its versions call one name or the other


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

    def create(options: Any, _: object) -> NcclLike:
        ranks = options.global_ranks_in_group or range(options.group_size)
        recorder = flight_recorder(ranks[options.group_rank])
        recorder.add_group(options.group_id, ranks)
        record = partial(recorder.record, options.group_id)
        return NcclLike(options.store, options.group_rank, options.group_size, wait_blocks=True, record=record)

    for name in COLLECTIVES:  # torch does not compile its own groups, which are not in Python
        setattr(NcclLike, name, torch.compiler.disable(getattr(NcclLike, name)))
    dist.Backend.register_backend("nccl_like", create, extended_api=True, devices=["cpu"])
    return "nccl_like"
