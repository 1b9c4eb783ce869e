"""Runs for programs: start one, or find it again, and wait for it, from a notebook, a workflow engine or a script.

from holdfast import runs

run = runs.start(command=("python", "train.py"), on="lab", nodes=2, name="night", if_exists="attach")
print(run.id, run.status().phase)
code = run.wait()
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from msgspec import Struct

from holdfast import api
from holdfast.diagnose.diagnosis import Diagnosis
from holdfast.errors import ExitCode, failure
from holdfast.events import AnyEvent, RunFinished
from holdfast.job.target_files import LOCAL
from holdfast.report.run_status import RunStatus
from holdfast.report.status_reducer import read_status
from holdfast.run_dir import RunDir


class Run(Struct, frozen=True):
    """One run; all methods raise HoldfastError if its folder cannot be read."""

    folder: RunDir

    @property
    def id(self) -> str:
        """Its id, such as `night-k3m9tz`."""
        return self.folder.run_id

    def status(self) -> RunStatus:
        """What is known of it now: phase, nodes, ranks, step, findings."""
        return read_status(self.folder)

    def events(self) -> Iterator[AnyEvent]:
        """Every event from its first to its last; it waits for those to come."""
        return (event for event in api.follow(self.folder) if event is not None)

    def wait(self, timeout_s: float | None = None) -> int:
        """Wait for its end and return its exit code; raises TimeoutError. A controller that has died is restarted."""
        api.restart_controller(self.folder)
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        for event in api.follow(self.folder):
            if isinstance(event, RunFinished):
                return event.exit_code
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(f"{self.id} has not ended within {timeout_s:g} s")
        raise failure(
            "run-interrupted",
            f"{self.id} has no controller and did not end",
            exit_code=ExitCode.UNAVAILABLE,
            where=self.id,
            remedy=f"`holdfast attach {self.id}` restarts it.",
        )

    def logs(self, rank: int = 0) -> str:
        """What a rank has written so far, in all attempts, oldest first."""
        paths = self.folder.logs.glob(f"*attempt-*/rank-{rank}.log")
        oldest_first = sorted(paths, key=lambda path: int(path.parent.name.rpartition("-")[2]))
        return "".join(path.read_text(errors="replace") for path in oldest_first)

    def resume(
        self,
        *,
        on: str | None = None,
        nodes: int | str | None = None,
        overrides: Sequence[str] = (),
        if_exists: str = api.IfExists.START,
    ) -> Run:
        """Continue this run, which is over, from its newest checkpoint as a new one, by default on its own target.

        Job and code are this run's; `nodes` and `overrides` change fields of the job. Raises HoldfastError with all
        that cannot move.
        """
        folder = api.resume(self.folder, on, nodes=nodes, overrides=overrides, if_exists=api.IfExists(if_exists))
        return Run(folder)

    def diagnose(self) -> Diagnosis:
        """What failed first in its last failed attempt, on which rank, with the evidence and what to do."""
        return api.diagnose_run(self.folder)

    def cancel(self, *, force: bool = False) -> None:
        """End it: SIGTERM and the grace period of the job, or SIGKILL with `force`."""
        api.cancel(self.folder, force=force, requested_by="Python")


def start(
    file: Path | None = None,
    *,
    command: Sequence[str] = (),
    on: str = LOCAL,
    base: Path | None = None,
    name: str | None = None,
    nodes: int | str | None = None,
    gpus_per_node: int | None = None,
    ranks_per_node: int | None = None,
    overrides: Sequence[str] = (),
    if_exists: str = api.IfExists.START,
) -> Run:
    """Start the job of a file, or of a command, on a target, and return as soon as the run is accepted.

    `base` is the folder that the job's relative paths start from: by default the file's, or the current one.
    `overrides` are those of `--set`, such as `recovery.max_restarts=3`. `if_exists` says what follows if there is a run
    of this name on the target that has not failed: `start` another, `attach` to it, or `refuse`. Of several callers
    at a time one starts the run. Raises HoldfastError with every problem.
    """
    loaded = api.load(
        file,
        command=command,
        overrides=overrides,
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        ranks_per_node=ranks_per_node,
        name=name,
    )
    folder = base or (file.parent if file else Path())
    return Run(api.start(loaded, on, base=folder, if_exists=api.IfExists(if_exists)))


def find(run: str | None = None, *, on: str = LOCAL, base: Path | None = None) -> Run:
    """The run whose id begins with `run`, or the newest of that job name; without it the newest of all.

    Raises HoldfastError if there is none, or if it could be several.
    """
    return Run(api.find_run(run, on, base=base or Path()))
