"""Runs on hosts over ssh: each host has a real sshd, its own network, name, host key and /var/tmp."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.runs.conftest import Runs, WatchedRun, steps_done
from tests.runs.target_fixtures import accepted, hosts_target, write_target
from tests.waiting import until

from holdfast import api
from holdfast.errors import ExitCode
from holdfast.events import (
    AgentConnected,
    AgentDisconnected,
    ControllerStarted,
    FaultAction,
    FaultTarget,
    NodeCreated,
    NodeUnavailable,
    Outcome,
    RanksStarted,
    RecoveryDecided,
    StepCommitted,
)
from holdfast.host.processes import all_pids, by_env_prefix, command_line, send_signal
from holdfast.job.targets import SshSettings
from holdfast.launch.hosts.host_link import HostSettings
from holdfast.run_dir import RunDir, runs_root
from lab.ssh_hosts import SshHosts

BIN = Path(sys.executable).parent
PAGE = Path(__file__).parents[2] / "docs" / "hosts.md"
BARE_PYTHON: str = getattr(sys, "_base_executable")  # noqa: B009 - it is not in the stubs
"""A Python without any of holdfast's packages."""


@pytest.fixture
def host_runs(runs: Runs, hosts: SshHosts) -> Iterator[Runs]:
    """Runs on the target `lab`, which has all hosts, and `two`, which has two of them."""
    write_target(runs.base, "lab", hosts_target(hosts, "alpha", "beta", "gamma"))
    write_target(runs.base, "two", hosts_target(hosts, "alpha", "beta"))
    yield runs
    runs.close()
    assert runs.left_on_hosts() == []


def steps(runs: Runs, count: int, target: str = "lab", *overrides: str) -> WatchedRun:
    """A run whose ranks step together and keep checkpoints in a folder that all hosts share."""
    shared = f"checkpoint.path={runs.base / 'checkpoints'}"
    return runs.steps(count, 0.02, target=target, overrides=(shared, "recovery.node_grace_s=2", *overrides))


def count_of_steps(watched: WatchedRun) -> list[int]:
    return sorted(set(watched.steps()))


def ssh_processes(hosts: SshHosts) -> list[int]:
    """The connections of controllers to hosts."""
    return [pid for pid in all_pids() if command_line(pid).startswith(f"ssh -F {hosts.config}")]


def test_connection_that_the_user_has_opened_is_used_and_left_without_the_runs_forwarding(
    host_runs: Runs, hosts: SshHosts, tmp_path: Path
) -> None:
    """As where logging in asks for a second factor: without the open connection there is no way in."""
    master, shared = tmp_path / "master", tmp_path / "shared"
    path = f"Host *\n  ControlPath {tmp_path}/%n\n"
    opened, known = Path(hosts.config).read_text(), re.compile(r"^  IdentityFile .*\n", re.MULTILINE)
    master.write_text(path + opened)
    shared.write_text(path + known.sub("  IdentityFile /dev/null\n", opened))
    target = f"{hosts_target(hosts, 'alpha', 'beta')}"
    write_target(
        host_runs.base,
        "shared",
        target.replace(f"config: {hosts.config}", f"config: {shared}, shared_connection: true"),
    )
    for name in ("alpha", "beta"):
        subprocess.run(["ssh", "-F", master, "-MNf", name], check=True)
    try:
        watched = steps(host_runs, 300, "shared")
        watched.wait_for(StepCommitted)
        watched.drill(FaultTarget.CONTROLLER, 0, FaultAction.KILL)  # it ends no forwarding
        watched.wait_for(ControllerStarted)
        assert watched.wait_for_end().outcome is Outcome.SUCCEEDED
        listening = hosts.node("alpha").prefix
        found = subprocess.run([*listening, "ss", "-Hltn"], capture_output=True, text=True, check=True).stdout
        assert [line for line in found.splitlines() if "127.0.0.1" in line] == []
    finally:
        for name in ("alpha", "beta"):
            subprocess.run(["ssh", "-F", master, "-O", "exit", name], check=True)


