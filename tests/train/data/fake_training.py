"""Training runs without a model: the samples of each committed step, over changing world sizes."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from holdfast.findings import Finding
from holdfast.train import Data
from holdfast.train.data.prefetcher import Prefetcher
from holdfast.train.data.sharding import ShardPlan


@dataclass
class FakeTraining:
    """Ranks that come and go; they save what a checkpoint stores of them."""

    ranks_of_batch: int
    samples: int = 0
    saved: list[bytes] = field(default_factory=list[bytes])
    taken: list[Any] = field(default_factory=list[Any])
    """All samples of committed steps, in order."""
    findings: list[Finding] = field(default_factory=list[Finding])

    def run(self, data: Data, *, world_size: int, steps: int, lost: int = 0) -> None:
        """An attempt with this many ranks, from the last checkpoint; the last `lost` of its steps are never saved."""
        ranks = [Prefetcher(self.findings.append) for _ in range(world_size)]
        for rank, supply in enumerate(ranks):
            if self.saved:
                supply.load_state_dict(pickle.loads(self.saved[rank if rank < len(self.saved) else 0]))
        each = [deepcopy(data) for _ in ranks]
        first = self.samples
        plans = [
            ShardPlan(
                global_batch=data.batch_size * self.ranks_of_batch,
                micro_batch_size=data.micro_batch_size,
                rank=rank,
                world_size=world_size,
            )
            for rank in range(world_size)
        ]
        for step in range(steps):
            for supply in ranks:
                supply.begin_step(plans[0].global_batch, first)
            taken = [
                sample
                for supply, data, plan in zip(ranks, each, plans, strict=True)
                for part in plan.step(first)
                for sample in supply.load(part, data, plan, first).data
                if part.loss_scale
            ]
            first += plans[0].global_batch
            if step < steps - lost:
                self.taken += taken
                self.samples = first
                self.saved = [pickle.dumps(supply.state_dict()) for supply in ranks]

    def codes(self) -> set[str]:
        return {finding.code for finding in self.findings}


def as_they_are(items: Sequence[Any]) -> list[Any]:
    """A collate function."""
    return list(items)
