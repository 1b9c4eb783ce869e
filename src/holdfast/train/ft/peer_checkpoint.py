"""Peer checkpoints: copies each rank's state in the background to its own node's memory and to another node's.

All copies use memory that agents hold, in the format of memory_snapshot.py, with two segments each: one stays complete
on all nodes until the next one is. A copy goes from the devices straight into the node's segment, and from there
through a separate Gloo group into the peer's. Placement: backup_placement.py; restore: peer_restore.py.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from holdfast.errors import HoldfastError
from holdfast.findings import Finding, Owner, Severity
from holdfast.train.checkpoint import pytree
from holdfast.train.checkpoint.manifest_file import Manifest
from holdfast.train.checkpoint.staging import StagingBuffer, torn_copy
from holdfast.train.checkpoint.stall_clock import StallClock
from holdfast.train.checkpoint.train_state import TrainState
from holdfast.train.checkpoint.writer_fence import WriterId
from holdfast.train.ft import memory_snapshot
from holdfast.train.ft.backup_placement import BackupPlacement, assign_backups
from holdfast.train.ft.memory_snapshot import (
    FIRST_BYTE,
    MEMORY,
    MemorySnapshot,
    SnapshotHeader,
    SnapshotId,
    require_memory,
)
from holdfast.train.session.control_group import ControlGroup
from holdfast.train.torch_private import created_groups, local_part

MAX_STALL_SHARE = 0.01
"""Maximum share of the loop's time that `auto` lets it wait for copies."""

_NONE = SnapshotHeader(0, 0, 0)
"""Sent in place of a copy that failed."""


class PeerCheckpointResult(NamedTuple):
    """Result of a copy, the same on all ranks."""

    step: int
    took_s: float
    problem: Finding | None
    warning: Finding | None = None


class _SharedSegment:
    """Memory that the agent holds, mapped into this process."""

    def __init__(self, memory: Path) -> None:
        self.memory = memory
        self.buffer = mmap.mmap(-1, 1)

    def resize(self, size: int) -> mmap.mmap:
        """Map it with this size. Raises OSError."""
        if len(self.buffer) != size:
            with open(self.memory, "r+b", buffering=0) as file:
                file.truncate(0)
                file.truncate(size)
                self.buffer = mmap.mmap(file.fileno(), size)
        return self.buffer

    def holds(self, snapshot_id: SnapshotId) -> bool:
        lying = MemorySnapshot.load(self.memory)
        return lying is not None and lying.snapshot_id == snapshot_id


