"""Owns where a session's loop stands in its data: the data it reads ahead, and what checkpoints know of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from holdfast.errors import ExitCode, failure
from holdfast.findings import Finding, Severity
from holdfast.train.batches import Batch, MicroBatch, Plan
from holdfast.train.data.data import Data
from holdfast.train.data.stream import Filled, Mark

Tell = Callable[[Finding], None]


class Supply:
    """Gives each micro-batch its data; what it has to save is the same on all ranks, whatever their number."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self._data: Data | None = None
        self._ahead: Iterator[tuple[MicroBatch, Any]] = iter(())
        self._identity: Mapping[str, object] = {}
        """Of the data that the newest step took, or that the checkpoint was taken of; nothing is known without."""
        self._global_batch = 0
        self._resumed = False
        self._mark: Mark | None = None

    def state_dict(self) -> dict[str, Any]:
        """What the data is, and a place in it to read on from."""
        mark = None if self._mark is None else tuple(self._mark)
        return {"identity": dict(self._identity), "global_batch": self._global_batch, "mark": mark}

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        """Keep it until the loop says what its data is."""
        mark = state["mark"]
        self._identity, self._global_batch = state["identity"], state["global_batch"]
        self._mark = None if mark is None else Mark(*mark)
        self._resumed = True

    def begin(self, global_batch: int, first: int) -> None:
        """A step of so many samples begins with sample `first`; says so if the checkpoint knew another number."""
        if self._resumed and self._global_batch not in {0, global_batch}:
            self._tell(_resized(self._global_batch, global_batch, first))
        self._global_batch, self._resumed = global_batch, False

    def fill(self, part: MicroBatch, data: Data, plan: Plan, first: int) -> Batch:
        """The micro-batch `part` of the step that begins with sample `first`, with its data."""
        following, made = next(self._ahead) if data is self._data else (None, None)
        if following != part:  # In the first step, and where a loop left a step before its end.
            self._open(data, plan, first)
            made = next(made for following, made in self._ahead if following == part)
        if isinstance(made, Filled):
            self._mark = made.mark or self._mark
            for finding in made.noticed:
                self._tell(finding)
            made = made.data
        return Batch(samples=part.samples, weight=part.weight, last=part.last, data=made)

    def _open(self, data: Data, plan: Plan, first: int) -> None:
        if data is not self._data:
            self._accept(data, first)
        self._ahead = zip(plan.onwards(first), data.read(plan, first, self._mark), strict=False)

    def _accept(self, data: Data, first: int) -> None:
        """Take this data from here on, if it goes on with what was taken so far or begins here."""
        identity = data.identity()
        if data.first > first:
            raise failure(
                "data-begins-later",
                f"the data begins with sample {data.first}, and the next to be taken is {first}",
                exit_code=ExitCode.USAGE,
                where=f"first={data.first}",
                remedy=f"give the data that comes before, or Data(..., first={first})",
            )
        changed = [name for name, value in self._identity.items() if identity.get(name) != value]
        if changed and data.first != first:
            raise failure(
                "data-changed",
                f"the data is not what the first {first} samples of this training were taken from",
                exit_code=ExitCode.IMPOSSIBLE,
                where=", ".join(changed),
                evidence=tuple(f"{name}: was {self._identity[name]}, is {identity.get(name)}" for name in changed),
                remedy=f"give the data as it was, or let other data begin here on purpose: Data(..., first={first})",
            )
        if changed:
            self._mark = None
            self._tell(_began(first, changed))
        self._data, self._identity = data, identity
        for finding in data.noticed:
            self._tell(finding)


def _began(first: int, changed: list[str]) -> Finding:
    return Finding(
        code="data-began",
        severity=Severity.INFO,
        what=f"other data begins at sample {first}, as asked",
        evidence=(f"changed: {', '.join(changed)}",),
    )


def _resized(was: int, now: int, first: int) -> Finding:
    return Finding(
        code="global-batch-changed",
        severity=Severity.WARNING,
        what=f"a step took {was} samples, and takes {now} from sample {first} on",
        remedy="each sample is still taken once; look at the learning rate and at how many steps are left",
    )
