"""Replicas that step alone and synchronise every few steps: TorchFT's LocalSGD and DiLoCo, with the loop unchanged.

A step counts for the replica that takes it. At a synchronisation, at the end of a step, all adopt the same parameters;
a new or returning replica receives another's state there, and takes part immediately. Quorum: replica_group.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from holdfast.train.checkpoint.train_state import TrainState
from holdfast.train.ft.replica_strategy import MultiReplica, Resume, TrainingProgress
from holdfast.train.ft.state_verifier import CheckpointTrust
from holdfast.train.session.rank_config import OuterSyncConfig, RankConfig, SyncMethod
from holdfast.train.session.rank_coordinator import RankCoordinator

OUTER_LR, OUTER_MOMENTUM = 0.7, 0.9
"""DiLoCo's outer optimizer: SGD with Nesterov momentum, with the values of its paper (arXiv 2311.08105)."""


class SemiSyncReplicas(MultiReplica):
    """One of several replicas that synchronise periodically."""

    def __init__(
        self,
        config: RankConfig,
        train_state: TrainState,
        coordinator: RankCoordinator,
        resume: Resume,
        trust: CheckpointTrust,
    ) -> None:
        def resumed() -> TrainingProgress:
            progress = resume()
            self._outer_sync.reset_reference()
            return progress

        super().__init__(config, train_state, coordinator, resumed, trust)
        assert config.outer_sync is not None
        self._every = config.outer_sync.every
        self._outer_sync = _OuterSync(config.outer_sync, self._replica_group.manager, train_state)
        self._synced = False

    def begin_step(self, progress: TrainingProgress, *, total: int) -> TrainingProgress:
        return progress if self._synced else self._synchronize(progress)

    def end_step(self, after: TrainingProgress) -> TrainingProgress | None:
        return after if after.step % self._every else self._synchronize(after)

    def _synchronize(self, progress: TrainingProgress) -> TrainingProgress:
        """Join the quorum and synchronise the parameters; repeats if a replica was lost, or differs from the others."""
        self._join(progress)
        while not (self._outer_sync.synchronize() and self._verifier.verify(self._progress.step, math.inf)):
            self._join(self._progress)
        self._synced = True
        return self._progress


class _OuterSync:
    """Synchronises one model with those of the other replicas."""

    def __init__(self, sync: OuterSyncConfig, manager: Any, train_state: TrainState) -> None:
        from holdfast.train.ft import torchft_private  # imported here: TorchFT takes time to import

        self._manager = manager
        self._model, inner = train_state.model, train_state.optimizer
        self._fragment: Any = None
        self._local: Callable[[], None] | None = None
        if sync.method is SyncMethod.DILOCO:
            outer = torch.optim.SGD(self._model.parameters(), lr=OUTER_LR, momentum=OUTER_MOMENTUM, nesterov=True)
            self._fragment = torchft_private.diloco_fragment(manager, self._model, inner, outer, sync.every)
        else:
            self._local = torchft_private.local_sgd_sync(manager, self._model, inner, sync.every)

    def reset_reference(self) -> None:
        """Use the current parameters as the reference, after a restore."""
        if self._fragment is not None:
            self._fragment.save_parameters()

    def synchronize(self) -> bool:
        """Synchronise with all replicas; False if one was lost meanwhile: then nothing has changed here."""
        before = self._manager.current_step()
        if self._local is not None:
            self._local()
            return self._manager.current_step() > before
        own = [each.detach().clone() for each in self._model.parameters()]
        self._fragment.prepare_sync()
        if self._fragment.perform_sync():
            return True
        with torch.no_grad():  # it has restored those of the previous sync
            for parameter, value in zip(self._model.parameters(), own, strict=True):
                parameter.copy_(value)
        return False