class PeerCheckpointer:
    """One rank's peer checkpoints; all ranks make the same calls after a step. At most one copy runs at a time."""

    def __init__(
        self, memories: Sequence[Path], *, train_state: TrainState, ranks: ControlGroup, writer: WriterId, nodes: int
    ) -> None:
        self.memories = memories
        """Two for this rank's own copies, two for those of the rank that it backs up."""
        self._train_state = train_state
        self._writer = writer
        self._rank = ranks.rank
        self._background_group = ranks.background_group()
        """For the thread that copies."""
        self._per_node = ranks.world_size // nodes
        self._placement = _place_backups(ranks, nodes, self._per_node)
        pieces = [_SharedSegment(each) for each in memories]
        # In each pair the first is written next; the second may hold the copy that is complete on all nodes.
        self._own_segments, self._peer_segments = pieces[:2], pieces[2:]
        self._staging = [
            StagingBuffer(train_state, allocate=each.resize, first_byte=FIRST_BYTE) for each in self._own_segments
        ]
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="holdfast-peer-copy")
        """A single thread; the process waits for it at exit."""
        self._prepared = self._stopped = False
        self._fits_with = -1
        """Parameters with optimizer state when the state was found to fit into memory; it grows with their number."""
        self._unreported_buffers = len(self._staging)
        """Buffers whose findings no rank has reported; the same on all ranks."""
        self._running: Future[PeerCheckpointResult] | None = None
        self._duration_s: float | None = None
        self._starts = StallClock(train_state.accelerator)
        self._began = self._stalled_s = 0.0
        """Monotonic start time of the last copy, and the seconds that the loop has waited for it."""

    def on_resumed(self, step: int, snapshot_id: SnapshotId | None) -> None:
        """Training resumes after this step; a snapshot that it resumes from stays until the next copy is complete.

        Snapshots of later steps belong to an abandoned history and are invalidated.
        """
        self.set_aside_after(step)
        if snapshot_id is not None and self._own_segments[0].holds(snapshot_id):
            self._own_segments.reverse()
            self._staging.reverse()
        if snapshot_id is not None and self._peer_segments[0].holds(snapshot_id):
            self._peer_segments.reverse()

    def set_aside_after(self, step: int) -> None:
        """Invalidate the copies of later steps, once none is being made."""
        self.wait_finished()
        for memory in self.memories:
            lying = MemorySnapshot.load(memory)
            if lying is not None and lying.snapshot_id.step > step:
                memory_snapshot.invalidate(memory)

    def placement_finding(self) -> Finding | None:
        """Finding on the backup placement, if any."""
        return _within_group(self._placement) if self._placement.within_group else None

    def take_stalled_s(self) -> float:
        """Seconds that the optimizer's steps have waited for copies since the last call."""
        waited_s = sum(each.stalls.take_s() for each in self._staging)
        self._stalled_s += waited_s
        return waited_s

    def take_duration_s(self) -> float | None:
        """Seconds that the last copy took, if not yet returned."""
        took_s, self._duration_s = self._duration_s, None
        return took_s

    def is_due(self) -> bool:
        """Whether the next copy may begin: the last is complete, and the loop's waiting stays within its share."""
        if self._stopped or (self._running is not None and not self._running.done()):
            return False
        self._stalled_s += self._starts.take_s()
        if not all(each.settled for each in (self._starts, *(staging.stalls for staging in self._staging))):
            return False  # what the last one cost is not known yet
        return time.monotonic() - self._began >= self._stalled_s / MAX_STALL_SHARE

    def wait_copied(self) -> None:
        """Wait until the state is copied and may change."""
        for each in self._staging:
            each.wait_copied()

    def prepare(self) -> None:
        """Allocate the segments in the background before the first copy; called after a step, when all state exists."""
        if not self._prepared:
            self._prepared = True
            self._thread.submit(self._prepare, self._train_state.tensors(), len(self._train_state.optimizer.state))

    def start(self, manifest: Manifest) -> None:
        """Copy the current state in the background; the previous copy must be finished."""
        if self._stopped:
            return
        began, own = time.monotonic(), bytes
        self._began, self._stalled_s = began, 0.0
        with self._starts.waiting():
            try:
                own = self._train_state.per_rank_state()
                if self._fits_with != (count := len(self._train_state.optimizer.state)):
                    self._refuse_too_large(self._train_state.tensors(), count)
                memory_snapshot.invalidate(self._own_segments[0].memory)
                staged = self._staging[0].start_copy()
            except (OSError, RuntimeError, HoldfastError) as error:
                staged = _stopped_finding(self._rank, error)
            self._running = self._thread.submit(self._run, manifest, staged, own, began)

    def wait_finished(self) -> PeerCheckpointResult | None:
        """Wait for the result of the current copy; None if there is none. Each result is returned once."""
        copying, self._running = self._running, None
        if copying is None:
            return None
        copied = copying.result()
        self._duration_s = copied.took_s if copied.problem is None else None
        self._stopped = copied.problem is not None and copied.problem.code == "peer-checkpoints-stopped"
        return copied

    def _prepare(self, tensors: dict[str, Any], count: int) -> None:
        with suppress(OSError, RuntimeError):  # the first copy reports it
            self._refuse_too_large(tensors, count)
            for staging in self._staging:
                staging.prepare(tensors)

    def _refuse_too_large(self, tensors: dict[str, Any], count: int) -> None:
        """Raise, before allocating, if what the segments of all ranks of this node lack exceeds its memory."""
        size = pytree.offsets([local_part(tensor) for tensor in pytree.iter_tensors(tensors)], FIRST_BYTE)[-1]
        held = min(len(each.buffer) for each in self._own_segments)
        require_memory(len(self.memories) * max(size - held, 0) * self._per_node)
        self._fits_with = count

    def _run(
        self, manifest: Manifest, staged: dict[str, Any] | Finding, own: Callable[[], bytes], began: float
    ) -> PeerCheckpointResult:
        """The background part of a copy; runs in every rank's thread."""
        warning: Finding | None = None
        try:
            head = staged if isinstance(staged, Finding) else self._write_local(manifest, staged, own)
            problem = self._exchange(head)
            if self._unreported_buffers:
                self._unreported_buffers -= 1
                warning = self._background_group.first_not_none(self._staging[0].take_finding())
        except RuntimeError as error:  # from Gloo, when another rank is gone
            problem = _stopped_finding(self._rank, error)
        if problem is None:
            for pair in (self._own_segments, self._staging, self._peer_segments):
                pair.reverse()
        return PeerCheckpointResult(manifest.step, time.monotonic() - began, problem, warning)

    def _write_local(
        self, manifest: Manifest, staged: dict[str, Any], own: Callable[[], bytes]
    ) -> SnapshotHeader | Finding:
        """Write a complete copy in this node's memory."""
        piece = self._own_segments[0]
        try:
            if not self._staging[0].finish_copy():
                return torn_copy(
                    f"the copy of step {manifest.step}", f"rank {self._rank}", code="peer-checkpoint-not-bit-exact"
                )
            return memory_snapshot.write_staged(
                piece.memory, piece.buffer, self._writer, self._rank, manifest, staged, own()
            )
        except (OSError, RuntimeError) as error:
            return _stopped_finding(self._rank, error)

    def _exchange(self, own: SnapshotHeader | Finding) -> Finding | None:
        """Send the copy to its backup while receiving a peer's; returns the failure, once all are complete."""
        group, backup_rank, primary_rank = (
            self._background_group,
            self._placement.backup_ranks[self._rank],
            self._placement.primary_of(self._rank),
        )
        problem = own if isinstance(own, Finding) else None
        if backup_rank == self._rank:
            return group.first_not_none(problem)
        mine, segment = own if isinstance(own, SnapshotHeader) else _NONE, self._peer_segments[0]
        header = torch.zeros(len(_NONE), dtype=torch.int64)
        sent = group.send(torch.tensor(mine, dtype=torch.int64), backup_rank)
        group.receive(header, primary_rank)
        sent()
        theirs = SnapshotHeader(*header.tolist())
        try:
            memory_snapshot.invalidate(segment.memory)
            segment.resize(max(theirs.begin, 1))
        except OSError as error:
            problem = problem or _stopped_finding(self._rank, error)
        if (problem := group.first_not_none(problem)) is not None:
            return problem
        parts = (
            memory_snapshot.tensor_bytes(self._own_segments[0].buffer, mine),
            memory_snapshot.read_index(self._own_segments[0].memory, mine),
        )
        sends = [group.send(part, backup_rank) for part in parts]
        group.receive(memory_snapshot.tensor_bytes(segment.buffer, theirs), primary_rank)
        index = torch.empty(theirs.length, dtype=torch.uint8)
        group.receive(index, primary_rank)
        for each in sends:
            each()
        memory_snapshot.commit(segment.memory, theirs, index.numpy().data)
        return group.first_not_none(None)


