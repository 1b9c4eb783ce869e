"""Synchronises the parameters of replicas that step alone, by TorchFT's LocalSGD or DiLoCo.

Only their synchronisation is used. semi_sync.py decides when, because what the loop does after the optimiser's step
belongs to the step as well.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import Optimizer
from torchft.local_sgd import DiLoCo, LocalSGD

from holdfast.train.ft.replica_group import ReplicaGroup
from holdfast.train.session.rank_config import OuterSyncConfig, SyncMethod

OUTER_LR, OUTER_MOMENTUM = 0.7, 0.9
"""DiLoCo's outer optimiser: SGD with Nesterov momentum, with the values of its paper (arXiv 2311.08105)."""


class OuterSynchronizer:
    """Synchronises one model with those of the other replicas."""

    def __init__(
        self, sync: OuterSyncConfig, replica_group: ReplicaGroup, model: nn.Module, optimizer: Optimizer
    ) -> None:
        self._manager = replica_group.manager
        self._model = model
        self._fragment = None
        if sync.method is SyncMethod.DILOCO:
            outer = torch.optim.SGD(model.parameters(), lr=OUTER_LR, momentum=OUTER_MOMENTUM, nesterov=True)
            (self._fragment,) = DiLoCo(self._manager, [model], optimizer, outer, sync.every)._fragments
        else:
            self._local = LocalSGD(self._manager, model, optimizer, sync.every)

    def reset_reference(self) -> None:
        """Use the current parameters as the reference, after a restore."""
        if self._fragment is not None:
            self._fragment.save_parameters()

    def synchronize(self) -> bool:
        """Synchronise with all replicas; False if one was lost meanwhile: then nothing has changed here."""
        before = self._manager.current_step()
        if self._fragment is None:
            self._local._perform_sync()
            return self._manager.current_step() > before
        own = [each.detach().clone() for each in self._model.parameters()]
        self._fragment.prepare_sync()
        if self._fragment.perform_sync():
            return True
        with torch.no_grad():  # it has restored those of the previous sync
            for parameter, value in zip(self._model.parameters(), own, strict=True):
                parameter.copy_(value)
        return False
