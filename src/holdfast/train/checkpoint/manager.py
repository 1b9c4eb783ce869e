"""Checkpoint lifecycle: copies state between two steps, writes it in the background, commits it, verifies it on load.

A checkpoint is a folder `step-00000042`: tensors in the format of torch.distributed.checkpoint (each rank its shard),
`rank-00000.pt` per rank (random state, scheduler, the user's own state), and the manifest with the format, the step,
and every file's size and checksum. It is written elsewhere and renamed once everything is on disk, so a folder with the
final name is complete no matter when the writer died. When to take one: session.py; who may commit: writer_fence.py.
The file is long because a save and a load must match.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, NamedTuple

import msgspec
from torch.distributed.checkpoint.api import CheckpointException

from holdfast.errors import ExitCode, HoldfastError, failure
from holdfast.findings import Finding, Owner, Severity, replica_suffix
from holdfast.train.checkpoint import dcp_io, manifest_file
from holdfast.train.checkpoint.background import BackgroundWorker, Task
from holdfast.train.checkpoint.hyperparam_overrides import HyperparamOverrides
from holdfast.train.checkpoint.hyperparams import HyperparamChange, hyperparameters_changed, optimizer_changed
from holdfast.train.checkpoint.manifest_file import Manifest
from holdfast.train.checkpoint.staging import StagingBuffer, torn_copy
from holdfast.train.checkpoint.storage import (
    CheckpointRef,
    CheckpointStorage,
    Incomplete,
    WrittenFiles,
    require_checkpoint,
    save_failed,
    store_unreachable,
)
from holdfast.train.checkpoint.train_state import StateNotLoaded, TrainState
from holdfast.train.checkpoint.writer_fence import WriterId
from holdfast.train.ft import memory_snapshot
from holdfast.train.ft.memory_snapshot import (
    MEMORY,
    MemorySnapshot,
    SnapshotId,
    StateMismatch,
    transfer_failed,
    validate_all_ranks,
)
from holdfast.train.ft.peer_checkpoint import PeerCheckpointer
from holdfast.train.ft.peer_restore import PeerRestore
from holdfast.train.session.control_group import ControlGroup
from holdfast.train.session.rank_config import USE_ANOTHER_FOLDER


class Restored(NamedTuple):
    """Result of a restore."""

    step: int
    """0 if there is no checkpoint."""
    findings: list[Finding]
    """Findings to report, on rank 0."""
    samples: int | None = None
    """Samples of its steps, if known."""
    node_s: float = 0.0
    """Seconds of training, summed over nodes."""
    where: str = ""
    """Where it was read from."""
    saved_world_size: int = 0
    """World size that saved it."""


class Saved(NamedTuple):
    """Result of a save, the same on all ranks."""

    step: int
    path: str
    took_s: float
    """From the copy until it was complete or had failed."""
    problem: Finding | None = None
    """Why it failed."""
    warning: Finding | None = None
    """Background failure since the previous save."""
    size_bytes: int = 0
    """Of the files of all ranks; 0 if it failed."""


class CheckpointManager:
    """The checkpoints of one run in its storage; all ranks make the same calls after a step.

    At most one save runs at a time: `wait_saved` comes before the next `start_save`.
    """

    def __init__(
        self,
        storage: CheckpointStorage,
        *,
        train_state: TrainState,
        ranks: ControlGroup,
        transfer_memory: Path | None = None,
        writer: WriterId | None = None,
        peer_checkpointer: PeerCheckpointer | None = None,
        durable: bool = True,
        checkpoints_back: int = 0,
        resumed_step: int = 0,
    ) -> None:
        """`transfer_memory` receives this rank's state for the process that replaces it. `peer_checkpointer` holds peer
        checkpoints, which are restored in preference to stored ones. `durable`: whether the storage outlives the nodes.
        `checkpoints_back`: how many of the newest are set aside, as far as there are older ones.
        `resumed_step`: if not 0, a restore that finds no checkpoint raises.
        """
        self._checkpoints_back = checkpoints_back
        self._resumed_step = resumed_step
        self._storage = storage
        self._durable = durable
        self._transfer_memory = transfer_memory
        self._peer_checkpointer = peer_checkpointer
        self._writer = writer or WriterId()
        self._who = f"rank {ranks.rank}{replica_suffix(self._writer.replica)}"
        self._train_state = train_state
        self._hyperparams = HyperparamOverrides(train_state)
        self._ranks = ranks
        self._staging = StagingBuffer(train_state)
        self._background_group = ranks.background_group()
        """For the thread that writes."""
        self._worker = BackgroundWorker("holdfast-checkpoint")
        self._pruner = ThreadPoolExecutor(1, thread_name_prefix="holdfast-tidy")
        """Separate from the writer thread, which also copies the next save."""
        self._taken_over = False
        """Whether this attempt owns the storage; an attempt restored from a peer has not taken it over yet."""
        self._prepared = self._buffer_reported = False
        self._saving: Task[Saved] | None = None
        self._pruning: Future[None] | None = None

    def take_stalled_s(self) -> float:
        """Seconds that the optimizer's steps have waited for copies since the last call."""
        return self._staging.stalls.take_s()

    def wait_copied(self) -> None:
        """Wait until the state is copied and may change."""
        self._staging.wait_copied()

    def prepare(self) -> None:
        """Prepare the first save in the background; called after a step, when the optimizer has its state."""
        if not self._prepared:
            self._prepared = True
            state = self._train_state.tensors()
            self._worker.submit(lambda: self._staging.prepare(state))

    def start_save(self, step: int, samples: int | None = None, *, node_s: float = 0.0) -> None:
        """Copy the state, then write and commit it in the background."""
        manifest = self.new_manifest(step, samples, node_s)
        self._prepared = True
        began, own = time.monotonic(), bytes
        try:
            if not self._taken_over:
                self._take_over()
            own = self._train_state.per_rank_state()
            staged = self._staging.start_copy()
        except HoldfastError as error:
            staged = error.findings[0]
        except (OSError, RuntimeError) as error:  # no memory for the buffer
            staged = save_failed(self._storage.partial(step), self._ranks.rank, error)
        self._saving = self._worker.submit(lambda: self._save(manifest, staged, own, began))

    def poll(self) -> Saved | None:
        """The result of the current save; None while it runs or without one. Each result is returned once."""
        return self.wait_saved() if self._saving is not None and self._saving.done() else None

    def wait_saved(self) -> Saved | None:
        """Wait for the result of the current save."""
        saving, self._saving = self._saving, None
        return saving.result() if saving is not None else None

    def close(self) -> Finding | None:
        """Wait for all background work; returns why the newest checkpoint is not in its final storage."""
        self._worker.drain()  # the last save submits its pruning before this returns
        if self._pruning is not None:
            wait([self._pruning])
        return self._storage.close()

    def keep_agreed(self, step: int) -> None:
        """Keep the newest checkpoint up to this step, after which all replicas were equal, until a later call."""
        self._storage.agreed_step = step

    def set_aside_after(self, step: int) -> None:
        """Set aside the checkpoints after this step; no save may run. Other replicas may do so concurrently."""
        if self._pruning is not None:
            wait([self._pruning])
        self._storage.set_aside_after(step)

    def transfer_state(self, step: int, samples: int | None = None, *, node_s: float = 0.0) -> Finding | None:
        """Transfer the state to the processes that replace these ranks; returns why it failed."""
        manifest = self.new_manifest(step, samples, node_s)
        return self._ranks.first_not_none(self._write_snapshot(manifest))

    def _write_snapshot(self, manifest: Manifest) -> Finding | None:
        if self._transfer_memory is None:
            return transfer_failed(self._who, "it has no memory configured to transfer its state to")
        try:
            state, own = self._train_state.tensors(), self._train_state.per_rank_state()
            if (accelerator := self._train_state.accelerator) is not None:
                accelerator.mark().wait()  # the threads that copy are not ordered after the device's work
            memory_snapshot.write(self._transfer_memory, self._writer, self._ranks.rank, manifest, state, own())
        except (OSError, RuntimeError, HoldfastError) as error:
            return transfer_failed(self._who, f"{type(error).__name__}: {error}")
        return None

    def new_manifest(self, step: int, samples: int | None = None, node_s: float = 0.0) -> Manifest:
        """A manifest for the current state, without its files."""
        return Manifest(
            step=step,
            world_size=self._ranks.world_size,
            samples=samples,
            node_s=node_s,
            hyperparams=self._hyperparams.hyperparams,
            files={},
        )

    def restore(self) -> Restored:
        """Resume from memory, or from the newest complete checkpoint if that is newer.

        Quarantines checkpoints that do not match their manifest.
        """
        peer_restore = (
            PeerRestore(self._peer_checkpointer.memories, self._ranks) if self._peer_checkpointer is not None else None
        )
        try:
            return self._restore(*self._find_snapshot(peer_restore))
        finally:
            if peer_restore is not None:
                peer_restore.close()

    def _restore(self, snapshot: MemorySnapshot | None, findings: list[Finding]) -> Restored:
        """`snapshot` is this rank's state in memory."""
        try:
            found = self._take_over()
        except HoldfastError as error:
            if snapshot is None or error.findings[0].code != "checkpoint-store-unreachable":
                raise
            findings.append(_store_skipped(error.findings[0], snapshot.manifest.step))
            found = []
        checkpoints = self._go_back(found)
        if len(checkpoints) < len(found):
            snapshot = None  # it is newer
        if snapshot is not None and all(copy.step <= snapshot.manifest.step for copy in checkpoints):
            return self._restore_snapshot(snapshot, findings)
        bad: list[Finding] = []
        for checkpoint in checkpoints:
            manifest = checkpoint.manifest()
            loaded = manifest if isinstance(manifest, str) else self._load(checkpoint, manifest)
            if isinstance(manifest, Manifest) and not isinstance(loaded, str):
                if loaded:
                    findings.append(hyperparameters_changed(manifest.step, checkpoint.where, loaded))
                self._on_resumed(manifest.step)
                return Restored(
                    manifest.step,
                    findings,
                    manifest.samples,
                    manifest.node_s,
                    checkpoint.where,
                    saved_world_size=manifest.world_size,
                )
            findings.append(checkpoint.quarantine(str(loaded)))
            if not isinstance(manifest, Incomplete):
                bad.append(findings[-1])
        if bad:  # The model may contain damaged data: training cannot start from it.
            raise _no_good_checkpoint(self._storage.where, bad, durable=self._durable)
        if not self._durable and self._writer.attempt > 0:
            findings.append(_lost_with_pod(self._storage.where))
        require_checkpoint(0, self._resumed_step, self._storage.where)
        if self._peer_checkpointer is not None:
            self._peer_checkpointer.on_resumed(0, None)
        return Restored(0, findings)

    def _take_over(self) -> list[CheckpointRef]:
        checkpoints = self._storage.take_over()
        self._taken_over = True
        return checkpoints

    def _go_back(self, checkpoints: list[CheckpointRef]) -> list[CheckpointRef]:
        """Set aside the newest checkpoints, as far as there are older ones: a failure may come from their state."""
        steps = list(dict.fromkeys(each.step for each in checkpoints))
        back = min(self._checkpoints_back, len(steps) - 1)
        if back <= 0:
            return checkpoints
        self._storage.set_aside_after(steps[back])
        return [each for each in checkpoints if each.step <= steps[back]]

    def _on_resumed(self, step: int, snapshot_id: SnapshotId | None = None) -> None:
        self._storage.on_resumed(step)
        if self._peer_checkpointer is not None:
            self._peer_checkpointer.on_resumed(step, snapshot_id)

    def _find_snapshot(self, peer_restore: PeerRestore | None) -> tuple[MemorySnapshot | None, list[Finding]]:
        """This rank's state of the newest step that all ranks have in memory, and findings about it."""
        snapshot, findings = self._find_transferred()
        if peer_restore is None or (snapshot is not None and snapshot.manifest.step >= peer_restore.newest_step):
            return snapshot, findings
        recalled, peer_findings = peer_restore.restore()
        return recalled or snapshot, findings + peer_findings

    def _find_transferred(self) -> tuple[MemorySnapshot | None, list[Finding]]:
        """The transferred state, if it is intact and the same on all ranks; and findings about it."""
        if self._transfer_memory is None:
            return None, []
        snapshot = MemorySnapshot.find_for_rank(self._transfer_memory, rank=self._ranks.rank)
        damage = snapshot.find_damage() if snapshot is not None else None
        parts = self._ranks.gather((snapshot.snapshot_id, snapshot.bytes, damage) if snapshot is not None else None)
        finding, good = self._ranks.broadcast(validate_all_ranks(parts))
        return snapshot if good else None, [finding] if finding else []

    def _restore_snapshot(self, snapshot: MemorySnapshot, findings: list[Finding]) -> Restored:
        """Restore from memory as from a checkpoint."""
        manifest = snapshot.manifest
        state = self._state_to_load_into(manifest, MEMORY, snapshot.optimizer_state())
        try:
            snapshot.copy_into(state)
        except StateMismatch as error:
            what = f"the state transferred after step {manifest.step}"
            raise _does_not_fit(what, MEMORY, f"rank {self._ranks.rank}: {error}") from error
        if (why := self._hyperparams.group_mismatch(state)) is not None:
            raise optimizer_changed(manifest.step, MEMORY, why)
        try:
            changed = self._hyperparams.load(state, snapshot.per_rank_state(), manifest.hyperparams)
        except StateNotLoaded as error:
            raise _does_not_fit(f"the state transferred after step {manifest.step}", MEMORY, str(error)) from error
        if changed:
            findings.append(hyperparameters_changed(manifest.step, MEMORY, changed))
        self._on_resumed(manifest.step, snapshot.snapshot_id)
        return Restored(
            manifest.step,
            findings,
            manifest.samples,
            manifest.node_s,
            MEMORY,
            saved_world_size=manifest.world_size,
        )

    def _load(self, checkpoint: CheckpointRef, manifest: Manifest) -> list[HyperparamChange] | str:
        """Restore the loop's state; returns the overridden hyper-parameters or, on all ranks, any rank's damage."""
        manifest_file.refuse_other_format(manifest, checkpoint.where)
        # A rank beyond those loads rank 0's part but keeps its own random state: two ranks must not draw the same.
        known = self._ranks.rank < manifest.world_size
        own = manifest_file.rank_file(self._ranks.rank if known else 0)
        try:
            state = dcp_io.read(
                lambda saved: self._state_to_load_into(manifest, checkpoint.where, saved),
                checkpoint,
                manifest.files,
                self._ranks,
                also=own,
            )
        except CheckpointException as error:
            causes = (f"rank {rank}: {cause}" for rank, (cause, _) in error.failures.items())
            raise _does_not_fit(f"the checkpoint of step {manifest.step}", checkpoint.where, *causes) from error
        except UnpicklingError as error:  # from the index
            raise _does_not_fit(f"the checkpoint of step {manifest.step}", checkpoint.where, str(error)) from error
        except dcp_io.StoreUnreachable as error:
            raise store_unreachable(self._storage.where, str(error)) from error
        if isinstance(state, str):
            return state
        if (why := self._hyperparams.group_mismatch(state)) is not None:
            raise optimizer_changed(manifest.step, checkpoint.where, why)
        try:
            return self._hyperparams.load(state, checkpoint.folder / own, manifest.hyperparams, random=known)
        except (StateNotLoaded, UnpicklingError) as error:
            what = f"the checkpoint of step {manifest.step}"
            raise _does_not_fit(what, checkpoint.where, f"rank {self._ranks.rank}: {error}") from error

    def _state_to_load_into(self, manifest: Manifest, where: str, saved: Collection[str]) -> dict[str, Any]:
        """The loop's state, with optimizer state for the parameters that were `saved` with some."""
        state = self._train_state.tensors_to_load_into(saved)
        if (why := self._hyperparams.prepare_load(state, manifest.hyperparams)) is not None:
            raise optimizer_changed(manifest.step, where, why)
        return state

    def _save(
        self, manifest: Manifest, staged: dict[str, Any] | Finding, own: Callable[[], bytes], began: float
    ) -> Saved:
        """The background part of a save; runs in every rank's worker thread."""
        partial, warning, size_bytes = self._storage.partial(manifest.step), None, 0
        try:
            settled = self._copy_problem(staged, partial)
            warning = self._buffer_finding()
            if self._pruning is not None:
                wait([self._pruning])
            problem = self._background_group.first_not_none(settled)
            if problem is None and not isinstance(staged, Finding):
                done = self._storage.commit(manifest, self._write(staged, own, partial), self._background_group)
                problem, size_bytes = (done, 0) if isinstance(done, Finding) else (None, done)
        except RuntimeError as error:  # from Gloo, when another rank is gone
            problem = save_failed(partial, self._ranks.rank, error)
        took_s = time.monotonic() - began
        if problem is None:
            self._prune()
        warning = self._storage.take_finding() or warning
        return Saved(manifest.step, self._storage.name(manifest.step), took_s, problem, warning, size_bytes)

    def _buffer_finding(self) -> Finding | None:
        """A finding of any rank about its buffer, at the first save: all ranks have allocated it by then."""
        if self._buffer_reported:
            return None
        self._buffer_reported = True
        return self._background_group.first_not_none(self._staging.take_finding())

    def _prune(self) -> None:
        """Remove expired checkpoints after a commit; only the next write waits for this."""
        try:
            self._pruning = self._pruner.submit(self._storage.prune)
        except RuntimeError:  # the interpreter is shutting down and starts no more threads
            self._storage.prune()

    def _copy_problem(self, staged: dict[str, Any] | Finding, partial: Path) -> Finding | None:
        if isinstance(staged, Finding):
            return staged
        try:
            if not self._staging.finish_copy():
                return torn_copy(f"the checkpoint {partial.stem}", self._who, code="checkpoint-not-bit-exact")
            return None
        except (OSError, RuntimeError) as error:
            return save_failed(partial, self._ranks.rank, error)

    def _write(self, staged: dict[str, Any], own: Callable[[], bytes], partial: Path) -> WrittenFiles:
        """Write and fsync this rank's part; returns its files' checksums, or the failure."""
        try:
            files = dcp_io.write(staged, partial, self._background_group)
            file = partial / manifest_file.rank_file(self._ranks.rank)
            file.write_bytes(own())
            return manifest_file.checksums([*files, file])
        except HoldfastError as error:
            return error.findings[0]
        except (OSError, RuntimeError, CheckpointException) as error:
            return save_failed(partial, self._ranks.rank, error)


