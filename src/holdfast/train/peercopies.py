"""Owns the copies of this rank's state beside the loop: in its own node's memory, and in that of a peer on another.

All lie in pieces of memory that agents hold, in the form in which state is handed over (handover.py), two of each: one
stays whole, on all nodes, until the next is. A copy goes straight from the devices into the node's piece, and from
there through a Gloo group of its own into the peer's. Refuses to own where copies go (placement.py), and what they are
for (recall.py).
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
import torch.distributed as dist

from holdfast.findings import Fault, Finding, Severity
from holdfast.train import handover, trees
from holdfast.train.handover import FIRST_BYTE, MEMORY, Handed, Head, Origin, refuse_too_large
from holdfast.train.placement import Placement, place
from holdfast.train.ranks import Ranks
from holdfast.train.seal import Seal
from holdfast.train.staging import Staging, inexact
from holdfast.train.tenure import Writer
from holdfast.train.training import Training
from holdfast.train.trees import local

MOST_SHARE = 0.01
"""Of the loop's time that `auto` has it wait for copies."""

_NONE = Head(0, 0, 0)
"""What is sent of a copy that could not be made."""


class Copied(NamedTuple):
    """What came of a copy, the same on all ranks."""

    step: int
    took_s: float
    problem: Finding | None


class _Piece:
    """Memory that the agent holds, as this process has it mapped."""

    def __init__(self, memory: Path) -> None:
        self.memory = memory
        self.room = mmap.mmap(-1, 1)

    def sized(self, size: int) -> mmap.mmap:
        """Its room, of that size. Raises OSError."""
        if len(self.room) != size:
            with open(self.memory, "r+b", buffering=0) as file:
                file.truncate(0)
                file.truncate(size)
                self.room = mmap.mmap(file.fileno(), size)
        return self.room

    def holds(self, origin: Origin) -> bool:
        lying = Handed.lying(self.memory)
        return lying is not None and lying.origin == origin


