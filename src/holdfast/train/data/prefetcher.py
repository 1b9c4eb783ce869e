"""Prefetches a session's data and keeps the data state that checkpoints save."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from holdfast.errors import ExitCode, failure
from holdfast.findings import Finding, Severity
from holdfast.train.data.elastic_data import Data
from holdfast.train.data.iterable import ResumePoint, StreamBatch
from holdfast.train.data.sharding import Batch, MicroBatch, ShardPlan

ReportFinding = Callable[[Finding], None]


class Prefetcher:
    """Loads the data of each micro-batch; its saved state is the same on all ranks, at any world size."""

    def __init__(self, report: ReportFinding) -> None:
        self._report = report
        self._data: Data | None = None
        self._ahead: Iterator[tuple[MicroBatch, Any]] = iter(())
        self._identity: Mapping[str, object] = {}
        """Identity of the data of the newest step or of the checkpoint; empty before either."""
        self._global_batch = 0
        self._resumed = False
        self._resume_point: ResumePoint | None = None

    def state_dict(self) -> dict[str, Any]:
        """The data's identity, and a point to resume reading from."""
        resume_point = None if self._resume_point is None else tuple(self._resume_point)
        return {"identity": dict(self._identity), "global_batch": self._global_batch, "resume_point": resume_point}

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        """Keep the state until the loop passes its data."""
        resume_point = state["resume_point"]
        self._identity, self._global_batch = state["identity"], state["global_batch"]
        self._resume_point = None if resume_point is None else ResumePoint(*resume_point)
        self._resumed = True

    def begin_step(self, global_batch: int, first: int) -> None:
        """Begin a step at sample `first`; reports a global batch that differs from the checkpoint's."""
        if self._resumed and self._global_batch not in {0, global_batch}:
            self._report(_global_batch_changed(self._global_batch, global_batch, first))
        self._global_batch, self._resumed = global_batch, False

    def load(self, part: MicroBatch, data: Data, plan: ShardPlan, first: int) -> Batch:
        """The micro-batch `part`, with its data, of the step whose first sample is `first`."""
        following, made = next(self._ahead) if data is self._data else (None, None)
        if following != part:  # In the first step, and after a loop left a step early.
            self._open(data, plan, first)
            made = next(made for following, made in self._ahead if following == part)
        if isinstance(made, StreamBatch):
            self._resume_point = made.resume_point or self._resume_point
            for finding in made.findings:
                self._report(finding)
            made = made.data
        return Batch(samples=part.samples, loss_scale=part.loss_scale, is_last=part.is_last, data=made)

    def _open(self, data: Data, plan: ShardPlan, first: int) -> None:
        if data is not self._data:
            self._switch_to(data, first)
        self._ahead = zip(plan.steps_from(first), data.read(plan, first, self._resume_point), strict=False)

    def _switch_to(self, data: Data, first: int) -> None:
        """Read this data from here on, if it continues the data so far or begins here."""
        identity = data.identity()
        if data.start_sample > first:
            raise failure(
                "data-starts-at-offset",
                f"the data begins with sample {data.start_sample}, and the next to be taken is {first}",
                exit_code=ExitCode.USAGE,
                where=f"start_sample={data.start_sample}",
                remedy=f"give the data that comes before, or Data(..., start_sample={first})",
            )
        changed = [name for name, value in self._identity.items() if identity.get(name) != value]
        if changed and data.start_sample != first:
            raise failure(
                "data-changed",
                f"the data is not what the first {first} samples of this training were taken from",
                exit_code=ExitCode.CANNOT_RUN_HERE,
                where=", ".join(changed),
                evidence=tuple(f"{name}: was {self._identity[name]}, is {identity.get(name)}" for name in changed),
                remedy=f"pass the data of before, or start other data here on purpose: Data(..., start_sample={first})",
            )
        if changed:
            self._resume_point = None
            self._report(_data_replaced(first, changed))
        self._data, self._identity = data, identity
        for finding in data.findings:
            self._report(finding)


def _data_replaced(first: int, changed: list[str]) -> Finding:
    return Finding(
        code="data-restarted",
        severity=Severity.INFO,
        what=f"other data begins at sample {first}, as requested",
        evidence=(f"changed: {', '.join(changed)}",),
    )


def _global_batch_changed(was: int, now: int, first: int) -> Finding:
    return Finding(
        code="global-batch-changed",
        severity=Severity.WARNING,
        what=f"a step took {was} samples, and takes {now} from sample {first} on",
        remedy="each sample is still taken once; look at the learning rate and at how many steps are left",
    )
