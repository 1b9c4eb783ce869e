"""Owns a checkpoint's life: copied between two steps, written beside the next ones, sealed at once, checked when read.

A checkpoint is a folder `step-00000042`: tensors as torch.distributed.checkpoint lays them out (each rank its share),
`host-00000.pt` per rank (random numbers, scheduler, the user's own state), and the seal, which names the format, the
step, and every file's size and checksum. It is written elsewhere and renamed once everything is on disk, so a folder
of the final name is complete whenever the writer died. Refuses to own when one is taken (session.py), and who may
commit one (tenure.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from torch.distributed.checkpoint.api import CheckpointException

from holdfast.errors import ExitCode, HoldfastError, failure
from holdfast.findings import Fault, Finding, Severity, of_replica
from holdfast.train import handover, seal, tensors
from holdfast.train.behind import Behind, Task
from holdfast.train.configured import Change, hyperparameters_changed, optimizer_changed
from holdfast.train.depot import Copy, Depot, Remains, Written, failed, unreachable
from holdfast.train.environment import ELSEWHERE
from holdfast.train.handover import MEMORY, Handed, Origin, Unfit, judged, not_handed_over
from holdfast.train.peercopies import PeerCopies
from holdfast.train.program import Program
from holdfast.train.ranks import Ranks
from holdfast.train.recall import Recall
from holdfast.train.seal import Seal
from holdfast.train.staging import Staging, inexact
from holdfast.train.tenure import Writer, error_of
from holdfast.train.training import Training


class Restored(NamedTuple):
    """What came of looking for a checkpoint."""

    step: int
    """0 where there is none."""
    noticed: list[Finding]
    """What is to be said of it; on rank 0."""
    samples: int | None = None
    """Samples that its steps took, where that is known."""
    node_s: float = 0.0
    """Seconds that its steps took, of all nodes together."""
    where: str = ""
    """What it was read from."""
    taken_by: int = 0
    """How many ranks took it."""


class Saved(NamedTuple):
    """What came of a save, the same on all ranks."""

    step: int
    path: str
    took_s: float
    """From the copy until it was complete, or had failed."""
    problem: Finding | None = None
    """Why it failed."""
    noticed: Finding | None = None
    """What went wrong since the save before, behind the loop."""


class Checkpoints:
    """The checkpoints of one run on their depot; all ranks make the same calls after a step.

    At most one save is under way: `finish` comes before the next `begin`.
    """

    def __init__(
        self,
        depot: Depot,
        *,
        training: Training,
        ranks: Ranks,
        memory: Path | None = None,
        writer: Writer | None = None,
        copies: PeerCopies | None = None,
        lasting: bool = True,
    ) -> None:
        """`memory` is where this rank's state is handed over to the process that takes its place; `copies` are those
        that nodes have of one another's, which are gone on from before anything that is stored. `lasting` is whether
        the depot outlives the nodes.
        """
        self._depot = depot
        self._lasting = lasting
        self._memory = memory
        self._copies = copies
        self._writer = writer or Writer()
        self._who = f"rank {ranks.rank}{of_replica(self._writer.replica)}"
        self._training = training
        self._program = Program(training)
        self._ranks = ranks
        self._staging = Staging(training)
        self._aside = ranks.aside()
        """For the thread that writes."""
        self._behind = Behind("holdfast-checkpoint")
        self._tidier = ThreadPoolExecutor(1, thread_name_prefix="holdfast-tidy")
        """Beside the one that writes, in which the next save's copies are made."""
        self._taken_over = False
        """Whether the depot is this attempt's: one that took its state from a peer has not looked there yet."""
        self._prepared = False
        self._saving: Task[Saved] | None = None
        self._tidying: Future[None] | None = None

    def take_waited_s(self) -> float:
        """Seconds that the optimiser's steps have waited for copies since the last call."""
        waited_s, self._staging.waited_s = self._staging.waited_s, 0.0
        return waited_s

    def wait(self) -> None:
        """Wait until what is saved is copied, so that anybody may change it."""
        self._staging.wait()

    def prepare(self) -> None:
        """Get ready for the first save, beside the loop: called after a step, when the optimiser has its state."""
        if not self._prepared:
            self._prepared = True
            state = self._training.tensors()
            self._behind.hand(lambda: self._staging.prepare(state))

    def begin(self, step: int, samples: int | None = None, *, node_s: float = 0.0) -> None:
        """Copy what is to be saved, and have it written and sealed beside the steps that follow."""
        sealed = self.unsealed(step, samples, node_s)
        self._prepared = True
        began, own = time.monotonic(), self._training.own()
        try:
            if not self._taken_over:
                self._take_over()
            staged = self._staging.begin()
        except HoldfastError as error:  # on all ranks
            staged = error.findings[0]
        except (OSError, RuntimeError) as error:  # no memory for the buffer
            staged = failed(self._depot.partial(step), self._ranks.rank, error)
        self._saving = self._behind.hand(lambda: self._save(sealed, staged, own, began))

    def finished(self) -> Saved | None:
        """What came of the save under way; None while it is not known, and where there is none. Each is told once."""
        return self.finish() if self._saving is not None and self._saving.done() else None

    def finish(self) -> Saved | None:
        """The same, waited for."""
        saving, self._saving = self._saving, None
        return saving.result() if saving is not None else None

    def close(self) -> Finding | None:
        """Wait for all that goes on behind the loop; returns why the newest checkpoint is not where it should be."""
        self._behind.finish()  # after that the last save has asked for its tidying
        if self._tidying is not None:
            wait([self._tidying])
        return self._depot.close()

    def save(self, step: int, samples: int | None = None) -> str:
        """Save one: complete, for every rank, when this returns; a failure is raised on all of them alike."""
        self.begin(step, samples)
        saved = self.finish()
        assert saved is not None
        if saved.problem is not None:
            raise error_of(saved.problem)
        return saved.path

    def hand_over(self, step: int, samples: int | None = None, *, node_s: float = 0.0) -> Finding | None:
        """Leave the state, as it is, for the processes that take these ranks' places; returns why it is not there."""
        sealed = self.unsealed(step, samples, node_s)
        return self._ranks.any_of(self._handed_over(sealed))

    def _handed_over(self, sealed: Seal) -> Finding | None:
        if self._memory is None:
            return not_handed_over(self._who, "it was told of no memory to leave its state in")
        try:
            tensors, own = self._training.tensors(), self._training.own()
            handover.write(self._memory, self._writer, self._ranks.rank, sealed, tensors, own())
        except (OSError, RuntimeError) as error:
            return not_handed_over(self._who, f"{type(error).__name__}: {error}")
        return None

    def unsealed(self, step: int, samples: int | None = None, node_s: float = 0.0) -> Seal:
        """What is said of a state as it is now, its files apart."""
        return Seal(
            step=step,
            world_size=self._ranks.world_size,
            samples=samples,
            node_s=node_s,
            configured=self._program.configured,
            files={},
        )

    def restore(self) -> Restored:
        """Go on from what lies in memory, or load the newest complete checkpoint where that is newer.

        Checkpoints that are not what their seal says are set aside.
        """
        recall = Recall(self._copies.memories, self._ranks) if self._copies is not None else None
        try:
            return self._restored(*self._remembered(recall))
        finally:
            if recall is not None:
                recall.close()

    def _restored(self, remembered: Handed | None, noticed: list[Finding]) -> Restored:
        """`remembered` is this rank's state in memory."""
        try:
            copies = self._take_over()
        except HoldfastError as error:
            if remembered is None or error.findings[0].code != "checkpoint-store-unreachable":
                raise
            noticed.append(_passed_over(error.findings[0], remembered.seal.step))
            copies = []
        if remembered is not None and all(copy.step <= remembered.seal.step for copy in copies):
            return self._take(remembered, noticed)
        bad: list[Finding] = []
        for copy in copies:
            sealed = copy.sealed()
            loaded = sealed if isinstance(sealed, str) else self._load(copy, sealed)
            if isinstance(sealed, Seal) and not isinstance(loaded, str):
                if loaded:
                    noticed.append(hyperparameters_changed(sealed.step, copy.where, loaded))
                self._resumed(sealed.step)
                return Restored(
                    sealed.step, noticed, sealed.samples, sealed.node_s, copy.where, taken_by=sealed.world_size
                )
            noticed.append(copy.set_aside(str(loaded)))
            if not isinstance(sealed, Remains):
                bad.append(noticed[-1])
        if bad:  # The model may hold what was read of them: nothing can begin with it.
            raise _none_is_good(self._depot.where, bad, lasting=self._lasting)
        if not self._lasting and self._writer.attempt > 0:
            noticed.append(_lost_with_its_pod(self._depot.where))
        if self._copies is not None:
            self._copies.resumed(0, None)
        return Restored(0, noticed)

    def _take_over(self) -> list[Copy]:
        copies = self._depot.take_over()
        self._taken_over = True
        return copies

    def _resumed(self, step: int, origin: Origin | None = None) -> None:
        self._depot.resumed(step)
        if self._copies is not None:
            self._copies.resumed(step, origin)

    def _remembered(self, recall: Recall | None) -> tuple[Handed | None, list[Finding]]:
        """This rank's state of the newest step that all ranks have in memory, and what is to be said of it."""
        handed, noticed = self._handed()
        if recall is None or (handed is not None and handed.seal.step >= recall.newest):
            return handed, noticed
        recalled, said = recall.state()
        return recalled or handed, noticed + said

    def _handed(self) -> tuple[Handed | None, list[Finding]]:
        """What was handed over, where that is whole and the same on all ranks; and what is to be said of it."""
        if self._memory is None:
            return None, []
        handed = Handed.find(self._memory, rank=self._ranks.rank)
        damage = handed.damage() if handed is not None else None
        parts = self._ranks.to_first((handed.origin, handed.bytes, damage) if handed is not None else None)
        finding, good = self._ranks.from_first(judged(parts))
        return handed if good else None, [finding] if finding else []

    def _take(self, handed: Handed, noticed: list[Finding]) -> Restored:
        """Go on from memory: the same as from a checkpoint."""
        sealed, state = handed.seal, self._training.tensors()
        if (why := self._program.ask_for(state, sealed.configured)) is not None:
            raise optimizer_changed(sealed.step, MEMORY, why)
        try:
            handed.fill(state)
        except Unfit as error:
            what = f"what was handed over after step {sealed.step}"
            raise _does_not_fit(what, MEMORY, f"rank {self._ranks.rank}: {error}") from error
        if (why := self._program.moved(state)) is not None:
            raise optimizer_changed(sealed.step, MEMORY, why)
        if changed := self._program.take(state, handed.own(), sealed.configured):
            noticed.append(hyperparameters_changed(sealed.step, MEMORY, changed))
        self._resumed(sealed.step, handed.origin)
        return Restored(sealed.step, noticed, sealed.samples, sealed.node_s, MEMORY)

    def _load(self, copy: Copy, sealed: Seal) -> list[Change] | str:
        """Put the loop where it was; returns what the program changes, or on all ranks the damage that any found."""
        seal.refuse_other_format(sealed, copy.where)
        state, was = self._training.tensors(), sealed.configured
        if (why := self._program.ask_for(state, was)) is not None:
            raise optimizer_changed(sealed.step, copy.where, why)
        # One beyond those takes rank 0's part, and its own random numbers: else two would draw the same.
        known = self._ranks.rank < sealed.world_size
        own = _own_file(self._ranks.rank if known else 0)
        try:
            damage = tensors.read(state, copy, sealed.files, self._ranks, also=own)
        except CheckpointException as error:
            causes = (f"rank {rank}: {cause}" for rank, (cause, _) in error.failures.items())
            raise _does_not_fit(f"the checkpoint of step {sealed.step}", copy.where, *causes) from error
        except tensors.Lost as error:
            raise unreachable(self._depot.where, str(error)) from error
        if damage is not None:
            return damage
        if (why := self._program.moved(state)) is not None:
            raise optimizer_changed(sealed.step, copy.where, why)
        return self._program.take(state, copy.folder / own, was, random=known)

    def _save(self, sealed: Seal, staged: dict[str, Any] | Finding, own: Callable[[], bytes], began: float) -> Saved:
        """The writer's part of a save; every rank's thread takes it."""
        partial = self._depot.partial(sealed.step)
        try:
            settled = self._settled(staged, partial)
            if self._tidying is not None:
                wait([self._tidying])
            problem = self._aside.any_of(settled)
            if problem is None and not isinstance(staged, Finding):
                problem = self._depot.commit(sealed, self._write(staged, own, partial), self._aside)
        except RuntimeError as error:  # Gloo's, when another rank is gone
            problem = failed(partial, self._ranks.rank, error)
        took_s = time.monotonic() - began
        if problem is None:
            self._tidy()
        return Saved(sealed.step, self._depot.name(sealed.step), took_s, problem, self._depot.noticed())

    def _tidy(self) -> None:
        """Drop what is too old, now that another is complete; only the next one to be written waits for that."""
        try:
            self._tidying = self._tidier.submit(self._depot.tidy)
        except RuntimeError:  # the interpreter is ending, and starts nothing more
            self._depot.tidy()

    def _settled(self, staged: dict[str, Any] | Finding, partial: Path) -> Finding | None:
        if isinstance(staged, Finding):
            return staged
        try:
            if not self._staging.settle():
                return inexact(f"the checkpoint {partial.stem}", self._who, code="checkpoint-inexact")
            return None
        except (OSError, RuntimeError) as error:
            return failed(partial, self._ranks.rank, error)

    def _write(self, staged: dict[str, Any], own: Callable[[], bytes], partial: Path) -> Written:
        """Write this rank's part and see it to disk; returns its files' sums, or what went wrong."""
        try:
            files = tensors.write(staged, partial, self._aside)
            file = partial / _own_file(self._ranks.rank)
            file.write_bytes(own())
            return seal.sums([*files, file])
        except (OSError, RuntimeError, CheckpointException) as error:
            return failed(partial, self._ranks.rank, error)