def _does_not_fit(what: str, where: str, *causes: str) -> HoldfastError:
    return failure(
        "checkpoint-incompatible",
        f"{what} cannot be loaded into this model and optimizer",
        exit_code=ExitCode.CANNOT_RUN_HERE,
        where=where,
        evidence=causes,
        remedy=f"train the model it was saved from, or {USE_ANOTHER_FOLDER}",
    )


def _store_skipped(unreachable: Finding, step: int) -> Finding:
    return msgspec.structs.replace(
        unreachable,
        code="checkpoint-store-skipped",
        severity=Severity.WARNING,
        what=f"the checkpoint store does not answer, so the ranks resume from step {step} in {MEMORY}",
        remedy="Fix it before more nodes are lost: until then nothing but memory has the training's state.",
    )


_POD_LOCAL = (
    "the folder is the pod's own: the target names no volume, so a pod that is replaced begins with an empty one"
)
_USE_A_VOLUME = "write `volume: {claim: NAME}` in the target, or a URL such as s3://bucket/run as `checkpoint.path`"


def _no_good_checkpoint(where: str, bad: list[Finding], *, durable: bool) -> HoldfastError:
    """Error for checkpoints of which none can be resumed from."""
    evidence = tuple(f"{finding.where}: {line}" for finding in bad for line in finding.evidence)
    if durable:
        return failure(
            "no-valid-checkpoint",
            f"every checkpoint there is, {len(bad)} in all, is damaged",
            exit_code=ExitCode.STORAGE_FAILED,
            where=where,
            evidence=evidence,
            remedy="check the storage; they were set aside, so that the next start begins at step 0",
            owner=Owner.CLUSTER,
        )
    return failure(
        "checkpoints-lost-with-pod",
        f"none of {len(bad)} checkpoints is whole: parts of them were lost with the pod that had them",
        exit_code=ExitCode.STORAGE_FAILED,
        where=where,
        evidence=(_POD_LOCAL, *evidence),
        remedy=f"{_USE_A_VOLUME}; the next start begins at step 0",
        owner=Owner.USER,
    )


def _lost_with_pod(where: str) -> Finding:
    """Finding for an empty folder: nothing was saved before this attempt, or it was lost."""
    return Finding(
        code="checkpoints-lost-with-pod",
        severity=Severity.WARNING,
        what="no checkpoint was found, so the run begins again at step 0; checkpoints on a pod's own disk are lost "
        "with the pod",
        where=where,
        evidence=(_POD_LOCAL,),
        remedy=_USE_A_VOLUME,
    )
