"""Owns replicas that step alone and meet every so many steps: TorchFT's LocalSGD and DiLoCo, in the unchanged loop.

A step counts for the replica that takes it. When they meet, at the end of a step, all come to the same parameters; one
that is new, or was lost, takes another's state there, and takes part at once. Refuses to own how they meet (peers.py).
"""

from __future__ import annotations

from collections.abc import Callable

from holdfast.train.environment import Environment
from holdfast.train.liaison import Liaison
from holdfast.train.replicas import Joined, Standing
from holdfast.train.training import Training


class Apart(Joined):
    """One replica of several that meet now and then."""

    def __init__(
        self, told: Environment, training: Training, liaison: Liaison, *, resume: Callable[[], Standing]
    ) -> None:
        from holdfast.train.merging import Merging  # as with peers.py

        def resumed() -> Standing:
            standing = resume()
            self._merging.anew()
            return standing

        super().__init__(told, training, liaison, resume=resumed)
        assert told.sync is not None
        self._every = told.sync.every
        self._merging = Merging(told.sync, self._peers, training.model, training.optimizer)
        self._met = False

    def begin(self, standing: Standing, *, ended: bool) -> Standing:
        return standing if self._met else self._together(standing)

    def expect(self, *, last: bool) -> None:
        self._sync.set(enabled=last and self._inner)

    def settle(self, after: Standing) -> Standing | None:
        return after if after.step % self._every else self._together(after)

    def _together(self, standing: Standing) -> Standing:
        """Meet, and merge what all have come to; again where one of them was lost meanwhile."""
        self._meet(standing)
        while not self._merging.merge():
            self._meet(self._standing)
        self._met = True
        return self._standing
