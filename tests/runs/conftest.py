"""Real runs of a small program, watched through their event log; anything left of a run fails its test."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

import pytest
from tests.runs.forked_starts import FORKABLE
from tests.runs.target_fixtures import cluster, hosts, slurm, slurm_24_11, slurm_26_05
from tests.waiting import until

from holdfast import api
from holdfast.errors import HoldfastError
from holdfast.events import AnyEvent, FaultAction, FaultTarget, FindingRaised, RunFinished, StepCommitted
from holdfast.host.processes import all_pids, by_env, by_env_prefix, command_line, kill_all
from holdfast.job.spec import Job
from holdfast.launch.local import netns
from holdfast.run_dir import RunDir

TORCH_FREE_TRAINER = Path(__file__).parents[1] / "programs" / "torch_free_trainer.py"
DEADLINE_S = 200.0
FAST_FILES = ("test_launch.py",)
"""The files whose runs take a second or two; those of all others are marked `slow`."""

PREWARMED = "recovery.prewarm=true"
"""The default of jobs, but not of test runs: a zygote imports torch once more, for 3 s of CPU time per rank."""

STEP_CLOCK = ("watch.step_clock=true",)
"""The default of jobs, but not of test runs: a rank with another PYTHONPATH cannot be forked."""

STARTED_BY_EXEC = (
    *("test_hangs.py", "test_standstill.py"),  # py-spy would show the parents' frames below a rank's own
    *("test_connection_flood.py", "test_memory_limit.py", "test_resource_faults.py"),  # limits of memory, descriptors
    *("test_launch.py", "test_launch_modes.py", "test_prewarm.py", "test_step_clock.py"),  # the start itself
    *("test_secret_exposure.py", "test_slurm_controller.py"),
    "test_launchers.py::test_ranks_of_two_nodes_reduce_together",  # once with each launcher as users have it
    # a rank's fork would have the clock that the drill has moved in its agent
    "test_network_faults.py::test_clocks_that_jump_by_hours_move_no_deadline_and_are_told",
)
"""Files and tests whose runs start every process as users do; in all others they are forks, which saves the imports."""

NCCL_LIKE = "env.NCCL_LIKE=1"
"""Makes a program's ranks, or its replicas, communicate by a group that fails like NCCL (programs/nccl_like.py)."""

__all__ = ["cluster", "hosts", "slurm", "slurm_24_11", "slurm_26_05"]

E = TypeVar("E", bound=AnyEvent)


