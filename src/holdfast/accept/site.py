"""Starts the runs of acceptance checks on a target, and observes them."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import cached_property
from pathlib import Path

from msgspec import Struct

from holdfast import api
from holdfast.accept.agreement import Agreement
from holdfast.errors import ExitCode, HoldfastError, failure
from holdfast.events import AnyEvent, FindingRaised, Outcome, RunFinished, StepCommitted
from holdfast.fabric.catalog import NAMES
from holdfast.findings import Finding
from holdfast.job.loader import LoadedJob, validate_data
from holdfast.job.target_files import LOCAL
from holdfast.job.targets import TargetSpec
from holdfast.launch.target_machines import MachineState
from holdfast.report.run_record import RunRecord, record_run
from holdfast.report.run_status import RunStatus
from holdfast.run_dir import RunDir

PROGRAM = ("-m", "holdfast.train.acceptance_program")
USABLE = (MachineState.FREE, MachineState.USED)
LEAVE_S = 30.0
"""Seconds that a cancelled run gets to end."""


class ObservedRun(Struct, frozen=True, dict=True):
    """A run that is over, or was ended at its deadline."""

    folder: RunDir
    events: tuple[AnyEvent, ...]
    deadline_s: float | None = None
    """The deadline, if the run was ended at it."""

    @cached_property
    def record(self) -> RunRecord:
        """What a report shows of it."""
        return record_run(self.events, self.folder.run_id)

    @property
    def status(self) -> RunStatus:
        """Its status at the end."""
        return self.record.status

    @property
    def steps(self) -> list[StepCommitted]:
        """Committed steps, oldest first."""
        return [event for event in self.events if isinstance(event, StepCommitted)]

    @property
    def problem(self) -> Finding | None:
        """Why it did not succeed; None if it did."""
        finished = next((event for event in self.events if isinstance(event, RunFinished)), None)
        if finished is not None and finished.outcome is Outcome.SUCCEEDED and self.deadline_s is None:
            return None
        known = self.status.history.end or next(reversed(self.status.findings), None)
        ended = "did not end in time" if self.deadline_s is not None else f"failed: {self.status.reason}"
        late = (f"it was ended after {self.deadline_s:g} s",) if self.deadline_s is not None else ()
        said = (f"{known.code}: {known.what}", *known.evidence[:6]) if known else ()
        return Finding(
            code="acceptance-run-failed",
            what=f"the run {self.folder.run_id} {ended}",
            where=self.folder.run_id,
            evidence=(*late, *said),
            remedy=(known.remedy if known and known.remedy else "")
            or f"`holdfast diagnose {self.folder.run_id}` names the cause.",
        )

    def raised(self, *codes: str) -> Finding | None:
        """The first finding of the run with a code that begins with one of these."""
        found = (event.finding for event in self.events if isinstance(event, FindingRaised))
        return next((each for each in found if each.code.startswith(codes)), None)


class Site(Struct, frozen=True, kw_only=True, dict=True):
    """A target under acceptance."""

    target: str
    spec: TargetSpec
    base: Path
    """Folder from which jobs start, and targets are looked up."""
    folder: Path
    """Private folder of this acceptance."""
    agreement: Agreement
    log: Callable[[str], object]
    """Receives a line of progress."""

    @property
    def is_one_machine(self) -> bool:
        """Whether all nodes are on this machine."""
        return self.spec.kind == LOCAL

    @property
    def shares_machine(self) -> bool:
        """Whether nodes share CPUs."""
        return self.is_one_machine or self.agreement.shares_machine

    @property
    def cpus(self) -> int:
        """CPUs of this machine that holdfast may use."""
        return len(os.sched_getaffinity(0))

    @cached_property
    def nodes(self) -> int:
        """Nodes that checks use: as agreed, else all machines of the target, or two CPUs of this one."""
        if self.agreement.nodes is not None:
            return self.agreement.nodes
        if self.is_one_machine:
            return min(2, self.cpus)
        found = api.machines(self.target, base=self.base)
        usable = [each.name for each in found.machines if each.state in USABLE]
        if not usable:
            raise failure(
                "no-usable-machine",
                f"none of the {len(found.machines)} machines of {self.target} that this user may list can be used",
                exit_code=ExitCode.CANNOT_RUN_HERE,
                where=self.target,
                evidence=tuple(each.what for each in found.findings),
                remedy=f"`holdfast nodes --on {self.target}` shows why; or set `nodes` in the agreement.",
            )
        return len(usable)

    def program(self, *options: str) -> tuple[str, ...]:
        """Command of the training: the agreed one, or holdfast's."""
        return (*(self.agreement.program or (self.python, *PROGRAM)), *options)

    @property
    def python(self) -> str:
        """The Python that ranks use: this one, where ranks run on machines that have it."""
        return sys.executable if self.spec.kind in (LOCAL, "slurm") else "python"

    def job(self, name: str, command: Sequence[str], nodes: int, fields: Mapping[str, object]) -> LoadedJob:
        """A job with the agreed fields; `fields` are set in it as by `--set`."""
        data = {**self.agreement.job, "name": f"accept-{name}", "command": list(command), "nodes": nodes}
        overrides = [f"{field}={value}" for field, value in fields.items()]
        return validate_data(data, overrides, NAMES).loaded_or_raise()

    def start(self, name: str, command: Sequence[str], *, nodes: int, **fields: object) -> RunDir:
        """Start a run; fields of groups are written as `checkpoint__every_steps=5`."""
        dotted = {field.replace("__", "."): value for field, value in fields.items()}
        return api.start(self.job(name, command, nodes, dotted), self.target, base=self.base)

    def observe(
        self, run: RunDir, *, deadline_s: float, on_event: Callable[[AnyEvent], object] | None = None
    ) -> ObservedRun:
        """Follow a run until it is over; it is ended at the deadline."""
        found: list[AnyEvent] = []
        ends_at = time.monotonic() + deadline_s
        ended_at: float | None = None
        with self.ended_on_error(run):
            for event in api.follow(run):
                if event is not None:
                    found.append(event)
                    if on_event is not None:
                        on_event(event)
                now = time.monotonic()
                if ended_at is None and now > ends_at:
                    ended_at = now
                    _end(run)
                if ended_at is not None and now > ended_at + LEAVE_S:
                    break
        return ObservedRun(run, tuple(found), deadline_s if ended_at is not None else None)

    @contextlib.contextmanager
    def ended(self, run: RunDir) -> Generator[None]:
        """Ends a run after the block, and waits until it has left its nodes."""
        try:
            yield
        finally:
            _end(run)
            self.observe(run, deadline_s=LEAVE_S)

    def await_step(self, run: RunDir, *, deadline_s: float) -> None:
        """Wait until a run has committed a step, is over, or the deadline has passed."""
        ends_at = time.monotonic() + deadline_s
        for event in api.follow(run):
            if isinstance(event, StepCommitted) or time.monotonic() > ends_at:
                return

    @contextlib.contextmanager
    def ended_on_error(self, run: RunDir) -> Generator[None]:
        """Ends a run if the block fails or is interrupted, so that it does not keep nodes."""
        try:
            yield
        except BaseException:
            _end(run)
            raise


def _end(run: RunDir) -> None:
    with contextlib.suppress(HoldfastError, OSError):  # it has ended, or its controller does not answer
        api.cancel(run, force=True, requested_by="holdfast accept")
