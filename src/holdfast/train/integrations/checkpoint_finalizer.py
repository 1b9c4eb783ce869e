"""Commits the checkpoints that a framework's loop has saved, and reports them.

Used by the callbacks of all frameworks. Manifests: checkpoint_dir.py.
"""

from __future__ import annotations

import time

from holdfast.train.checkpoint.hyperparams import Hyperparams
from holdfast.train.checkpoint.writer_fence import REFUSALS, to_error
from holdfast.train.integrations.checkpoint_dir import CheckpointDir, FinalizeResult
from holdfast.train.session.rank_coordinator import RankCoordinator


class CheckpointFinalizer:
    """Commits the checkpoints of one rank's loop; all ranks make the same calls after a step."""

    def __init__(self, coordinator: RankCoordinator, checkpoint_dir: CheckpointDir) -> None:
        """Raises HoldfastError, on all ranks, if another live run uses the folder."""
        self._coordinator = coordinator
        self._checkpoint_dir = checkpoint_dir
        self.hyperparams: Hyperparams | None = None
        """The program's hyper-parameters, once known; recorded in each manifest."""
        coordinator.ranks.run_on_first(checkpoint_dir.take_over)
        self._background_group = coordinator.ranks.background_group()

    def start(self, step: int, *, began: float) -> None:
        """Commit what the framework has written since `began` (monotonic), while the loop waited."""
        self._coordinator.save_started()
        self._coordinator.add_stall(time.monotonic() - began)
        self._checkpoint_dir.start(
            step, self._background_group, began=began, node_s=self._coordinator.node_s, configured=self.hyperparams
        )

    def poll(self) -> None:
        """Report the last commit if it has ended."""
        self._report(self._checkpoint_dir.poll(), required=False)

    def wait(self, *, required: bool = False) -> None:
        """Wait for the last commit, before the next save or the loop's end; raises HoldfastError if `required`."""
        began = time.monotonic()
        result = self._checkpoint_dir.wait()
        self._coordinator.add_stall(time.monotonic() - began)
        self._report(result, required=required)

    def _report(self, result: FinalizeResult | None, *, required: bool) -> None:
        if result is None:
            return
        if result.problem is None:
            self._coordinator.checkpoint_committed(
                result.step, result.path, took_s=result.took_s, size_bytes=result.size_bytes
            )
            return
        ends = required or result.problem.code in REFUSALS
        self._coordinator.report_finding(result.problem, fatal=ends)
        if ends:
            raise to_error(result.problem)
