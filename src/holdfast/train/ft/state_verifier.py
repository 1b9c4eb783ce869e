"""Compares the state of all replicas from time to time, so that none diverges unnoticed.

Between two steps each rank sends one digest to the ranks with the same number in the other replicas. If they differ,
the minority receives the majority's state. Without a majority the ranks end, and the run resumes from the newest
checkpoint up to the last agreement. Digests: state_digest.py; the decision: divergence.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

import torch

from holdfast.errors import ExitCode, HoldfastError
from holdfast.findings import Finding
from holdfast.protocol.rank_messages import CorruptionReported
from holdfast.train.checkpoint.train_state import TrainState
from holdfast.train.ft import divergence
from holdfast.train.ft.divergence import Divergence
from holdfast.train.ft.state_digest import StateDigest
from holdfast.train.ft.wrappers import shares_all_weights
from holdfast.train.session.rank_config import RankConfig
from holdfast.train.session.rank_coordinator import RankCoordinator

if TYPE_CHECKING:  # TorchFT takes time to import
    from holdfast.train.ft.replica_group import ReplicaGroup


@dataclass(frozen=True, kw_only=True)
class CheckpointTrust:
    """Tells the checkpoints which of them all replicas agreed on; all ranks of all replicas make the same calls."""

    agreed: Callable[[int], None]
    """All replicas are equal after this step."""
    set_aside_after: Callable[[int], None]
    """Checkpoints after this step may hold the state of a replica that had diverged."""


class StateVerifier:
    """One rank's part in the comparison of replicas; all ranks of all replicas make the same calls."""

    def __init__(
        self,
        config: RankConfig,
        train_state: TrainState,
        coordinator: RankCoordinator,
        replica_group: ReplicaGroup,
        trust: CheckpointTrust,
        *,
        device: torch.device,
    ) -> None:
        """`device`: of the tensors that replicas exchange."""
        self._replica = config.replica
        self._every = config.verify_every_steps
        self._sync_every = config.outer_sync.every if config.outer_sync is not None else 1
        """Steps between two moments at which replicas are equal; then only their weights are, if it is not 1."""
        self._coordinator = coordinator
        self._ranks = coordinator.ranks
        self._replica_group = replica_group
        self._trust = trust
        self._device = device
        self._digest = StateDigest(train_state.model, train_state.optimizer)
        self._ranks_are_equal = self._ranks.world_size > 1 and shares_all_weights(
            train_state.model, self._ranks.world_size
        )
        """Whether the ranks of this replica hold the same weights, unless they diverge."""
        self.agreed_step = 0
        """The last step after which all replicas were equal."""
        self.is_outlier = False
        """Whether this replica differs from the majority, and has not received its state yet."""
        self._diverged: Divergence | None = None
        """The last divergence."""

    def restored(self, step: int) -> None:
        """Training continues from a state after this step that all replicas share."""
        self.agreed_step, self.is_outlier = step, False
        self._trust.agreed(step)

    def is_due(self, step: int, total: float) -> bool:
        """Whether replicas are compared after this step: it depends on nothing else, so that all of them are."""
        if not self._every or step == 0:
            return False
        crosses = step // self._every > (step - self._sync_every) // self._every
        return crosses or step <= self._sync_every or step >= total

    def verify(self, step: int, total: float) -> bool:
        """Compare if due; False if this replica must join the others again, and then verify again.

        Raises HoldfastError if replicas differ and no majority can give its state.
        """
        if self.is_outlier and self._diverged is not None:  # all others were lost before they gave their state
            self._stop(divergence.unresolved(self._diverged, self.agreed_step))
        if not self.is_due(step, total) or self._replica_group.count == 1:
            return True
        own = self._digest.compute(weights_only=self._sync_every > 1)
        rows = self._replica_group.exchange((self._replica, own.weights ^ own.optimizer), self._device)
        if rows is None:
            return step >= total  # after the last step the others may have gone
        digests = {row[0]: row[1] for row in rows}
        if self._ranks.all(len(set(digests.values())) == 1):
            self._require_equal_ranks(step, own.weights)
            self.agreed_step = step
            self._trust.agreed(step)
            return True
        gathered = self._ranks.gather(digests)
        diverged = self._ranks.broadcast(divergence.compare(step, gathered) if gathered else None)
        assert diverged is not None
        again, self._diverged = self._diverged is not None and self._diverged.step == step, diverged
        self._trust.set_aside_after(self.agreed_step)
        if again or not diverged.has_majority:
            self._stop(divergence.unresolved(diverged, self.agreed_step))
        if self._replica in diverged.outliers:
            self.is_outlier = True
            self._report_outlier(diverged, divergence.restored(diverged, self._replica))
        self._replica_group.leave(ValueError(f"replicas differ after step {step}"))
        return False

    def _report_outlier(self, diverged: Divergence, finding: Finding) -> None:
        """Report the first rank of this replica that differs from the majority: its node is a suspect."""
        self._coordinator.report_finding(finding)
        if self._ranks.rank == diverged.outliers[self._replica][0]:
            self._coordinator.report_corruption(
                CorruptionReported(
                    step=diverged.step,
                    agreed_step=self.agreed_step,
                    quantity="weights or optimizer state",
                    certain=True,
                    continues=True,
                    finding=finding,
                )
            )

    def _require_equal_ranks(self, step: int, weights: int) -> None:
        """Raise HoldfastError if the ranks of this replica differ: then those of all others do as well."""
        if not self._ranks_are_equal or self._ranks.all(weights == self._ranks.broadcast(weights)):
            return
        digests = self._ranks.broadcast(self._ranks.gather(weights))
        self._trust.set_aside_after(self.agreed_step)
        self._stop(divergence.ranks_differ(step, self._replica, digests))

    def _stop(self, finding: Finding) -> NoReturn:
        self._coordinator.report_finding(finding, fatal=True)
        raise HoldfastError((finding,), ExitCode.CANNOT_RUN_HERE)