@pytest.hookimpl(tryfirst=True)  # tests/conftest.py gives slow tests another deadline and runs them last
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == Path(__file__).parent and item.path.name not in FAST_FILES:
            item.add_marker(pytest.mark.slow)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A failed test shows what its runs did: what depends on load is seldom seen a second time."""
    report = yield
    if report.when == "call" and report.failed:
        made = next((each for each in getattr(item, "funcargs", {}).values() if isinstance(each, Runs)), None)
        for watched in made.watched if made else ():
            report.sections.append((f"run {watched.folder.run_id}", watched.history()))
    return report


@dataclass
class WatchedRun:
    """A started run and its log so far."""

    folder: RunDir
    seen: list[AnyEvent] = field(default_factory=list[AnyEvent])

    def __post_init__(self) -> None:
        self._events = api.follow(self.folder)

    def wait_for(self, kind: type[E], which: Callable[[E], bool] = lambda _: True, within_s: float = DEADLINE_S) -> E:
        """Read to the next event of a kind; fail when it does not come."""
        deadline = time.monotonic() + within_s
        for event in self._events:
            if event is not None:
                self.seen.append(event)
            if isinstance(event, RunFinished):
                until(
                    lambda: not self.folder.alive()
                )  # its supervisor cleans up after it, for longer on a busy machine
            if isinstance(event, kind) and which(event):
                return event
            if time.monotonic() > deadline:
                raise AssertionError(
                    f"no {kind.__name__} within {within_s:g} s after {self._latest()}\n{self._said()}\n{self._stacks()}"
                )
        raise AssertionError(f"the run ended without {kind.__name__}: {self._latest()}")

    def until(self, reached: Callable[[], object], what: str = "") -> None:
        """Wait for a condition; fail with what the run's processes do when it does not come true."""
        try:
            until(reached, what)
        except AssertionError as error:
            raise AssertionError(f"{what}\n{self._said()}\n{self._stacks()}") from error

    def _said(self) -> str:
        """The last lines of every rank, for a failed test."""
        logs = sorted(self.folder.logs.rglob("*.log"))
        return "\n".join(f"{log.parent.name}/{log.name}: {log.read_text(errors='replace')[-1000:]}" for log in logs)

    def _stacks(self) -> str:
        """What the run's processes do, for a failed test."""
        dump = ("timeout", "20", "py-spy", "dump", "--native", "--pid")  # a stopped process would never end it
        dumps = [[*dump, str(pid)] for pid in processes_of(self.folder)]
        return "\n".join(subprocess.run(each, capture_output=True, text=True, check=False).stdout for each in dumps)

    def _latest(self) -> list[AnyEvent]:
        """The last step and the last other events."""
        return [*self.all(StepCommitted)[-1:], *(each for each in self.seen if not isinstance(each, StepCommitted))][
            -9:
        ]

    def history(self) -> str:
        """Its events but for steps, and the last lines that its controller and agents logged."""
        events = [f"{event}"[:400] for event in self.seen if not isinstance(event, StepCommitted)]
        logs = [log for log in sorted(self.folder.path.rglob("*.log")) if not log.is_relative_to(self.folder.logs)]
        lines = [f"{log.name}: {line}" for log in logs for line in log.read_text(errors="replace").splitlines()[-15:]]
        return "\n".join((*events[-60:], *lines))

    def first(self, kind: type[E], which: Callable[[E], bool] = lambda _: True) -> E:
        """The first event of a kind, already read or still to come."""
        return next((event for event in self.all(kind) if which(event)), None) or self.wait_for(kind, which)

    def wait_for_end(self, within_s: float = DEADLINE_S) -> RunFinished:
        """Read to the end."""
        return self.wait_for(RunFinished, within_s=within_s)

    def all(self, kind: type[E]) -> list[E]:
        """Every event of a kind so far."""
        return [event for event in self.seen if isinstance(event, kind)]

    def codes(self) -> list[str]:
        """The codes of findings so far, without that steps take longer: other processes of this machine cause that."""
        return [code for event in self.all(FindingRaised) if (code := event.finding.code) != "run-slow"]

    def drill(
        self,
        target: FaultTarget,
        index: int,
        action: FaultAction,
        at_step: int | None = None,
        *,
        for_s: float | None = None,
        amount: float | None = None,
    ) -> None:
        api.inject_fault(
            self.folder, target=target, index=index, action=action, at_step=at_step, for_s=for_s, amount=amount
        )

    def steps(self) -> list[int]:
        """Every step that was committed, as often as it was; one line of the log may stand for several."""
        return [
            step for event in self.all(StepCommitted) for step in range(event.step - event.steps + 1, event.step + 1)
        ]

    def log(self, rank: int, attempt: int = 0, replica: int = 0, replicas: int = 1) -> str:
        return self.folder.rank_log(attempt, rank, replica, replicas).read_text()


def steps_done(watched: WatchedRun, checkpoints: Path | None = None) -> list[int]:
    """Step numbers finished by a full set of ranks, from the ranks' own records.

    The log lacks those that a machine had not reported when it was lost.
    """
    folder = checkpoints or watched.folder.checkpoints
    notes = [{tuple(line.split()[:2]) for line in (folder / f"steps-{rank}.txt").open()} for rank in (0, 1)]
    return sorted({int(step) for _, step in notes[0] & notes[1]})


