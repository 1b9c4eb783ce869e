"""What a run survives, the same on every target; launch/target_features.py has what a target cannot do, and why.

The cases of a target share one run, which goes from fault to fault; after a case that failed, the next has another.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
from tests.runs.conftest import TORCH_FREE_TRAINER, Runs, WatchedRun, steps_done
from tests.runs.replica_runs import assert_counted_once, attempts, finish_identical, start_and_step, wait_for_step
from tests.runs.target_fixtures import hosts_target, remove_sockets, slurm_target, use_cluster, write_target
from tests.waiting import until

from holdfast import api
from holdfast.errors import HoldfastError
from holdfast.events import (
    AgentConnected,
    AttemptStarted,
    CheckpointCommitted,
    CodeShipped,
    ControllerStarted,
    FaultAction,
    FaultTarget,
    NodeCreated,
    Outcome,
    RankExited,
    RanksStarted,
    RecoveryDecided,
    StepCommitted,
    WorldSizeChanged,
)
from holdfast.launch.local import netns
from holdfast.launch.target_features import TARGETS, Feature, reason_against
from lab.slurm_cluster import SlurmCluster
from lab.ssh_hosts import SshHosts

PROGRAM = "import runpy; print('as it was', flush=True); runpy.run_path('trainer.py', run_name='__main__')\n"
OVERRIDES = (
    "recovery.node_grace_s=6",
    "recovery.step_timeout_s=3",
    "recovery.max_restarts=20",
)
ON_THIS_MACHINE = ("local", "netns", "monarch")


@dataclass
class Site:
    """A target that tests run on, with a project, and the run that its cases share."""

    name: str
    runs: Runs
    kill_machine: Callable[[str], None]
    """End everything on a machine together."""
    start_machine: Callable[[str], None]
    killed: list[str] = field(default_factory=list[str])
    _shared: WatchedRun | None = None

    @property
    def orchestrator(self) -> tuple[str, ...]:
        return ("orchestrator=monarch",) if self.name.endswith("monarch") else ()

    def start(self, steps: int, target: str, *overrides: str) -> WatchedRun:
        own = () if self.name in ON_THIS_MACHINE else (f"checkpoint.path={self.runs.base / 'checkpoints' / target}",)
        command = (sys.executable, "train.py", str(steps), "0.02")
        return self.runs.start(*command, target=target, overrides=(*own, *self.orchestrator, *OVERRIDES, *overrides))

    def run(self) -> WatchedRun:
        """The shared run, which makes steps."""
        if self._shared is None:
            (self.runs.base / "train.py").write_text(PROGRAM)
            self._shared = self.start(1_000_000, "all")
            for _ in range(2):
                self._shared.wait_for(RanksStarted)
            (self.runs.base / "train.py").write_text("raise SystemExit('changed')\n")
            self._shared.wait_for(CheckpointCommitted)
        return self._shared

    def drop(self) -> None:
        """Give the shared run up: the next case gets another."""
        if (run := self._shared) is not None:
            self._shared = None
            if not api.is_finished(run.folder):
                api.cancel(run.folder, force=True)

    def lose(self, watched: WatchedRun, node: int) -> None:
        """Lose the machine of a node."""
        if self.name in ON_THIS_MACHINE:
            watched.drill(FaultTarget.NODE, node, FaultAction.REMOVE)
            return
        lost = [event for event in watched.all(NodeCreated) if event.node == node][-1]
        self.kill_machine(lost.machine)
        self.killed.append(lost.machine)
        remove_sockets(self.runs.base, watched.folder.run_id, f"node{node}.{lost.generation}")

    def give_back(self, watched: WatchedRun, node: int) -> None:
        if self.name in ON_THIS_MACHINE:
            watched.drill(FaultTarget.NODE, node, FaultAction.RESTORE)
        while self.killed:
            self.start_machine(self.killed.pop())


@pytest.fixture(scope="module", params=[each for each in TARGETS if each != "kubernetes"])
def site(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Each target with three machines, of which `all` has all and `two` has two."""
    name, base = request.param, tmp_path_factory.mktemp("site")
    shutil.copy(TORCH_FREE_TRAINER, base / "trainer.py")
    kill_machine, start_machine = _never, _never
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOLDFAST_HOME", str(base / "home"))
        patch.setenv("TMPDIR", tempfile.mkdtemp(prefix="t"))
        patch.setattr(tempfile, "tempdir", None)
        match name:
            case "netns" if reason := netns.unavailable():
                pytest.skip(f"needs network namespaces: {reason}")
            case "local" | "netns" | "monarch":
                isolation = "netns" if name == "netns" else "process"
                targets = {
                    target: f"code: shipped\nisolation: {isolation}\ncapacity: {machines}\n"
                    for target, machines in (("all", 3), ("two", 2))
                }
            case "hosts" | "hosts_monarch":
                hosts: SshHosts = request.getfixturevalue("hosts")
                targets = {"all": hosts_target(hosts, "alpha", "beta", "gamma")}
                targets["two"] = hosts_target(hosts, "alpha", "beta")
                kill_machine, start_machine = hosts.kill, hosts.start
            case _:
                slurm: SlurmCluster = request.getfixturevalue("slurm")
                use_cluster(slurm, patch)
                targets = {"all": slurm_target(slurm, base, spares=1), "two": slurm_target(slurm, base)}
                kill_machine, start_machine = slurm.kill_processes, _stays
        for target, text in targets.items():
            write_target(base, target, text)
        runs = Runs(base)
        made = Site(name, runs, kill_machine, start_machine)
        try:
            yield made
            runs.close()
            assert runs.left_on_hosts() == []
            assert [each for each in os.listdir(os.environ["TMPDIR"]) if each.startswith("holdfast")] == []
        finally:
            runs.kill()
            for machine in made.killed:
                start_machine(machine)
            shutil.rmtree(os.environ["TMPDIR"])


