"""Reads a checkpoint of two tiers at a start: from the nodes' disks, or from the store.

Each file comes from the nearest copy: this node's if it has the file, else the store's. A checkpoint that only nodes
have is uploaded to the store first, if a rank lacks some of its files. Uploads: tiered_storage.py.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from holdfast.findings import Finding, Owner, Severity
from holdfast.train.checkpoint import manifest_file
from holdfast.train.checkpoint.dcp_io import StoreUnreachable
from holdfast.train.checkpoint.local_tier import LocalTier
from holdfast.train.checkpoint.manifest_file import FileChecksum, Manifest
from holdfast.train.checkpoint.remote_tier import RemoteTier
from holdfast.train.checkpoint.storage import CheckpointRef, Incomplete, ask_store, damaged_finding, store_unreachable
from holdfast.train.session.control_group import ControlGroup

Upload = Callable[[Manifest, Collection[Path], ControlGroup], Finding | None]
"""Uploads files to the store and commits them, as a collective call; returns the failure."""


class FileLocations(NamedTuple):
    """Which ranks' nodes have which files of a checkpoint."""

    manifest: Manifest
    holders: dict[str, int]
    """For each of its files, a rank whose node has it."""
    everywhere: bool
    """Whether each rank's node has all files."""


class RemoteCheckpoint(CheckpointRef):
    """A checkpoint in the store alone."""

    def __init__(self, disk: LocalTier, store: RemoteTier, ranks: ControlGroup, step: int, stored: str) -> None:
        self.step = step
        self.where = f"{store.url.rstrip('/')}/{stored}"
        self.folder = disk.new_read_folder(stored)
        self._store = store
        self._ranks = ranks
        self._name = stored

    def manifest(self) -> Manifest | str:
        store = self._store
        return self._ranks.run_on_first(lambda: ask_store(store.url, lambda: store.read_manifest(self._name)))

    def fetch(self, names: Iterable[str]) -> None:
        for name in names:
            try:
                self._store.download(self._name, name, self.folder)
            except Exception as error:  # any store client: it may raise anything
                raise StoreUnreachable(f"{name}: {type(error).__name__}: {error}") from None

    def quarantine(self, damage: str) -> Finding:
        where = ""
        if self._ranks.rank == 0:
            with suppress(Exception):  # in a read-only store it stays, and is skipped again
                where = self._store.quarantine(self._name)
        return damaged_finding(self._name, where, damage)


class LocalFirstCheckpoint(CheckpointRef):
    """A checkpoint that nodes have, or of which they had a part."""

    def __init__(
        self,
        disk: LocalTier,
        store: RemoteTier,
        ranks: ControlGroup,
        locations: FileLocations,
        remote: RemoteCheckpoint | None,
        upload: Upload,
    ) -> None:
        self.step = locations.manifest.step
        self.where = f"the nodes' own copy of {store.name(self.step)}"
        self.folder = disk.new_read_folder(f"near-{self.step}")
        self._local = disk
        self._remote_tier = store
        self._upload = upload
        self._ranks = ranks
        self._locations = locations
        self._remote = remote

    def manifest(self) -> Manifest | str:
        """Its manifest; if a node lacks a file that the store lacks too, the nodes upload it first."""
        held = self._locations
        if self._remote is not None or held.everywhere or held.manifest.format != manifest_file.FORMAT:  # refused later
            return held.manifest
        gone = held.manifest.files.keys() - held.holders.keys()
        if gone:
            return Incomplete(f"{len(gone)} of its {len(held.manifest.files)} files are on no node, nor in the store")
        mine = [name for name, rank in held.holders.items() if rank == self._ranks.rank]
        paths = [self._local.find_file(self.step, name, held.manifest.files[name]) for name in mine]
        problem = self._upload(held.manifest, [path for path in paths if path is not None], self._ranks)
        if problem is not None:
            raise store_unreachable(self._remote_tier.url, *problem.evidence)
        self._remote = RemoteCheckpoint(
            self._local, self._remote_tier, self._ranks, self.step, self._remote_tier.folder(self.step)
        )
        return held.manifest

    def fetch(self, names: Iterable[str]) -> None:
        for name in names:
            near = self._local.find_file(self.step, name, self._locations.manifest.files[name])
            if near is not None:
                with suppress(FileExistsError):
                    (self.folder / name).hardlink_to(near)
            elif self._remote is not None:
                self._remote.fetch([name])
                with suppress(FileExistsError, FileNotFoundError):
                    (self.folder / name).hardlink_to(self._remote.folder / name)

    def quarantine(self, damage: str) -> Finding:
        self._local.remove(self.step)
        return _local_incomplete(self.step, str(self.folder), damage)


class DamagedLocalCheckpoint(CheckpointRef):
    """A checkpoint in node folders with damaged manifests; other nodes or the store may have it intact."""

    def __init__(self, disk: LocalTier, step: int, damage: str) -> None:
        self.step = step
        self.where = f"the nodes' own copy of step {step}"
        self.folder = disk.folder(step)
        self._disk = disk
        self._damage = damage

    def manifest(self) -> Manifest | str:
        return self._damage

    def fetch(self, names: Iterable[str]) -> None:
        """Nothing: it is never read."""

    def find_damage(self, name: str, expected: FileChecksum) -> str | None:
        return self._damage

    def quarantine(self, damage: str) -> Finding:
        self._disk.remove_damaged(self.step)
        return _local_incomplete(self.step, self.where, damage)


def _local_incomplete(step: int, where: str, damage: str) -> Finding:
    return Finding(
        code="local-checkpoint-lost",
        severity=Severity.WARNING,
        what=f"what nodes had of the checkpoint of step {step} is not whole, and was removed",
        where=where,
        evidence=(damage,),
        remedy="nothing: training resumes from the copy in the store; look at the node's disk if files were "
        "damaged there",
        owner=Owner.CLUSTER,
    )


def merge_locations(parts: Iterable[list[tuple[Manifest, set[str]]]]) -> list[FileLocations]:
    """Combine what each rank's node has, by rank, into one location table per checkpoint."""
    parts = list(parts)
    found: dict[bytes, tuple[Manifest, list[set[str]]]] = {}
    for rank, part in enumerate(parts):
        for manifest, names in part:
            _, held = found.setdefault(manifest_file.encode(manifest), (manifest, [set() for _ in parts]))
            held[rank] = names
    return [
        FileLocations(
            manifest,
            {name: rank for rank, names in reversed(list(enumerate(held))) for name in names},
            all(names == manifest.files.keys() for names in held),
        )
        for manifest, held in found.values()
    ]
