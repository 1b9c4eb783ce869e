"""Owns what becomes of a checkpoint that a framework's loop has saved: it is sealed beside the steps, and told of.

The same for every framework. Refuses to own when one is saved and what it holds (the callbacks), and the seal
(shelf.py).
"""

from __future__ import annotations

import time

from holdfast.train.configured import Configured
from holdfast.train.liaison import Liaison
from holdfast.train.shelf import Sealed, Shelf
from holdfast.train.tenure import REFUSALS, error_of


class Sealer:
    """The seals of one rank's loop; all ranks make the same calls after a step."""

    def __init__(self, liaison: Liaison, shelf: Shelf) -> None:
        """Raises HoldfastError, on all ranks, where another live run has the folder."""
        self._liaison = liaison
        self._shelf = shelf
        self.configured: Configured | None = None
        """What the program says beside model and data, once that is known; it is noted in each seal."""
        liaison.ranks.on_first(shelf.take_over)
        self._aside = liaison.ranks.aside()

    def begin(self, step: int, *, began: float) -> None:
        """Seal what the framework has written since `began` (monotonic), for which the loop stood still."""
        self._liaison.saving()
        self._liaison.waited(time.monotonic() - began)
        self._shelf.begin(step, self._aside, began=began, node_s=self._liaison.node_s, configured=self.configured)

    def look(self) -> None:
        """Tell of the last one as soon as it is known what came of it."""
        self._tell(self._shelf.finished(), must=False)

    def finish(self, *, must: bool = False) -> None:
        """Wait for it, before the next is written or the loop ends; raises HoldfastError where it `must` be sealed."""
        began = time.monotonic()
        sealed = self._shelf.finish()
        self._liaison.waited(time.monotonic() - began)
        self._tell(sealed, must=must)

    def _tell(self, sealed: Sealed | None, *, must: bool) -> None:
        if sealed is None:
            return
        if sealed.problem is None:
            self._liaison.committed(sealed.step, sealed.path, took_s=sealed.took_s)
            return
        ends = must or sealed.problem.code in REFUSALS
        self._liaison.found(sealed.problem, ends=ends)
        if ends:
            raise error_of(sealed.problem)