def _never(machine: str) -> None:
    raise AssertionError(f"{machine} is this machine")


def _stays(machine: str) -> None:
    """The machine of a killed Slurm step is there again at once."""


@pytest.fixture
def survivor(site: Site, request: pytest.FixtureRequest) -> Iterator[WatchedRun]:
    """The run that a target's cases share."""
    failed = request.session.testsfailed
    yield site.run()
    if request.session.testsfailed > failed:
        site.drop()


def recovered(watched: WatchedRun, code: str) -> RecoveryDecided:
    """Wait until a failure was judged to be this one, and ranks continue after their last checkpoint."""
    decided = watched.wait_for(RecoveryDecided)
    assert decided.finding.code == code
    attempt = watched.wait_for(AttemptStarted).attempt
    assert watched.wait_for(StepCommitted, lambda event: event.attempt == attempt).step > 5
    return decided


def test_killed_rank_is_recovered_from_the_last_checkpoint(survivor: WatchedRun) -> None:
    before = survivor.all(AttemptStarted)[-1]
    survivor.drill(FaultTarget.RANK, 1, FaultAction.KILL)
    assert recovered(survivor, "rank-killed").first_failed_rank == 1
    after = survivor.all(AttemptStarted)[-1]
    assert (after.master_addr, after.master_port) != (before.master_addr, before.master_port)


def test_rank_that_raises_is_recovered_and_its_error_is_shown(survivor: WatchedRun) -> None:
    survivor.drill(FaultTarget.RANK, 1, FaultAction.RAISE)
    assert "ValueError: a drill" in "".join(recovered(survivor, "rank-crashed").finding.evidence)


def test_stopped_rank_is_taken_for_hung_and_named(survivor: WatchedRun) -> None:
    survivor.drill(FaultTarget.RANK, 1, FaultAction.STOP)
    decided = recovered(survivor, "rank-hung")
    assert decided.first_failed_rank == 1
    assert any("stopped by a signal" in line for line in decided.finding.evidence)


def test_killed_agent_is_replaced_on_the_same_machine_or_another(survivor: WatchedRun) -> None:
    survivor.drill(FaultTarget.AGENT, 1, FaultAction.KILL)
    recovered(survivor, "node-lost")
    assert max(event.generation for event in survivor.all(AgentConnected) if event.node == 1) == 1