class PeerCopies:
    """One rank's copies; all ranks make the same calls after a step. At most one copy is under way."""

    def __init__(
        self, memories: Sequence[Path], *, training: Training, ranks: Ranks, writer: Writer, nodes: int
    ) -> None:
        self.memories = memories
        """Two for this rank's own copies, two for those of the rank whose keeper it is."""
        self._training = training
        self._writer = writer
        self._rank = ranks.rank
        self._aside = ranks.aside()
        """For the thread that copies."""
        self._per_node = ranks.world_size // nodes
        self._placement = _agreed(ranks, nodes, self._per_node)
        pieces = [_Piece(each) for each in memories]
        # In each pair the first is written next, and the second may be what is whole on all nodes.
        self._own, self._kept = pieces[:2], pieces[2:]
        self._staging = [Staging(training, room=each.sized, first_byte=FIRST_BYTE) for each in self._own]
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="holdfast-peer-copy")
        """One; the process waits for it when it ends."""
        self._prepared = self._fits = self._stopped = False
        self._copying: Future[Copied] | None = None
        self._took_s: float | None = None
        self._began = self._stalled_s = 0.0
        """When the last copy did, on the monotonic clock, and the seconds that the loop has waited for it."""

    def resumed(self, step: int, origin: Origin | None) -> None:
        """Training goes on after this step; a state in memory that it goes on from stays until the next is whole.

        What is of a later step is of another course of training now.
        """
        for memory in self.memories:
            lying = Handed.lying(memory)
            if lying is not None and lying.origin.step > step:
                handover.forget(memory)
        if origin is not None and self._own[0].holds(origin):
            self._own.reverse()
            self._staging.reverse()
        if origin is not None and self._kept[0].holds(origin):
            self._kept.reverse()

    def within(self) -> Finding | None:
        """What is to be said of where copies lie."""
        return _within(self._placement) if self._placement.within else None

    def take_waited_s(self) -> float:
        """Seconds that the optimiser's steps have waited for copies since the last call."""
        waited_s = sum(each.waited_s for each in self._staging)
        for each in self._staging:
            each.waited_s = 0.0
        self._stalled_s += waited_s
        return waited_s

    def take_took_s(self) -> float | None:
        """Seconds that the last copy took, where it is not told yet."""
        took_s, self._took_s = self._took_s, None
        return took_s

    def is_due(self) -> bool:
        """Whether the next may begin: the last is there, and the loop has gone on for long after waiting for it."""
        if self._stopped or (self._copying is not None and not self._copying.done()):
            return False
        return time.monotonic() - self._began >= self._stalled_s / MOST_SHARE

    def wait(self) -> None:
        """Wait until what is copied has been read, so that anybody may change it."""
        for each in self._staging:
            each.wait()

    def prepare(self) -> None:
        """Have the pieces before the first copy, beside the loop: called after a step, when there is all to copy."""
        if not self._prepared:
            self._prepared = True
            self._thread.submit(self._prepare, self._training.tensors())

    def begin(self, sealed: Seal) -> None:
        """Copy what there is now, beside the steps that follow; the one before has been waited for."""
        if self._stopped:
            return
        began, own = time.monotonic(), self._training.own()
        try:
            if not self._fits:
                self._refuse_too_large(self._training.tensors())
            handover.forget(self._own[0].memory)
            staged = self._staging[0].begin()
        except (OSError, RuntimeError) as error:
            staged = _stopped(self._rank, error)
        self._copying = self._thread.submit(self._copy, sealed, staged, own, began)
        self._began, self._stalled_s = began, time.monotonic() - began

    def finish(self) -> Copied | None:
        """What came of the copy under way, waited for; None where there is none. Each is told once."""
        copying, self._copying = self._copying, None
        if copying is None:
            return None
        copied = copying.result()
        self._took_s = copied.took_s if copied.problem is None else None
        self._stopped = copied.problem is not None and copied.problem.code == "peer-copies-stopped"
        return copied

    def _prepare(self, tensors: dict[str, Any]) -> None:
        with suppress(OSError, RuntimeError):  # the first copy says so
            self._refuse_too_large(tensors)
            for staging in self._staging:
                staging.prepare(tensors)

    def _refuse_too_large(self, tensors: dict[str, Any]) -> None:
        """Before there is any: what all ranks of this node will have in memory."""
        size = sum(local(tensor).nbytes for tensor in trees.tensors(tensors))
        refuse_too_large(len(self.memories) * size * self._per_node)
        self._fits = True

    def _copy(self, sealed: Seal, staged: dict[str, Any] | Finding, own: Callable[[], bytes], began: float) -> Copied:
        """The thread's part; every rank's takes it."""
        try:
            head = staged if isinstance(staged, Finding) else self._written(sealed, staged, own)
            problem = self._exchanged(head)
        except RuntimeError as error:  # Gloo's, when another rank is gone
            problem = _stopped(self._rank, error)
        if problem is None:
            for pair in (self._own, self._staging, self._kept):
                pair.reverse()
        return Copied(sealed.step, time.monotonic() - began, problem)

    def _written(self, sealed: Seal, staged: dict[str, Any], own: Callable[[], bytes]) -> Head | Finding:
        """Have it whole in this node's memory."""
        piece = self._own[0]
        try:
            if not self._staging[0].settle():
                return inexact(f"the copy of step {sealed.step}", f"rank {self._rank}", code="peer-copy-inexact")
            return handover.finish(piece.memory, piece.room, self._writer, self._rank, sealed, staged, own())
        except (OSError, RuntimeError) as error:
            return _stopped(self._rank, error)

    def _exchanged(self, own: Head | Finding) -> Finding | None:
        """Send it to where it is kept while another comes; returns what went wrong, once all have theirs whole."""
        aside, keeper, ward = self._aside, self._placement.keepers[self._rank], self._placement.ward(self._rank)
        problem = own if isinstance(own, Finding) else None
        if keeper == self._rank:
            return aside.any_of(problem)
        mine, kept = own if isinstance(own, Head) else _NONE, self._kept[0]
        words = torch.zeros(len(_NONE), dtype=torch.int64)
        sent = aside.send(torch.tensor(mine, dtype=torch.int64), keeper)
        aside.receive(words, ward)
        sent()
        theirs = Head(*words.tolist())
        try:
            handover.forget(kept.memory)
            kept.sized(max(theirs.begin, 1))
        except OSError as error:
            problem = problem or _stopped(self._rank, error)
        if (problem := aside.any_of(problem)) is not None:
            return problem
        parts = (handover.body(self._own[0].room, mine), handover.index_of(self._own[0].memory, mine))
        sends = [aside.send(part, keeper) for part in parts]
        aside.receive(handover.body(kept.room, theirs), ward)
        index = torch.empty(theirs.length, dtype=torch.uint8)
        aside.receive(index, ward)
        for each in sends:
            each()
        handover.accept(kept.memory, theirs, index.numpy().data)
        return aside.any_of(None)


def _agreed(ranks: Ranks, nodes: int, per_node: int) -> Placement:
    """Where copies go, by the groups that all ranks have made."""
    made = dist.distributed_c10d._world.pg_group_ranks.values() if ranks.group is not None else ()
    mine = {frozenset(group) for group in made}
    return ranks.from_first(place(nodes, per_node, set[frozenset[int]]().union(*ranks.to_first(mine))))


def _within(placement: Placement) -> Finding:
    return Finding(
        code="peer-copies-within-group",
        severity=Severity.INFO,
        what=f"no other node is without a rank of their groups: {len(placement.within)} nodes have their copies on one "
        "that works together with them",
        where=MEMORY,
        evidence=(f"nodes {', '.join(map(str, placement.within[:16]))}",),
        remedy="Nothing need be done: a single node's loss is survived. For whole groups to be, lay groups out so that "
        "each leaves some node outside.",
    )


def _stopped(rank: int, error: Exception) -> Finding:
    return Finding(
        code="peer-copies-stopped",
        severity=Severity.WARNING,
        what="the ranks' states are not copied to other nodes' memory any more, until they are started again",
        where=f"rank {rank}",
        evidence=(f"{type(error).__name__}: {error}",),
        remedy="A loss is recovered from by the last copy or checkpoint. Each rank's node needs free memory for four "
        "times its state, beside what a checkpoint needs.",
        fault=Fault.CLUSTER,
    )
