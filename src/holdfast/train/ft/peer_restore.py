"""Restores state at a start from peer checkpoints in the nodes' memory, fetching it from the node that has it.

All ranks resume from the same step, or none resumes from memory: the newest step of which every rank's state is on some
node, undamaged. How copies get there: peer_checkpoint.py.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from holdfast.findings import Finding, Owner, Severity
from holdfast.train.ft import memory_snapshot
from holdfast.train.ft.memory_snapshot import MEMORY, MemorySnapshot, SnapshotHeader, SnapshotId
from holdfast.train.session.control_group import ControlGroup

EVIDENCE = 8


class HeldSnapshot(NamedTuple):
    """A rank's state, in the memory of some rank's node."""

    rank: int
    snapshot_id: SnapshotId


class RestorePlan(NamedTuple):
    """The snapshot to resume from."""

    snapshot_id: SnapshotId
    holders: tuple[int, ...]
    """For each rank, the rank whose node has its state: itself where possible."""


def choose_newest(parts: Sequence[Collection[HeldSnapshot]]) -> RestorePlan | None:
    """The newest step that all ranks have between them; None if no step is complete. `parts` is by rank."""
    holders: dict[SnapshotId, dict[int, int]] = {}
    for holder, part in enumerate(parts):
        for held in part:
            of = holders.setdefault(held.snapshot_id, {})
            of[held.rank] = holder if held.rank == holder else of.get(held.rank, holder)
    whole = [origin for origin, of in holders.items() if origin.world_size == len(parts) == len(of)]
    if not whole:
        return None
    newest = max(whole, key=lambda origin: (origin.step, origin.writer.attempt))
    return RestorePlan(newest, tuple(holders[newest][rank] for rank in range(len(parts))))


class PeerRestore:
    """Peer checkpoints found at a start; every rank creates one, and makes the same calls."""

    def __init__(self, memories: Iterable[Path], ranks: ControlGroup) -> None:
        self._ranks = ranks
        self._local_snapshots = [snapshot for snapshot in map(MemorySnapshot.load, memories) if snapshot is not None]
        self._received_fd: int | None = None
        """Descriptor of the memory that holds a fetched state."""
        self._held_by_rank = ranks.gather(
            [HeldSnapshot(handed.rank, handed.snapshot_id) for handed in self._local_snapshots]
        )
        """On rank 0."""
        self._plan = ranks.broadcast(choose_newest(self._held_by_rank))

    @property
    def newest_step(self) -> int:
        """The step that all ranks have in memory; 0 if there is none."""
        return self._plan.snapshot_id.step if self._plan is not None else 0

    def restore(self) -> tuple[MemorySnapshot | None, list[Finding]]:
        """This rank's state, if all ranks have theirs of one step; and on rank 0 the findings."""
        findings: list[Finding] = []
        while (choice := self._plan) is not None:
            snapshot = self._obtain(choice)
            damages = self._ranks.gather(
                snapshot.find_damage() if snapshot is not None else "it did not come as it was sent"
            )
            bad = {rank: damage for rank, damage in enumerate(damages) if damage is not None}
            findings += [
                self._discard(HeldSnapshot(rank, choice.snapshot_id), choice.holders[rank], bad[rank]) for rank in bad
            ]
            if not self._ranks.broadcast(bool(bad)):
                return snapshot, [*findings, _restored(choice)]
            self._plan = self._ranks.broadcast(choose_newest(self._held_by_rank))
        return None, [*findings, _incomplete(self._held_by_rank)] if any(self._held_by_rank) else findings

    def _discard(self, held: HeldSnapshot, holder: int, damage: str) -> Finding:
        self._held_by_rank[holder] = [each for each in self._held_by_rank[holder] if each != held]
        return _damaged(held, holder, damage)

    def close(self) -> None:
        """Release the fetched state."""
        if self._received_fd is not None:
            os.close(self._received_fd)
            self._received_fd = None

    def _obtain(self, choice: RestorePlan) -> MemorySnapshot | None:
        """This rank's state, fetched from another node if needed, while sending states that others lack."""
        me, holders = self._ranks.rank, choice.holders
        sent = [
            self._ranks.send(part, rank)
            for rank, holder in enumerate(holders)
            if holder == me != rank
            for part in _tensors_to_send(self._local(HeldSnapshot(rank, choice.snapshot_id)))
        ]
        snapshot = (
            self._receive(holders[me]) if holders[me] != me else self._local(HeldSnapshot(me, choice.snapshot_id))
        )
        for each in sent:
            each()
        return snapshot

    def _local(self, held: HeldSnapshot) -> MemorySnapshot:
        return next(snapshot for snapshot in self._local_snapshots if (snapshot.rank, snapshot.snapshot_id) == held)

    def _receive(self, holder: int) -> MemorySnapshot | None:
        self.close()
        self._received_fd = os.memfd_create("holdfast-recall", os.MFD_CLOEXEC)
        memory = Path(f"/proc/self/fd/{self._received_fd}")
        header = torch.zeros(len(SnapshotHeader._fields), dtype=torch.int64)
        self._ranks.receive(header, holder)
        head = SnapshotHeader(*header.tolist())
        os.ftruncate(self._received_fd, head.begin)
        with mmap.mmap(self._received_fd, head.begin) as room:
            into = memory_snapshot.tensor_bytes(room, head)
            self._ranks.receive(into, holder)
            del into  # it references the mapping
        index = torch.empty(head.length, dtype=torch.uint8)
        self._ranks.receive(index, holder)
        memory_snapshot.commit(memory, head, index.numpy().data)
        return MemorySnapshot.load(memory)