def test_killed_controller_comes_back_without_a_rank_restarting(survivor: WatchedRun) -> None:
    started = len(survivor.all(RanksStarted))
    survivor.drill(FaultTarget.CONTROLLER, 0, FaultAction.KILL)
    survivor.wait_for(ControllerStarted)
    for _ in range(2):
        survivor.wait_for(AgentConnected)
    survivor.wait_for(StepCommitted)
    assert len(survivor.all(RanksStarted)) == started, survivor.all(RecoveryDecided)[-1]


def test_lost_machine_is_replaced_by_a_spare(site: Site, survivor: WatchedRun) -> None:
    before = {event.node: event.machine for event in survivor.all(NodeCreated)}
    site.lose(survivor, 1)
    recovered(survivor, "node-lost")
    after = {event.node: event.machine for event in survivor.all(NodeCreated)}
    assert after[0] == before[0]
    assert after[1] not in before.values()
    site.give_back(survivor, 1)


def test_every_attempt_ran_the_code_of_the_start(site: Site, survivor: WatchedRun) -> None:
    assert len(survivor.all(CodeShipped)) == 1
    logs = survivor.folder.logs.glob("attempt-*/rank-*.log")
    first = {path.relative_to(survivor.folder.logs): path.read_text().partition("\n")[0] for path in logs}
    assert len(first) >= 2
    assert set(first.values()) == {"as it was"}


def test_cancelled_run_ends_at_once_with_every_step_done(site: Site, survivor: WatchedRun) -> None:
    api.cancel(survivor.folder)
    ended = survivor.wait_for_end()
    assert (ended.outcome, ended.exit_code) == (Outcome.CANCELLED, 130)
    assert {event.code for event in survivor.all(RankExited)} & {15}
    own = survivor.folder.checkpoints if site.name in ON_THIS_MACHINE else site.runs.base / "checkpoints" / "all"
    done = steps_done(survivor, own)
    assert done == list(range(1, done[-1] + 1))
    site.drop()
    until(lambda: site.runs.left_on_hosts() == [])


def test_elastic_run_continues_on_fewer_machines(site: Site) -> None:
    (site.runs.base / "train.py").write_text(PROGRAM)
    watched = site.start(1_000_000, "two", "nodes=1..2", "nodes.min_nodes_wait_s=0.5", "nodes.scale_up_timeout_s=1")
    watched.wait_for(RanksStarted, lambda event: event.node == 1)  # on a busy machine one node may begin alone
    watched.wait_for(StepCommitted, lambda event: event.step > 5)
    machines = {event.node: event.machine for event in watched.all(NodeCreated)}
    # Slurm gives up a whole job whose first machine is lost.
    lost = max(machines, key=machines.__getitem__) if site.name.startswith("slurm") else 1
    site.lose(watched, lost)
    smaller = watched.wait_for(WorldSizeChanged)
    assert (smaller.nodes, smaller.missing_nodes, smaller.world_size) == ((1 - lost,), (lost,), 1)
    watched.wait_for(StepCommitted, lambda event: event.attempt > 0)
    if not reason_against(Feature.SHAPE_GROWTH, site.name):
        site.give_back(watched, lost)
        larger = watched.wait_for(WorldSizeChanged)
        assert (larger.nodes, larger.world_size) == ((0, 1), 2)
        watched.wait_for(StepCommitted)
    api.cancel(watched.folder)
    assert watched.wait_for_end().outcome is Outcome.CANCELLED


def test_killed_replica_does_not_stop_the_other(site: Site) -> None:
    if reason_against(Feature.REPLICAS, site.name):
        with pytest.raises(HoldfastError) as refused:
            start_and_step(site.runs, 2, target="two")
        assert "recovery.replicas" in [each.where for each in refused.value.findings]
        return
    own = () if site.name in ON_THIS_MACHINE else (f"checkpoint.path={site.runs.base / 'checkpoints' / 'replicas'}",)
    watched = start_and_step(site.runs, 2, *own, *site.orchestrator, target="two")
    watched.drill(FaultTarget.RANK, 1, FaultAction.KILL)
    wait_for_step(watched, 1, 1)
    assert attempts(watched) == [(0, 0), (1, 0), (1, 1)]
    finish_identical(site.runs, watched, 2)
    assert_counted_once(site.runs, 2)
