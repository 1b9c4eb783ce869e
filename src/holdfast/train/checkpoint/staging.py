"""Host staging buffer for saves, allocated once and reused.

Copies overlap the next forward and backward pass: only the optimizer changes these tensors, and its step waits until
the copies are done. They run in the writer thread, so that the loop wakes one thread only. A GPU copies while it
works, and not the loop but the GPU waits before the optimizer's step. Tensors that other code may change are copied
before `start_copy` returns, those on a GPU to GPU memory first. session.py decides when to save, manager.py writes,
state_dict_cache.py reuses the tree. This has never run on a GPU: its tests use a device on the host.
"""

from __future__ import annotations

import copy
import mmap
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from itertools import compress
from operator import attrgetter
from typing import Any, NamedTuple, cast

import torch
from torch.distributed.tensor import DTensor

from holdfast.findings import Finding, Owner, Severity
from holdfast.train.accelerator import Mark, Pairs
from holdfast.train.checkpoint.pytree import COPY_THREADS, iter_parts, iter_tensors, offsets, rebuild
from holdfast.train.checkpoint.stall_clock import StallClock
from holdfast.train.checkpoint.state_dict_cache import CachedStateDict, cache_state_dict
from holdfast.train.checkpoint.train_state import TrainState
from holdfast.train.metrics.profiler import waiting_for_checkpoint
from holdfast.train.torch_private import local_part, version_of

SHARED_BYTES = 1 << 20
"""Smaller sizes are copied faster than another thread wakes up."""
MAX_CLONED_BYTES = 64 << 20
"""GPU memory for the tensors that other code may change, such as statistics of BatchNorm. The loop waits for more."""
_form = attrgetter("shape", "dtype", "device")


class _CopySource(NamedTuple):
    """A state tree, and the source tensor for each of its tensors."""

    tree: dict[str, Any]
    held: list[torch.Tensor]
    sources: list[torch.Tensor]
    """This rank's shards of the live tensors."""
    owned: list[bool]
    """Whether it changes only in or after the optimizer's step."""