def _place_backups(ranks: ControlGroup, nodes: int, per_node: int) -> BackupPlacement:
    """Assign backups, based on the process groups that all ranks have created."""
    mine = created_groups() if ranks.group is not None else set[frozenset[int]]()
    return ranks.broadcast(assign_backups(nodes, per_node, set[frozenset[int]]().union(*ranks.gather(mine))))


def _within_group(placement: BackupPlacement) -> Finding:
    return Finding(
        code="peer-checkpoints-within-group",
        severity=Severity.INFO,
        what="every other node has a rank of their groups: "
        f"{len(placement.within_group)} nodes have their copies on a node that shares a parallel group with them",
        where=MEMORY,
        evidence=(f"nodes {', '.join(map(str, placement.within_group[:16]))}",),
        remedy="Nothing need be done: a single node's loss is survived. For whole groups to be, lay groups out so that "
        "each leaves some node outside.",
    )


def _stopped_finding(rank: int, error: Exception) -> Finding:
    return Finding(
        code="peer-checkpoints-stopped",
        severity=Severity.WARNING,
        what="the ranks' states are not copied to other nodes' memory any more, until they are started again",
        where=f"rank {rank}",
        evidence=(f"{type(error).__name__}: {error}",),
        remedy="A loss is recovered from by the last copy or checkpoint. Each rank's node needs free memory for four "
        "times its state, in addition to a checkpoint's buffer.",
        owner=Owner.CLUSTER,
    )
