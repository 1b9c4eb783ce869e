"""Host staging buffer for saves, allocated once and reused.

Copies overlap the next forward and backward pass: only the optimiser changes these tensors, and its step waits until
the copies are done. They run in the writer thread, so that the loop wakes one thread only. Tensors that other code may
change are copied before `start_copy` returns. When: session.py. Writing: manager.py. Reuse of the tree:
state_dict_cache.py.
"""

from __future__ import annotations

import copy
import mmap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from itertools import compress
from operator import attrgetter
from typing import Any, NamedTuple, cast

import torch
from torch.distributed.tensor import DTensor

from holdfast.findings import Finding, Severity
from holdfast.train.checkpoint.pytree import COPY_THREADS, is_plain, iter_tensors, offsets
from holdfast.train.checkpoint.state_dict_cache import CachedStateDict, cache_state_dict
from holdfast.train.checkpoint.train_state import TrainState
from holdfast.train.metrics.profiler import waiting_for_checkpoint
from holdfast.train.torch_private import local_part, sharded, version_of

SHARED_BYTES = 1 << 20
"""Smaller sizes are copied faster than another thread wakes up."""
_form = attrgetter("shape", "dtype", "is_cuda")


class _CopySource(NamedTuple):
    """A state tree, and the source tensor for each of its tensors."""

    tree: dict[str, Any]
    held: list[torch.Tensor]
    sources: list[torch.Tensor]
    """This rank's shards of the live tensors."""
    owned: list[bool]
    """Whether only the optimiser changes it."""


class _PendingCopies(NamedTuple):
    """Copies that overlap training steps; GPU memory is copied on a separate stream."""

    sources: list[torch.Tensor]
    staged: list[torch.Tensor]
    watched: list[torch.Tensor]
    """Base tensors of the sources, whose version counters detect changes."""
    versions: list[int]
    """Version of each when the copy was requested."""

    def changed(self) -> bool:
        return [*map(version_of, self.watched)] != self.versions


class StagingBuffer:
    """The tree from `start_copy` stays unchanged until the next `start_copy`; write it before then."""

    def __init__(
        self, train_state: TrainState, *, allocate: Callable[[int], mmap.mmap] | None = None, first_byte: int = 0
    ) -> None:
        """`allocate` returns a buffer of so many bytes, if it must not be private memory; tensors are laid out in it
        consecutively from `first_byte`.
        """
        self._train_state = train_state
        self._allocate = allocate or _private_buffer
        self._first_byte = first_byte
        self._layout: list[Any] = []
        self._staged: list[torch.Tensor] = []
        self._cached: CachedStateDict | None = None
        self._pinned: torch.Tensor | None = None
        self._pool = ThreadPoolExecutor(max(COPY_THREADS - 1, 1), thread_name_prefix="holdfast-staging")
        self._allocating = threading.Lock()
        self._lock = threading.Lock()
        self._copying: _PendingCopies | None = None
        """Guarded by the lock: the writer and the optimiser's step both check whether the copies are done."""
        self._copied = threading.Event()
        """Set once everything is in host memory."""
        self._event: torch.Event | None = None
        self._intact = self._overlap = True
        self.stalled_s = 0.0
        """Seconds that the optimiser's steps have waited for copies so far."""
        hook: Any = torch.compiler.disable(self._before_step)
        train_state.optimizer.register_step_pre_hook(hook)

    def start_copy(self) -> dict[str, Any]:
        """Return the state tree with its tensors on the host; complete once `finish_copy` returns.

        The caller must have another thread call `finish_copy` soon: the optimiser's next step waits for it.
        """
        tree, watched, sources, owned = self._cached_source() or self._new_source()
        self._intact = True
        if not self._overlap:
            owned = [False] * len(owned)
        if not all(owned):
            at_once = [not each for each in owned]
            self._copy_now([*compress(sources, at_once)], [*compress(self._staged, at_once)])
        beside, staged = [*compress(sources, owned)], [*compress(self._staged, owned)]
        self._event = _copy_from_gpu(beside, staged) if self._pinned is not None else None
        self._copied.clear()
        watched = [*compress(watched, owned)]
        self._copying = _PendingCopies(beside, staged, watched, [*map(version_of, watched)])
        return tree

    def _cached_source(self) -> _CopySource | None:
        """The cached tree."""
        held = self._cached.current_sources() if self._cached else None
        if self._cached is None or held is None:
            return None
        sources = [local_part(each) if type(each) is DTensor else each for each in held]
        return (
            _CopySource(self._cached.tree, held, sources, self._cached.owned)
            if _layout(sources) == self._layout
            else None
        )

    def _new_source(self) -> _CopySource:
        """A tree newly built by torch."""
        given = self._train_state.tensors()
        held = [*iter_tensors(given)]
        sources = [*map(local_part, held)]
        with self._allocating:
            self._allocate_buffer(sources)
        tree = cast("dict[str, Any]", _mirror(given, iter(self._staged)))
        self._cached = cache_state_dict(self._train_state, given, tree)
        owned = self._owned()
        return _CopySource(tree, held, sources, [each.data_ptr() in owned for each in sources])

    def prepare(self, tree: dict[str, Any]) -> None:
        """Allocate the buffer before the first save: the kernel takes seconds to map some GiB."""
        with self._allocating:
            self._allocate_buffer([local_part(tensor) for tensor in iter_tensors(tree)])

    def finish_copy(self) -> bool:
        """Copy; False if code other than the optimiser changed the sources meanwhile.

        From then on everything is copied immediately.
        """
        try:
            if self._copying is not None:
                self._copy_from_host(self._copying.sources, self._copying.staged)
        finally:
            self._copied.set()
        if self._event is not None:
            self._event.synchronize()
        self._check()
        return self._intact

    def _before_step(self, *_: object) -> None:
        self.wait_copied()

    def wait_copied(self) -> None:
        """Wait until no copy is running, so that the sources may change."""
        if self._copying is None:
            return
        began = time.monotonic()
        with waiting_for_checkpoint():
            self._copied.wait()
            if self._event is not None:
                torch.cuda.current_stream().wait_event(self._event)
            self._check()
        self.stalled_s += time.monotonic() - began

    def _check(self) -> None:
        with self._lock:
            if self._copying is not None and self._copying.changed():
                self._intact = self._overlap = False
            self._copying = None

    def _copy_now(self, sources: list[torch.Tensor], staged: list[torch.Tensor]) -> None:
        event = _copy_from_gpu(sources, staged)
        self._copy_from_host(sources, staged)
        if event is not None:
            event.synchronize()

    def _copy_from_host(self, sources: list[torch.Tensor], staged: list[torch.Tensor]) -> None:
        """Copy with all threads, this one included, if there is enough for more than one."""
        pairs = [each for each in zip(sources, staged, strict=True) if not each[0].is_cuda]
        copiers = COPY_THREADS if sum(each.nbytes for each, _ in pairs) >= SHARED_BYTES else 1
        others = [self._pool.submit(_copy, pairs[first::copiers]) for first in range(1, copiers)]
        try:
            _copy(pairs[::copiers])
        finally:
            wait(others)
        for each in others:
            each.result()

    def _owned(self) -> set[int]:
        """Addresses of the tensors that only the optimiser's step changes: its parameters and its state."""
        parameters = [tensor for group in self._train_state.optimizer.param_groups for tensor in group["params"]]
        state = [value for values in self._train_state.optimizer.state.values() for value in values.values()]
        return {local_part(each).data_ptr() for each in (*parameters, *state) if isinstance(each, torch.Tensor)}

    def _allocate_buffer(self, sources: Sequence[torch.Tensor]) -> None:
        """Allocate the buffer if the state's layout differs from the last save's."""
        layout = _layout(sources)
        if layout == self._layout:
            return
        if self._pinned is not None:
            _cudart().cudaHostUnregister(self._pinned.data_ptr())
            self._pinned = None
        *begins, end = offsets(sources, self._first_byte)
        room = self._allocate(max(end, 1))
        whole = torch.frombuffer(room, dtype=torch.uint8)
        whole.zero_()  # makes the kernel allocate the pages now
        if any(source.is_cuda for source in sources):
            _cudart().cudaHostRegister(whole.data_ptr(), whole.nbytes, 0)
            self._pinned = whole
        # Each view has its own storage within the buffer: torch would clone a tensor that shares a storage.
        self._staged = [_view_at(room, start, source) for start, source in zip(begins, sources, strict=True)]
        self._layout = layout


