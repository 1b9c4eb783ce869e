"""Defects of a training program that an acceptance has to find: python acceptance_defects.py DEFECT [OPTIONS]."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch

from holdfast.train import Session
from holdfast.train.acceptance_program import Training, loaded, parse
from holdfast.train.data.sharding import MicroBatch
from holdfast.train.session.rank_config import RankConfig

RANK = int(os.environ.get("RANK", "0"))
SLOWER = 3.0


class LosesOptimizer(Training):
    """Resumes without the optimizer's state."""

    def session(self) -> Session:
        made = super().session()
        if made.step:
            self.optimizer.state.clear()
        return made


class LosesRandomState(Training):
    """Seeds its random numbers again after a restart."""

    def session(self) -> Session:
        made = super().session()
        if made.step:
            torch.manual_seed(1 + RANK)
        return made


class LosesDataPosition(Training):
    """Reads its data from the beginning after a restart."""

    def session(self) -> Session:
        made = super().session()
        self._skipped = made.step * self.batch * self.world_size
        return made

    def load(self, parts: Iterable[MicroBatch]) -> Iterator[tuple[MicroBatch, torch.Tensor]]:
        for part in parts:
            first = range(part.samples[0] - self._skipped, part.samples[-1] - self._skipped + 1)
            yield from loaded([replace(part, samples=first)])


class IgnoresCheckpoints(Training):
    """Begins at step 1 after a restart, whatever was saved."""

    def session(self) -> Session:
        config = replace(RankConfig.from_env(), checkpoint_path=None)
        return Session(model=self.model, optimizer=self.optimizer, scheduler=self.scheduler, config=config)


class RefusesToStartAgain(Training):
    """Leaves a lock file that nothing removes after a failure."""

    def __init__(self, *given: object) -> None:
        if RANK == 0:
            Path("training.lock").touch(exist_ok=False)
        super().__init__(*given)  # pyright: ignore[reportArgumentType]


class SlowRank(Training):
    """Computes slowly on its second rank."""

    def before_step(self, step: int) -> None:
        if RANK == 1:
            self._slow = self.model.register_forward_pre_hook(lambda *_: time.sleep(0.25)) if step == 1 else self._slow


class SlowLoader(Training):
    """Has a source of data that is slower with several readers."""

    def load(self, parts: Iterable[MicroBatch]) -> Iterator[tuple[MicroBatch, torch.Tensor]]:
        for each in loaded(parts):
            time.sleep(0.25 if self.world_size > 1 else 0.0)
            yield each


DEFECTS: Mapping[str, Callable[..., Training]] = {
    "optimizer": LosesOptimizer,
    "random": LosesRandomState,
    "position": LosesDataPosition,
    "ignored": IgnoresCheckpoints,
    "lock": RefusesToStartAgain,
    "slow-rank": SlowRank,
    "slow-loader": SlowLoader,
}

if __name__ == "__main__":
    DEFECTS[sys.argv[1]](parse(sys.argv[2:])).run()
