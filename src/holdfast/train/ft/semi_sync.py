"""Replicas that step alone and synchronise every few steps: TorchFT's LocalSGD and DiLoCo, with the loop unchanged.

A step counts for the replica that takes it. At a synchronisation, at the end of a step, all adopt the same parameters;
a new or returning replica receives another's state there, and takes part immediately. Quorum: replica_group.py.
"""

from __future__ import annotations

from collections.abc import Callable

from holdfast.train.checkpoint.train_state import TrainState
from holdfast.train.ft.replica_strategy import MultiReplica, TrainingProgress
from holdfast.train.session.rank_config import RankConfig
from holdfast.train.session.rank_coordinator import RankCoordinator


class SemiSyncReplicas(MultiReplica):
    """One of several replicas that synchronise periodically."""

    def __init__(
        self,
        config: RankConfig,
        train_state: TrainState,
        coordinator: RankCoordinator,
        *,
        resume: Callable[[], TrainingProgress],
    ) -> None:
        def resumed() -> TrainingProgress:
            progress = resume()
            self._outer_sync.reset_reference()
            return progress

        super().__init__(config, train_state, coordinator, resume=resumed)
        from holdfast.train.ft.outer_sync import OuterSynchronizer  # as with replica_group.py

        assert config.outer_sync is not None
        self._every = config.outer_sync.every
        self._outer_sync = OuterSynchronizer(
            config.outer_sync, self._replica_group, train_state.model, train_state.optimizer
        )
        self._synced = False

    def begin_step(self, progress: TrainingProgress, *, ended: bool) -> TrainingProgress:
        return progress if self._synced else self._synchronize(progress)

    def before_backward(self, *, last: bool) -> None:
        self._gradient_sync.set(enabled=last and self._has_inner_group)

    def end_step(self, after: TrainingProgress) -> TrainingProgress | None:
        return after if after.step % self._every else self._synchronize(after)

    def _synchronize(self, progress: TrainingProgress) -> TrainingProgress:
        """Join the quorum and synchronise the parameters; repeats if a replica was lost meanwhile."""
        self._join(progress)
        while not self._outer_sync.synchronize():
            self._join(self._progress)
        self._synced = True
        return self._progress