def torn_copy(what: str, who: str, *, code: str) -> Finding:
    """Finding for `finish_copy` returning False."""
    return Finding(
        code=code,
        severity=Severity.WARNING,
        what=f"{what} was given up: weights were changed while they were copied",
        where=who,
        remedy="Nothing: from now on they are copied before the next step begins. To have that stall less, change "
        "weights in the optimiser's step, or before session.commit().",
    )


def _private_buffer(size: int) -> mmap.mmap:
    room = mmap.mmap(-1, size)
    room.madvise(mmap.MADV_HUGEPAGE)
    return room


def _layout(sources: Sequence[torch.Tensor]) -> list[Any]:
    return [*map(_form, sources)]


def _copy(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    with torch.no_grad():
        for source, staged in pairs:
            staged.copy_(source, non_blocking=True)


def _copy_from_gpu(sources: Sequence[torch.Tensor], staged: Sequence[torch.Tensor]) -> torch.Event | None:
    """Start copies from the GPU on a separate stream; returns the event that marks their end."""
    pairs = [each for each in zip(sources, staged, strict=True) if each[0].is_cuda]
    if not pairs:
        return None
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        _copy(pairs)
    return stream.record_event()


def _cudart() -> Any:
    return cast("Any", torch.cuda).cudart()


def _view_at(room: mmap.mmap, start: int, like: torch.Tensor) -> torch.Tensor:
    if like.nbytes == 0:
        return torch.empty(like.shape, dtype=like.dtype)
    flat = torch.frombuffer(room, dtype=torch.uint8, count=like.nbytes, offset=start)
    return flat.view(like.dtype).view(like.shape)


def _mirror(tree: object, staged: Iterator[torch.Tensor]) -> object:
    """The tree with its tensors replaced by staged ones, in the order of `iter_tensors`, and copies of all else."""
    if isinstance(tree, dict):
        tree = cast("dict[object, object]", tree)
        return {key: _mirror(value, staged) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        values = cast("Sequence[object]", tree)
        return type(values)(_mirror(value, staged) for value in values)  # pyright: ignore[reportCallIssue]
    if type(tree) is DTensor:
        return sharded(next(staged), tree)
    if is_plain(tree):
        return next(staged)
    return tree.detach().to("cpu", copy=True) if isinstance(tree, torch.Tensor) else copy.deepcopy(tree)