class Runs:
    """Starts runs and cleans up at the end of the test."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.watched: list[WatchedRun] = []

    def start(
        self, *command: str, nodes: int = 2, target: str = "local", overrides: tuple[str, ...] = ()
    ) -> WatchedRun:
        overrides = (*FORKABLE, *overrides)
        job: Job = api.load_job(None, command=command, nodes=nodes, name="test", overrides=overrides)
        return self.watch(api.start(job, target, base=self.base))

    def watch(self, folder: RunDir) -> WatchedRun:
        """Watch a run, and clean up after it."""
        watched = WatchedRun(folder)
        self.watched.append(watched)
        return watched

    def steps(
        self,
        count: int,
        step_s: float = 0.01,
        fault: str = "",
        *,
        target: str = "local",
        overrides: tuple[str, ...] = (),
    ) -> WatchedRun:
        """Run the stepper (tests/programs/torch_free_trainer.py)."""
        faults = (fault,) if fault else ()
        command = (sys.executable, str(TORCH_FREE_TRAINER), str(count), str(step_s), *faults)
        return self.start(*command, target=target, overrides=overrides)

    def close(self) -> None:
        for watched in self.watched:
            if not api.is_finished(watched.folder):
                api.restart_controller(watched.folder)
                _cancel(watched.folder)
                watched.wait_for_end()
            assert leftovers_of(watched.folder) == []

    def left_on_hosts(self) -> list[str]:
        """Command lines of processes of these runs' nodes, whichever machine's they are."""
        runs = [watched.folder.run_id for watched in self.watched]
        return [command_line(pid) for run in runs for pid in by_env_prefix(all_pids(), HOLDFAST_NODE=f"{run}/")]

    def kill(self) -> None:
        """Kill everything that a failed test has left, so that it does not disturb the next."""
        for watched in self.watched:
            kill_all(partial(processes_of, watched.folder), within_s=10.0)


def _cancel(folder: RunDir) -> None:
    """Cancel a run whose controller may be starting, or slow on a busy machine."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        try:
            api.cancel(folder, force=True)
            return
        except HoldfastError:
            if api.is_finished(folder):
                return
            if time.monotonic() > deadline:
                raise


def processes_of(folder: RunDir) -> list[int]:
    """Every process of a run: its ranks by their mark, those of holdfast by the directory in their arguments."""
    own = [pid for pid in all_pids() if f"{folder.path}".encode() in _argv(pid) and pid != os.getpid()]
    return [*own, *by_env(all_pids(), HOLDFAST_RUN=folder.run_id)]


def leftovers_of(folder: RunDir) -> list[str]:
    """What a run leaves besides its directory: processes, and with them their ports, sockets, secrets."""
    processes = processes_of(folder)
    private = [path for path in (folder.secrets, folder.control_socket) if path.exists()]
    return [*(f"process {pid}: {_argv(pid)!r}" for pid in processes), *map(str, private)]


def _argv(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


@pytest.fixture(autouse=True)
def fork_runs(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fork what the runs of a test start, unless it needs real starts."""
    file = request.path.name
    if not {file, f"{file}::{request.function.__name__}"}.isdisjoint(STARTED_BY_EXEC):
        yield
        return
    with request.getfixturevalue("forked_starts").used():
        yield


@pytest.fixture
def isolated_runs(runs: Runs) -> Runs:
    """Runs on the target `apart`, where each node has a separate network."""
    if reason := netns.unavailable():
        pytest.skip(f"needs network namespaces: {reason}")
    targets = runs.base / ".holdfast" / "targets"
    targets.mkdir(parents=True)
    (targets / "apart.yaml").write_text("kind: local\nisolation: netns\n")
    return runs


@pytest.fixture
def runs(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Runs]:
    # A separate directory, so that other tests' files do not count as leftovers of this one.
    short = tempfile.mkdtemp(prefix="t")
    monkeypatch.setenv("TMPDIR", short)
    tempfile.tempdir = None
    made = Runs(tmp_path)
    try:
        yield made
        made.close()
        assert [name for name in os.listdir(short) if name.startswith("holdfast")] == []
    finally:
        made.kill()
        tempfile.tempdir = None
        shutil.rmtree(short)
