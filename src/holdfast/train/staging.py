"""Owns a buffer on the host that what is to be saved is copied into: made once, used again for every save.

The copies run beside the next forward and backward pass, for nothing but the optimiser changes what it owns: its step
waits until they are done. Whatever somebody else might change is copied before `begin` returns. Refuses to own what is
written of it (checkpoint.py) and when (session.py).
"""

from __future__ import annotations

import copy
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple, cast

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from holdfast.train.profiler import waiting_for_checkpoint
from holdfast.train.trees import is_plain, local, tensors

COPIERS = min(4, len(os.sched_getaffinity(0)))
"""Threads that copy on the host: one does 7 GB/s here, two do 12."""
ALIGN_BYTES = 64


class _Copy(NamedTuple):
    source: torch.Tensor
    staged: torch.Tensor
    version: int
    """How often the source had been changed when the copy was asked for."""


class Staging:
    """What `begin` returns stays as it is until the next `begin`; it must have been written by then."""

    def __init__(
        self, optimizer: Optimizer, *, room: Callable[[int], mmap.mmap] | None = None, first_byte: int = 0
    ) -> None:
        """`room` gives so many bytes of memory where they are not to be this process's own; tensors lie one behind the
        other in it from `first_byte` on.
        """
        self._optimizer = optimizer
        self._room = room or _own_room
        self._first_byte = first_byte
        self._layout: list[tuple[torch.Size, torch.dtype]] = []
        self._staged: list[torch.Tensor] = []
        self._pinned: torch.Tensor | None = None
        self._pool = ThreadPoolExecutor(COPIERS, thread_name_prefix="holdfast-staging")
        self._making_room = threading.Lock()
        self._lock = threading.Lock()
        self._copying: list[_Copy] = []
        """Guarded by the lock: the writer and the optimiser's step both look at them when they are done."""
        self._running: list[Future[None]] = []
        self._event: torch.Event | None = None
        self._sound = self._trusting = True
        self.waited_s = 0.0
        """Seconds that the optimiser's steps have waited for copies so far."""
        hook: Any = torch.compiler.disable(self._before_step)
        optimizer.register_step_pre_hook(hook)

    def begin(self, tree: dict[str, Any]) -> dict[str, Any]:
        """A tree of the same shape whose tensors are on the host; complete once `settle` has returned."""
        sources = [local(tensor) for tensor in tensors(tree)]
        with self._making_room:
            self._make_room(sources)
        copies = [_Copy(*pair, pair[0]._version) for pair in zip(sources, self._staged, strict=True)]
        owned = self._owned() if self._trusting else set[int]()
        self._sound = True
        self._start([each for each in copies if each.source.data_ptr() not in owned])
        self._wait()
        self._copying = [each for each in copies if each.source.data_ptr() in owned]
        self._start(self._copying)
        return cast("dict[str, Any]", _mirrored(tree, iter(self._staged)))

    def prepare(self, tree: dict[str, Any]) -> None:
        """Have the buffer before the first save: the kernel takes seconds to hand out some GiB."""
        with self._making_room:
            self._make_room([local(tensor) for tensor in tensors(tree)])

    def settle(self) -> bool:
        """Wait for the copies; False where what they were made of was changed meanwhile, by another than the optimiser.

        From then on everything is copied at once.
        """
        self._wait()
        self._check()
        return self._sound

    def _before_step(self, *_: object) -> None:
        if not self._copying:
            return
        began = time.monotonic()
        with waiting_for_checkpoint():
            wait(self._running)
            if self._event is not None:
                torch.cuda.current_stream().wait_event(self._event)
            self._check()
        self.waited_s += time.monotonic() - began

    def _wait(self) -> None:
        for copied in self._running:
            copied.result()
        if self._event is not None:
            self._event.synchronize()

    def _check(self) -> None:
        with self._lock:
            if any(each.source._version != each.version for each in self._copying):
                self._sound = self._trusting = False
            self._copying = []

    def _start(self, copies: list[_Copy]) -> None:
        """Threads copy what is in the host's memory, a stream of its own what is in a GPU's."""
        on_host = [each for each in copies if not each.source.is_cuda]
        shares = (on_host[first::COPIERS] for first in range(COPIERS))
        self._running = [self._pool.submit(_copy, share) for share in shares if share]
        self._event = None
        if on_gpu := [each for each in copies if each.source.is_cuda]:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                _copy(on_gpu)
            self._event = stream.record_event()

    def _owned(self) -> set[int]:
        """Where the tensors lie that only the optimiser's step changes: its parameters and its state."""
        parameters = [tensor for group in self._optimizer.param_groups for tensor in group["params"]]
        state = [value for values in self._optimizer.state.values() for value in values.values()]
        return {local(each).data_ptr() for each in (*parameters, *state) if isinstance(each, torch.Tensor)}

    def _make_room(self, sources: Sequence[torch.Tensor]) -> None:
        """Have the buffer, where what is to be saved is not laid out as it was the last time."""
        layout = [(source.shape, source.dtype) for source in sources]
        if layout == self._layout:
            return
        if self._pinned is not None:
            _cudart().cudaHostUnregister(self._pinned.data_ptr())
            self._pinned = None
        ends = [self._first_byte]
        for source in sources:
            ends.append(ends[-1] + -(-source.nbytes // ALIGN_BYTES) * ALIGN_BYTES)
        room = self._room(max(ends[-1], 1))
        whole = torch.frombuffer(room, dtype=torch.uint8)
        whole.zero_()  # has the kernel hand the pages out now
        if any(source.is_cuda for source in sources):
            _cudart().cudaHostRegister(whole.data_ptr(), whole.nbytes, 0)
            self._pinned = whole
        # Each has a storage of its own within the buffer: of one that shares a storage torch would write a copy.
        self._staged = [_within(room, start, source) for start, source in zip(ends, sources, strict=False)]
        self._layout = layout


def _own_room(size: int) -> mmap.mmap:
    room = mmap.mmap(-1, size)
    room.madvise(mmap.MADV_HUGEPAGE)
    return room


def _copy(copies: Sequence[_Copy]) -> None:
    with torch.no_grad():
        for each in copies:
            each.staged.copy_(each.source, non_blocking=True)


def _cudart() -> Any:
    return cast("Any", torch.cuda).cudart()


def _within(room: mmap.mmap, start: int, like: torch.Tensor) -> torch.Tensor:
    if like.nbytes == 0:
        return torch.empty(like.shape, dtype=like.dtype)
    flat = torch.frombuffer(room, dtype=torch.uint8, count=like.nbytes, offset=start)
    return flat.view(like.dtype).view(like.shape)


def _mirrored(tree: object, staged: Iterator[torch.Tensor]) -> object:
    """The tree with staged tensors in place of its own, in the order of `tensors`, and copies of all else."""
    if isinstance(tree, dict):
        tree = cast("dict[object, object]", tree)
        return {key: _mirrored(value, staged) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        values = cast("Sequence[object]", tree)
        return type(values)(_mirrored(value, staged) for value in values)  # pyright: ignore[reportCallIssue]
    if type(tree) is DTensor:
        return DTensor(next(staged), tree._spec, requires_grad=False)
    if is_plain(tree):
        return next(staged)
    return tree.detach().to("cpu", copy=True) if isinstance(tree, torch.Tensor) else copy.deepcopy(tree)
