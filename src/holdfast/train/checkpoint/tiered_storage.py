"""Two-tier checkpoint storage: saves to the nodes' own disks, then uploads to a store that all nodes reach.

A save never waits for the store: during an upload, later checkpoints stay on the nodes. On disk: local_tier.py; in the
store: remote_tier.py; loading: tiered_read.py.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from holdfast.errors import HoldfastError
from holdfast.findings import Finding, Owner, Severity
from holdfast.train.checkpoint.local_tier import LocalTier
from holdfast.train.checkpoint.manifest_file import Manifest
from holdfast.train.checkpoint.remote_tier import RemoteTier
from holdfast.train.checkpoint.retention_policy import RetentionPolicy
from holdfast.train.checkpoint.storage import (
    CheckpointRef,
    CheckpointStorage,
    WrittenFiles,
    ask_store,
    merge_files,
    save_failed,
)
from holdfast.train.checkpoint.tiered_read import (
    DamagedLocalCheckpoint,
    LocalFirstCheckpoint,
    RemoteCheckpoint,
    merge_locations,
)
from holdfast.train.session.control_group import ControlGroup

LOCAL_RETENTION = RetentionPolicy(keep=1)
"""On the nodes, in addition to the one last submitted for upload."""


class TieredStorage(CheckpointStorage):
    """The nodes' own disks in front of a store."""

    def __init__(
        self, local: Path, remote: RemoteTier, *, retention: RetentionPolicy, ranks: ControlGroup, replica: int = 0
    ) -> None:
        self.where = remote.url
        self._local = LocalTier(local, remote.url, ranks.rank, replica)
        self.remote = remote
        self._retention = retention
        self._ranks = ranks
        self._upload_group = ranks.background_group()
        """For the upload thread."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="holdfast-checkpoint-store")
        self._uploading: Future[Finding | None] | None = None
        self._newest: Manifest | None = None
        """Newest checkpoint that this attempt committed."""
        self._finding: Finding | None = None
        self._uploaded_step: int | None = None
        """Step of the checkpoint last submitted for upload."""

    def name(self, step: int) -> str:
        return self.remote.name(step)

    def partial(self, step: int) -> Path:
        return self._local.partial(step)

    def take_over(self) -> list[CheckpointRef]:
        disk, store, ranks = self._local, self.remote, self._ranks
        disk.clear()
        listed = ranks.run_on_first(lambda: ask_store(self.where, self._list_remote))
        stored = [RemoteCheckpoint(disk, store, ranks, step, folder) for step, folder in listed]
        on_nodes = ranks.broadcast(merge_locations(ranks.gather(disk.checkpoints())))
        spoilt = ranks.broadcast(
            {step: why for part in ranks.gather(disk.damaged_manifests()) for step, why in part.items()}
        )
        newest = {copy.step: copy for copy in reversed(stored)}
        near = [
            LocalFirstCheckpoint(disk, store, ranks, each, newest.get(each.manifest.step), self.upload)
            for each in on_nodes
        ]
        bad = [DamagedLocalCheckpoint(disk, step, damage) for step, damage in spoilt.items()]
        # For one step the nodes' copy comes first: the sort is stable.
        return sorted([*bad, *near, *stored], key=lambda copy: copy.step, reverse=True)

    def on_resumed(self, step: int) -> None:
        """Remove later checkpoints, which belong to an abandoned history; no rank saves before all are here."""
        self._local.remove_after(step)
        self._local.clear()
        self._ranks.all(True)

    def commit(self, manifest: Manifest, written: WrittenFiles, group: ControlGroup) -> int | Finding:
        parts = group.gather(written)
        whole = group.broadcast(merge_files(manifest, parts) if parts else manifest)
        if isinstance(whole, Manifest):
            whole = group.first_not_none(self._commit_local(whole)) or whole
        if isinstance(whole, Finding):
            shutil.rmtree(self.partial(manifest.step), ignore_errors=True)
            return whole
        self._newest = whole
        busy = self._uploading is not None and not self._uploading.done()
        if not group.first_not_none(True if busy else None):
            self._finding = self._wait_uploaded()
            self._start_upload(whole)
        return whole.size_bytes

    def _commit_local(self, whole: Manifest) -> Finding | None:
        try:
            self._local.commit(whole)
        except OSError as error:
            return save_failed(self.partial(whole.step), self._ranks.rank, error)
        return None

    def prune(self) -> None:
        steps = self._local.steps()
        waiting = [step for step in steps if step != self._uploaded_step]
        superfluous = LOCAL_RETENTION.expired(waiting, self.agreed_step)
        self._local.keep_only(set(steps) - set(superfluous))

    def set_aside_after(self, step: int) -> None:
        self._finding = self._wait_uploaded() or self._finding
        if self._newest is not None and self._newest.step > step:
            self._newest = None
        self._local.remove_after(step)
        if self._ranks.rank == 0:
            with suppress(Exception):  # any store client: without the store no start resumes from there
                for later in (folder for at, folder in self.remote.list_complete() if at > step):
                    self.remote.quarantine(later)
        self._ranks.all(True)

    def take_finding(self) -> Finding | None:
        findings, self._finding = self._finding, None
        return findings

    def close(self) -> Finding | None:
        """Failures of older uploads no longer count."""
        problem = self._wait_uploaded()
        if self._newest is not None and self._uploaded_step != self._newest.step:
            self._start_upload(self._newest)
            problem = self._wait_uploaded()
        return problem

    def _wait_uploaded(self) -> Finding | None:
        """Wait for the current upload."""
        bringing, self._uploading = self._uploading, None
        return bringing.result() if bringing is not None else None

    def _start_upload(self, whole: Manifest) -> None:
        """Start the upload in the background."""
        self._uploaded_step = whole.step
        files = [self._local.folder(whole.step) / name for name in self._own_files(whole)]
        self._uploading = self._thread.submit(self.upload, whole, files, self._upload_group)

    def upload(self, whole: Manifest, files: Collection[Path], ranks: ControlGroup) -> Finding | None:
        """Each rank uploads some files, then rank 0 commits; returns the failure of any rank."""
        try:
            problem = ranks.first_not_none(self._try(whole.step, lambda: self.remote.upload(whole.step, files)))
            if problem is None:
                problem = self._commit_remote(whole) if ranks.rank == 0 else None
                problem = ranks.broadcast(problem)
        except RuntimeError as error:  # from Gloo, when another rank is gone
            problem = self._upload_failed(whole.step, error)
        return problem

    def _commit_remote(self, whole: Manifest) -> Finding | None:
        return self._try(whole.step, lambda: self.remote.commit(whole, self._retention, self.agreed_step))

    def _try(self, step: int, act: Callable[[], None]) -> Finding | None:
        try:
            act()
        except HoldfastError as error:
            return error.findings[0]
        except Exception as error:  # any store client: it may raise anything
            return self._upload_failed(step, error)
        return None

    def _upload_failed(self, step: int, error: Exception) -> Finding:
        return Finding(
            code="checkpoint-upload-failed",
            severity=Severity.WARNING,
            what=f"the checkpoint of step {step} is on the nodes' disks and could not be brought to the store",
            where=self.where,
            evidence=(f"rank {self._ranks.rank}: {type(error).__name__}: {error}",),
            remedy="see whether the store answers, has room and lets this user write; the older checkpoints there are "
            "untouched. Until a later one is uploaded only the nodes have it, and a start resumes from there",
            owner=Owner.CLUSTER,
        )

    def _own_files(self, whole: Manifest) -> list[str]:
        return [name for name in whole.files if (self._local.folder(whole.step) / name).exists()]

    def _list_remote(self) -> list[tuple[int, str]]:
        """Steps and folders in the store; only rank 0 takes it over."""
        self.remote.take_over()
        return self.remote.list_complete()
