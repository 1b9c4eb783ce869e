"""A loop whose state has a given size, and its saves: by holdfast, and by torch's `async_save` in two ways.

A step is as long as that of a real training (half a second): a save's copy overlaps the next forward and backward pass.
The cost of a save is the time of all steps from its start until it is on disk, minus as many ordinary steps.
"""

from __future__ import annotations

import gc
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any, NamedTuple

from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict

from bench.gpu.device import Device
from bench.gpu.section import Place
from bench.gpu.training import GB, StateLoop, digest, step_times_ms, tensors_of
from holdfast.train import RankConfig, Session
from holdfast.train.checkpoint.manager import CheckpointManager

STEP_S, TINY_STEP_S = 0.5, 0.002
WIDTH, BATCH = 4096, 4096
TINY_WIDTH, TINY_BATCH, TINY_LAYERS = 64, 8, 4
ORDINARY_STEPS = 4


@dataclass(frozen=True, kw_only=True)
class Save:
    """One save."""

    added_ms: float
    """The device's time for the steps meanwhile, beyond that of ordinary ones."""
    call_ms: float
    """The host's time in the call that begins it."""
    waited_ms: float
    """The host's time in optimizer steps that waited for the copy."""
    steps: int
    took_s: float
    """Until it was on disk."""
    state: list[int]
    """Digests of the state that was saved."""


class Begun(NamedTuple):
    """A save that has begun."""

    took_s: Callable[[], float | None]
    """The seconds until it was on disk; None until then."""
    wait_copied: Callable[[], object] = int
    """Waits until the optimizer may change the state; a Session's own copy has the optimizer wait for it."""


class Opened(NamedTuple):
    """A Session's checkpoints, which are saved here at other steps than a Session would."""

    step: int
    """The step after which it resumed."""
    manager: CheckpointManager


class Loop:
    """The loop, and the ways to save it."""

    def __init__(self, place: Place, device: Device, size_gb: int) -> None:
        self._device, self._folder = device, place.folder
        state_bytes = 12 * TINY_LAYERS * TINY_WIDTH**2 if place.tiny else size_gb * GB
        self._begin = partial(
            StateLoop,
            device,
            state_bytes,
            width=TINY_WIDTH if place.tiny else WIDTH,
            batch=TINY_BATCH if place.tiny else BATCH,
        )
        self._loop = self._begin()
        self._loop.lengthen(TINY_STEP_S if place.tiny else STEP_S)
        self._checkpoints = self._open().manager
        self._count = 0
        self.state_bytes = sum(tensor.nbytes for tensor in tensors_of(self._state()))
        self._ordinary_ms = 0.0
        self._stager: DefaultStager | None = None
        self._saved: list[int] = []
        """Digests of the state of the last save."""

    def _open(self) -> Opened:
        """A Session for the loop, which resumes from the newest checkpoint; it would save at its last step only."""
        config = RankConfig(checkpoint_path=self._folder / "ours", checkpoint_keep=1)
        session = Session(model=self._loop.model, optimizer=self._loop.optimizer, config=config)
        manager = session._checkpoints
        assert manager is not None
        return Opened(session.step, manager)

    def _state(self) -> tuple[Any, Any]:
        return get_state_dict(self._loop.model, self._loop.optimizer)

    def ordinary_ms(self) -> float:
        """The time of an ordinary step."""
        marks = [self._device.mark()]
        for _ in range(ORDINARY_STEPS):
            self._loop.step()
            marks.append(self._device.mark())
        self._ordinary_ms = median(step_times_ms(self._device, marks))
        return self._ordinary_ms

    def ours(self) -> Save:
        """Save as a Session does; only this checkpoint stays on disk."""
        self._count += 1
        self._checkpoints.take_stalled_s()
        save = self._save(self._begin_ours)
        self._saved = save.state
        return save

    def theirs(self) -> Save:
        """Save with torch's `async_save`, its defaults untouched."""
        return self._save(self._begin_theirs)

    def theirs_staged(self) -> Save:
        """Save with torch's `async_save` and its DefaultStager, whose copy overlaps the next forward and backward pass.

        Its buffers are pinned and kept for the next save. Without a GPU, torch offers only the overlap.
        """
        if self._stager is None:
            on_gpu = self._device.torch.type == "cuda"
            self._stager = DefaultStager(
                StagingOptions(
                    use_pinned_memory=on_gpu,
                    use_shared_memory=False,
                    use_async_staging=True,
                    use_non_blocking_copy=on_gpu,
                )
            )
        return self._save(partial(self._begin_theirs, self._stager))

    def _begin_ours(self) -> Begun:
        self._checkpoints.start_save(self._count)

        def took_s() -> float | None:
            if (saved := self._checkpoints.poll()) is None:
                return None
            assert saved.problem is None, saved.problem
            return saved.took_s

        return Begun(took_s)

    def _begin_theirs(self, stager: DefaultStager | None = None) -> Begun:
        began, done = time.perf_counter(), list[float]()
        model, optimizer = self._state()
        state = {"model": model, "optimizer": optimizer}
        saving: Any = dcp.async_save(state, checkpoint_id=self._folder / "theirs", async_stager=stager)
        uploading = saving if stager is None else saving.upload_completion
        uploading.add_done_callback(lambda _: done.append(time.perf_counter() - began))

        def took_s() -> float | None:
            if not done:
                return None
            uploading.result()
            shutil.rmtree(self._folder / "theirs")
            return done[0]

        return Begun(took_s, int if stager is None else saving.staging_completion.result)

    def _save(self, begin: Callable[[], Begun]) -> Save:
        self.ordinary_ms()
        state = digest(tensors_of(self._state()))
        marks, began = [self._device.mark()], time.perf_counter()
        begun = begin()
        call_ms = 1e3 * (time.perf_counter() - began)
        while True:
            self._loop.step(begun.wait_copied)
            marks.append(self._device.mark())
            if (took_s := begun.took_s()) is not None:
                break
        times_ms = step_times_ms(self._device, marks)
        return Save(
            added_ms=sum(times_ms) - len(times_ms) * self._ordinary_ms,
            call_ms=call_ms,
            waited_ms=1e3 * self._checkpoints.take_stalled_s(),
            steps=len(times_ms),
            took_s=took_s,
            state=state,
        )

    def allocate_s(self) -> float:
        """Allocate and pin the host's buffer, as a Session does in the background after its first step."""
        began = time.perf_counter()
        model, optimizer = self._state()
        self._checkpoints._staging.prepare({"model": model, "optimizer": optimizer})
        return time.perf_counter() - began

    def load_s(self) -> float:
        """Load the checkpoint into a new loop; raises unless every bit is as it was."""
        self._checkpoints.close()
        if self._stager is not None:
            self._stager.close()
        # The old optimizer's hooks hold the buffer of its saves.
        del self._checkpoints, self._loop
        gc.collect()
        self._device.release()
        self._loop = self._begin()
        self._device.synchronize()
        began = time.perf_counter()
        opened = self._open()
        self._device.synchronize()
        took_s = time.perf_counter() - began
        assert opened.step == self._count, f"resumed after step {opened.step}"
        assert digest(tensors_of(self._state())) == self._saved, "the loaded state differs"
        opened.manager.close()
        return took_s