class _PendingCopies(NamedTuple):
    """Copies that overlap training steps."""

    on_host: Pairs
    on_device: Pairs
    """Kept until they are copied: the device's memory could be used for something else."""
    after: Mark | None
    """When those on the device may begin; None if they have been started."""
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
        self._accelerator = train_state.accelerator
        self._pinned: torch.Tensor | None = None
        self._finding: Finding | None = None
        self._pool = ThreadPoolExecutor(max(COPY_THREADS - 1, 1), thread_name_prefix="holdfast-staging")
        self._allocating = threading.Lock()
        self._lock = threading.Lock()
        self._copying: _PendingCopies | None = None
        """Guarded by the lock: the writer and the optimizer's step both check whether the copies are done."""
        self._copied = threading.Event()
        """Set once the rest is up to the device."""
        self._end: Mark | None = None
        """When the device has copied everything."""
        self._intact = self._overlap = True
        self.stalls = StallClock(self._accelerator)
        """Waits of the optimizer's steps for copies."""
        hook: Any = torch.compiler.disable(self._before_step)
        train_state.optimizer.register_step_pre_hook(hook)

    def start_copy(self) -> dict[str, Any]:
        """Return the state tree with its tensors on the host; complete once `finish_copy` returns.

        The caller must have another thread call `finish_copy` soon: the optimizer's next step waits for it.
        """
        tree, watched, sources, owned = self._cached_source() or self._new_source()
        self._intact = True
        if not self._overlap:
            owned = [False] * len(owned)
        pairs = [*zip(sources, self._staged, strict=True)]
        host_now, device_now = self._by_place([*compress(pairs, [not each for each in owned])])
        on_host, on_device = self._by_place([*compress(pairs, owned)])
        if host_now:
            self._copy_from_host(host_now)
        after: Mark | None = None
        self._end = None
        if self._accelerator is not None and (device_now or on_device):
            if sum(source.nbytes for source, _ in device_now) > MAX_CLONED_BYTES:
                self._accelerator.start_copies(device_now, after=self._accelerator.mark()).wait()
            else:
                on_device = [*on_device, *((source.clone(), staged) for source, staged in device_now)]
            after = self._accelerator.mark()
            if self._pinned is not None:
                self._end, after = self._accelerator.start_copies(on_device, after=after), None
        self._copied.clear()
        watched = [*compress(watched, owned)]
        self._copying = _PendingCopies(on_host, on_device, after, watched, [*map(version_of, watched)])
        return tree

    def _by_place(self, pairs: Pairs) -> tuple[Pairs, Pairs]:
        """Those on the host, and those on the device."""
        if self._accelerator is None:
            return pairs, ()
        held = [self._accelerator.holds(source) for source, _ in pairs]
        return [*compress(pairs, [not each for each in held])], [*compress(pairs, held)]

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
        pairs = [*iter_parts(given)]
        held, sources = [leaf for leaf, _ in pairs], [local_part(part) for _, part in pairs]
        with self._allocating:
            self._allocate_buffer(sources)
        tree = cast("dict[str, Any]", _mirror(given, iter(self._staged)))
        self._cached = cache_state_dict(self._train_state, given, tree)
        owned = self._owned()
        return _CopySource(tree, held, sources, [each.data_ptr() in owned for each in sources])

    def prepare(self, tree: dict[str, Any]) -> None:
        """Allocate the buffer before the first save: the kernel takes seconds to map some GiB."""
        self._bind_thread()
        with self._allocating:
            self._allocate_buffer([local_part(tensor) for tensor in iter_tensors(tree)])

    def finish_copy(self) -> bool:
        """Copy; False if code other than the optimizer changed the sources meanwhile.

        From then on everything is copied immediately. Waits for the copies alone, not for what the device trains.
        """
        self._bind_thread()
        copying = self._copying
        try:
            if copying is not None:
                self._copy_from_host(copying.on_host)
            if self._accelerator is not None and copying is not None and copying.after is not None:
                self._end = self._accelerator.start_copies(copying.on_device, after=copying.after)
        finally:
            self._copied.set()
        if self._end is not None:
            self._end.wait()
        self._check()
        return self._intact

    def _before_step(self, *_: object) -> None:
        self.wait_copied()

    def wait_copied(self) -> None:
        """Wait until no copy is running, so that the sources may change."""
        if self._copying is None:
            return
        with waiting_for_checkpoint(), self.stalls.waiting():
            self._copied.wait()
            if self._accelerator is not None and self._end is not None:
                self._accelerator.order_after(self._end)
            self._check()

    def take_finding(self) -> Finding | None:
        """Finding about the buffer, returned once."""
        finding, self._finding = self._finding, None
        return finding

    def _bind_thread(self) -> None:
        if self._accelerator is not None:
            self._accelerator.bind_thread()

    def _check(self) -> None:
        with self._lock:
            if self._copying is not None and self._copying.changed():
                self._intact = self._overlap = False
            self._copying = None

    def _copy_from_host(self, pairs: Pairs) -> None:
        """Copy with all threads, this one included, if there is enough for more than one."""
        copiers = COPY_THREADS if sum(each.nbytes for each, _ in pairs) >= SHARED_BYTES else 1
        others = [self._pool.submit(_copy, pairs[first::copiers]) for first in range(1, copiers)]
        try:
            _copy(pairs[::copiers])
        finally:
            wait(others)
        for each in others:
            each.result()

    def _owned(self) -> set[int]:
        """Addresses of the tensors that change only in the optimizer's step, or after it.

        They are its parameters and state, and the user's own modules: averages of the weights follow that step.
        """
        parameters = [tensor for group in self._train_state.optimizer.param_groups for tensor in group["params"]]
        state = [value for values in self._train_state.optimizer.state.values() for value in values.values()]
        own = [value for module in self._train_state.modules.values() for value in module.state_dict().values()]
        tensors = iter_tensors((*parameters, *state, *own))
        return {local_part(each).data_ptr() for each in tensors}

    def _allocate_buffer(self, sources: Sequence[torch.Tensor]) -> None:
        """Allocate the buffer if the state's layout differs from the last save's."""
        layout = _layout(sources)
        if layout == self._layout:
            return
        if self._accelerator is not None and self._pinned is not None:
            self._accelerator.unpin(self._pinned)
            self._pinned = None
        *begins, end = offsets(sources, self._first_byte)
        room = self._allocate(max(end, 1))
        whole = torch.frombuffer(room, dtype=torch.uint8)
        whole.zero_()  # makes the kernel allocate the pages now
        if self._accelerator is not None and any(map(self._accelerator.holds, sources)):
            try:
                self._accelerator.pin(whole)
                self._pinned = whole
            except RuntimeError as error:
                self._finding = _not_pinned(whole.nbytes, error)
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
        "weights in the optimizer's step, or before session.commit().",
    )


def _not_pinned(size: int, error: RuntimeError) -> Finding:
    return Finding(
        code="host-memory-not-pinned",
        severity=Severity.WARNING,
        what=f"{size:,} bytes of host memory could not be pinned: copies of the state from the GPU are slower",
        evidence=(f"{type(error).__name__}: {error}",),
        remedy="Raise the limit on locked memory (`ulimit -l unlimited`), or give the node more free memory.",
        owner=Owner.CLUSTER,
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
    return rebuild(tree, staged) if isinstance(tree, torch.Tensor) else copy.deepcopy(tree)