def _tensors_to_send(snapshot: MemorySnapshot) -> Sequence[torch.Tensor]:
    """The tensors to send for a snapshot, in order."""
    with open(snapshot.memory, "rb") as file:
        room = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    header = torch.tensor(snapshot.head, dtype=torch.int64)
    return (
        header,
        memory_snapshot.tensor_bytes(room, snapshot.head),
        memory_snapshot.read_index(snapshot.memory, snapshot.head),
    )


def _restored(choice: RestorePlan) -> Finding:
    fetched = [
        f"rank {rank}: from rank {holder}'s node" for rank, holder in enumerate(choice.holders) if rank != holder
    ]
    return Finding(
        code="state-restored-from-peers",
        severity=Severity.INFO,
        what=f"the ranks resume after step {choice.snapshot_id.step} from copies in {MEMORY}, {len(fetched)} of "
        f"{len(choice.holders)} from another node's",
        where=MEMORY,
        evidence=tuple(fetched[:EVIDENCE]),
        remedy="Nothing: each is what it summed up to when it was copied.",
    )


def _damaged(held: HeldSnapshot, holder: int, damage: str) -> Finding:
    return Finding(
        code="peer-checkpoint-corrupt",
        severity=Severity.WARNING,
        what=f"a copy of rank {held.rank}'s state of step {held.snapshot_id.step} is damaged; another is used",
        where=f"the memory of rank {holder}'s node",
        evidence=(damage,),
        remedy="Test that node's memory.",
        owner=Owner.CLUSTER,
    )


def _incomplete(parts: Sequence[Collection[HeldSnapshot]]) -> Finding:
    """Finding: some state is in memory, but no step is complete."""
    there: dict[SnapshotId, set[int]] = {}
    for held in (kept for part in parts for kept in part):
        there.setdefault(held.snapshot_id, set()).add(held.rank)
    newest = sorted(there, key=lambda origin: (origin.step, origin.writer.attempt), reverse=True)
    lines = [f"step {each.step}: of {len(there[each])} of {each.world_size} ranks" for each in newest]
    return Finding(
        code="peer-checkpoints-incomplete",
        severity=Severity.WARNING,
        what=f"{MEMORY} has no step for all {len(parts)} ranks, so they resume from the newest checkpoint",
        where=MEMORY,
        evidence=tuple(lines[:EVIDENCE]),
        remedy="Nothing, if nodes that held each other's copies were lost together, or the number of ranks is another.",
        owner=Owner.CLUSTER,
    )