def test_by_the_page_alone_ranks_on_two_hosts_meet_their_output_comes_back_and_no_file_stays(
    host_runs: Runs, hosts: SshHosts
) -> None:
    target, commands = re.findall(r"```(?:yaml|bash)\n(.*?)```", PAGE.read_text(), re.DOTALL)[:2]
    assert len(commands.splitlines()) <= 3
    assert len((target + commands).splitlines()) <= 10
    target = target.replace("gpu-a, gpu-b, gpu-c", "alpha, beta, gamma")
    write_target(
        host_runs.base, "lab", target.replace("/opt/venv/bin/python", f"{sys.executable}, config: {hosts.config}")
    )
    (host_runs.base / "train.py").write_text(
        "import os, socket, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "total = torch.ones(1) * (dist.get_rank() + 1)\n"
        "dist.all_reduce(total)\n"
        "print(socket.gethostname(), int(total.item()), os.environ['MASTER_ADDR'])\n"
        "dist.destroy_process_group()\n"
    )
    typed = ["bash", "-ec", commands]
    done = subprocess.run(typed, cwd=host_runs.base, input="", capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (folder,) = runs_root().iterdir()
    watched = WatchedRun(RunDir(folder))
    assert watched.wait_for_end().outcome is Outcome.SUCCEEDED
    addresses = {event.hostname: event.address for event in watched.all(AgentConnected)}
    machines = {event.node: event.machine for event in watched.all(NodeCreated)}
    assert len({*machines.values()} & {"alpha", "beta", "gamma"}) == 2, "any two of the page's three"
    for rank, name in machines.items():
        assert watched.log(rank).split()[-3:] == [name, "3", addresses[machines[0]]]
    ssh = ["ssh", "-F", str(hosts.config), "alpha", "find /var/tmp/holdfast-*/runs -mindepth 1"]
    assert subprocess.run(ssh, capture_output=True, text=True, check=True).stdout == ""


def test_command_connects_hosts_before_its_run_is_known_and_for_no_run(host_runs: Runs, hosts: SshHosts) -> None:
    command = (sys.executable, "-c", "import time; time.sleep(600)")
    words = [str(BIN / "holdfast"), "run", "-d", "--on", "two", "--name", "early", "--nodes"]
    refused = subprocess.run([*words, "9", "--", *command], cwd=host_runs.base, capture_output=True, check=False)
    assert refused.returncode == ExitCode.CANNOT_RUN_HERE
    until(lambda: ssh_processes(hosts) == [])  # test_prestarted_links.py sees them begin
    subprocess.run([*words, "2", "--", *command], cwd=host_runs.base, capture_output=True, check=True)
    (run,) = (RunDir(folder) for folder in runs_root().glob("early-*"))
    watched = host_runs.watch(run)
    watched.wait_for(RanksStarted)
    commands = [Path(f"/proc/{pid}/cmdline").read_text() for pid in ssh_processes(hosts)]
    forwarded = {int(re.findall(r"-R\x00127\.0\.0\.1:(\d+):", each)[0]) for each in commands}
    settings = HostSettings(ssh=SshSettings(), base=Path(), port=0, run=run.run_id)
    assert len(forwarded) == 2
    assert not forwarded & {settings.first_port(host) for host in ("alpha", "beta")}  # of a link that begins later
    api.cancel(run)
    watched.wait_for_end()


def test_hosts_are_accepted_by_a_newcomers_commands_and_by_whole_gangs(host_runs: Runs) -> None:
    assert accepted(host_runs.base, "two") == {"gang": "passed", "first-run": "passed"}


def test_host_with_nothing_but_python_gets_what_an_agent_needs(runs: Runs, hosts: SshHosts) -> None:
    write_target(runs.base, "bare", hosts_target(hosts, "alpha", "beta", python=BARE_PYTHON))
    program = runs.base / "bare.py"
    program.write_text("import sys, msgspec, holdfast; print(sys.prefix == sys.base_prefix, holdfast.__file__)\n")
    watched = runs.start("python3", "bare.py", target="bare")
    assert watched.wait_for_end().outcome is Outcome.SUCCEEDED
    assert watched.log(1).startswith("True /var/tmp/holdfast-")


def test_agents_survive_their_ssh_connections(host_runs: Runs, hosts: SshHosts) -> None:
    watched = steps(host_runs, 150, "two", "recovery.node_grace_s=30")
    watched.wait_for(StepCommitted)
    for pid in ssh_processes(hosts):
        send_signal(pid, signal.SIGKILL)
    watched.wait_for(AgentDisconnected)
    watched.wait_for(AgentConnected)
    assert watched.wait_for_end().outcome is Outcome.SUCCEEDED
    assert watched.all(RecoveryDecided) == []
    assert len(watched.all(RanksStarted)) == 2
    assert count_of_steps(watched) == list(range(1, 151))


def test_lost_host_is_replaced_by_a_spare_and_is_used_again_once_it_is_back(host_runs: Runs, hosts: SshHosts) -> None:
    watched = steps(host_runs, 200)
    watched.wait_for(StepCommitted)
    first = {event.node: event.machine for event in watched.all(NodeCreated)}
    hosts.kill(first[1])
    spare = watched.wait_for(NodeCreated, lambda event: event.node == 1 and event.generation == 1)
    assert spare.machine == ({"alpha", "beta", "gamma"} - set(first.values())).pop()
    watched.wait_for(StepCommitted)
    hosts.start(first[1])
    until(lambda: len(ssh_processes(hosts)) == 3)
    hosts.kill(first[0])
    back = watched.wait_for(NodeCreated, lambda event: event.node == 0 and event.generation >= 1)
    assert back.machine == first[1]
    hosts.start(first[0])
    assert watched.wait_for_end().outcome is Outcome.SUCCEEDED
    assert steps_done(watched, host_runs.base / "checkpoints") == list(range(1, 201))


def test_node_on_a_host_that_was_out_of_reach_is_removed_when_it_is_back(host_runs: Runs, hosts: SshHosts) -> None:
    watched = steps(host_runs, 200)
    watched.wait_for(StepCommitted)
    (lost,) = (event.machine for event in watched.all(NodeCreated) if event.node == 1)
    hosts.network.partition(lost)
    watched.wait_for(NodeCreated, lambda event: event.generation == 1)
    watched.wait_for(StepCommitted)
    hosts.network.heal(lost)
    until(lambda: not by_env_prefix(all_pids(), HOLDFAST_NODE=f"{watched.folder.run_id}/node1.0"))
    assert watched.wait_for_end().outcome is Outcome.SUCCEEDED


def test_second_run_waits_for_hosts_that_are_in_use_and_says_by_what(host_runs: Runs) -> None:
    first = steps(host_runs, 2000, "two")
    first.wait_for(StepCommitted)
    second = steps(host_runs, 5, "two", f"checkpoint.path={host_runs.base / 'second'}")
    waiting = second.wait_for(NodeUnavailable)
    assert f"it is in use by {first.folder.run_id} of " in waiting.reason
    api.cancel(first.folder)
    assert second.wait_for_end().outcome is Outcome.SUCCEEDED


def test_force_cancel_ends_the_nodes_on_hosts_too(host_runs: Runs) -> None:
    watched = steps(host_runs, 2000)
    watched.wait_for(StepCommitted)
    api.cancel(watched.folder, force=True)
    assert watched.wait_for_end().outcome is Outcome.CANCELLED
    assert by_env_prefix(all_pids(), HOLDFAST_NODE=watched.folder.run_id) == []


def test_check_says_why_each_host_cannot_take_part(runs: Runs, hosts: SshHosts) -> None:
    folder = runs.base
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / "stranger")], check=True)
    address = hosts.node("beta").address
    usual, known = hosts.config.read_text(), hosts.folder / "known_hosts"
    others = {
        "denied": f"IdentityFile {folder}/stranger\n IdentitiesOnly yes\n UserKnownHostsFile {known}",
        "unknown": "UserKnownHostsFile /dev/null\n StrictHostKeyChecking yes",
        "closed": "Port 23",
    }
    extra = "".join(f"Host {name}\n HostName {address}\n User root\n {text}\n" for name, text in others.items())
    (folder / "config").write_text(usual + extra)
    targets = folder / ".holdfast" / "targets"
    targets.mkdir(parents=True)
    names = ", ".join(("alpha", "beta", *others, "no-such-host"))
    ssh = f"{{python: {sys.executable}, config: config, addresses: {{beta: 192.0.2.1}}}}"
    (targets / "bad.yaml").write_text(f"kind: hosts\nhosts: [{names}]\nssh: {ssh}\n")
    findings = api.check_target(None, "bad", base=folder)
    said = {finding.where: finding.what for finding in findings if finding.code == "host-unusable"}
    assert set(said) == {"beta", *others, "no-such-host"}
    assert "it cannot listen on 192.0.2.1" in said["beta"]
    assert "does not accept this user's keys" in said["denied"]
    assert "host key is unknown" in said["unknown"]
    assert "nothing listens on its ssh port" in said["closed"]
    assert "its name is unknown" in said["no-such-host"]


def test_hosts_that_can_run_a_job_pass_the_check(host_runs: Runs) -> None:
    assert api.check_target(None, "lab", base=host_runs.base) == ()