def _own_file(rank: int) -> str:
    return f"host-{rank:05d}.pt"


def _does_not_fit(what: str, where: str, *causes: str) -> HoldfastError:
    return failure(
        "checkpoint-does-not-fit",
        f"{what} cannot be loaded into this model and optimiser",
        exit_code=ExitCode.IMPOSSIBLE,
        where=where,
        evidence=causes,
        remedy=f"train the model it was saved from, or {ELSEWHERE}",
    )


def _passed_over(unreachable: Finding, step: int) -> Finding:
    return msgspec.structs.replace(
        unreachable,
        code="checkpoint-store-passed-over",
        severity=Severity.WARNING,
        what=f"the store of checkpoints does not answer, and step {step}, which {MEMORY} holds, is gone on from",
        remedy="Mend it before more nodes are lost: until then nothing but memory has the training's state.",
    )


_OWN_FOLDER = (
    "the folder is the pod's own: the profile names no volume, so a pod that is replaced begins with an empty one"
)
_KEEP_THEM = "write `volume: {claim: NAME}` in the profile, or a URL such as s3://bucket/run as `checkpoint.path`"


def _none_is_good(where: str, bad: list[Finding], *, lasting: bool) -> HoldfastError:
    """Of the checkpoints that there are none can be resumed from."""
    evidence = tuple(f"{finding.where}: {line}" for finding in bad for line in finding.evidence)
    if lasting:
        return failure(
            "no-good-checkpoint",
            f"every checkpoint there is, {len(bad)} in all, is damaged",
            exit_code=ExitCode.STORAGE,
            where=where,
            evidence=evidence,
            remedy="check the storage; they were set aside, so that the next start begins at step 0",
            fault=Fault.CLUSTER,
        )
    return failure(
        "checkpoints-lost-with-pod",
        f"none of {len(bad)} checkpoints is whole: parts of them were lost with the pod that had them",
        exit_code=ExitCode.STORAGE,
        where=where,
        evidence=(_OWN_FOLDER, *evidence),
        remedy=f"{_KEEP_THEM}; the next start begins at step 0",
        fault=Fault.USER,
    )


def _lost_with_its_pod(where: str) -> Finding:
    """Either nothing was saved before this attempt, or it was lost."""
    return Finding(
        code="checkpoints-lost-with-pod",
        severity=Severity.WARNING,
        what="no checkpoint was found, so the run begins again at step 0; checkpoints on a pod's own disk are lost "
        "with the pod",
        where=where,
        evidence=(_OWN_FOLDER,),
        remedy=_KEEP_THEM,
    )
