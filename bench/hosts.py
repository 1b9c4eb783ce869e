"""Two hosts over ssh (lab/ssh_hosts.py): launch against torchrun started by hand, recovery against local runs.

.venv/bin/python -m bench.hosts [--quick | --rounds N]

launch: from the command to the end of the first all-reduce; the peer is `ssh HOST torchrun ...` on both hosts together.
kill: from SIGKILL of a rank to the next whole step; the peer is the local target.
host: from the power failure of a host to the next whole step, with a spare, beyond `recovery.node_grace_s`.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator
from pathlib import Path
from statistics import median

from bench import load_gate, result_file
from bench.paired_stats import OURS, PEER, PEER_AGAIN, compare, headline, interleave, percentile, say, table
from holdfast import api
from holdfast.events import FaultAction, FaultTarget, NodeCreated, StepCommitted
from holdfast.run_dir import RunDir
from lab.ssh_hosts import SshHosts, ssh_hosts

LAUNCH_GOAL, KILL_GOAL, HOST_GOAL_S = 0.8, 1.1, 5.0
ROUNDS, QUICK_ROUNDS = 7, 1
WITHIN_S = 120.0
NODE_GRACE_S = 5.0
PORT = 29400
BIN = Path(sys.executable).parent
ALL_REDUCE = Path(__file__).parent / "programs" / "allreduce.py"
STEPPER = Path(__file__).parents[1] / "tests" / "programs" / "torch_free_trainer.py"
TITLE = "Hosts over ssh"


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(prog="bench.hosts", description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--quick", action="store_true", help=f"only {QUICK_ROUNDS} round")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args()
    count = QUICK_ROUNDS if options.quick else options.rounds
    headline("hosts over ssh: 2 hosts x 1 rank, network namespaces of this machine")
    with tempfile.TemporaryDirectory() as base, ssh_hosts(Path(base) / "hosts", "alpha", "beta", "gamma") as hosts:
        bench = HostBench(Path(base), hosts)
        for side in (bench.launch_by_hand, bench.launch):
            side()  # the first run sends packages, and reads 5 GB of torch
        sides = {PEER: bench.launch_by_hand, OURS: bench.launch, PEER_AGAIN: bench.launch_by_hand}
        launches = interleave(sides, count, unit="s")
        kills = interleave(
            {
                PEER: lambda: bench.kill("local"),
                OURS: lambda: bench.kill("two"),
                PEER_AGAIN: lambda: bench.kill("local"),
            },
            count,
            unit="s",
        )
        losses = [bench.lose_host() - NODE_GRACE_S for _ in range(count)]
    launch_claim = "hosts over ssh: command → first all-reduce, 2 hosts"
    kill_claim = "hosts over ssh: SIGKILL of a rank → next whole step"
    host_claim = "hosts over ssh: host lost → next whole step on a spare, beyond `node_grace_s`, median"
    found = [
        result_file.from_rounds(launch_claim, launches, goal=LAUNCH_GOAL, unit="s", peer="torchrun by hand"),
        result_file.from_rounds(kill_claim, kills, goal=KILL_GOAL, unit="s", peer="holdfast, local"),
        result_file.absolute(host_claim, median(losses), "s", goal=HOST_GOAL_S),
    ]
    result_file.save(options.json, TITLE, found)
    say("")
    rows = [
        (name, f"<= {goal}x", f"{compare(rounds).ratio}x", str(compare(rounds).floor), compare(rounds).verdict(goal))
        for name, goal, rounds in ((launch_claim, LAUNCH_GOAL, launches), (kill_claim, KILL_GOAL, kills))
    ]
    say(table(("claim", "goal", "measured", "A/A floor", "met"), rows))
    say(f"{host_claim}: {median(losses):.2f} s, longest {percentile(losses, 100):.2f} s (goal {HOST_GOAL_S:g} s)")


class HostBench:
    """One folder with targets `two` (two hosts) and `three` (one is a spare)."""

    def __init__(self, base: Path, hosts: SshHosts) -> None:
        self._base, self._hosts, self._number = base, hosts, 0
        os.environ["HOLDFAST_HOME"] = str(base / "home")
        os.environ["OMP_NUM_THREADS"] = "1"
        self._work = base / "work"
        targets = self._work / ".holdfast" / "targets"
        targets.mkdir(parents=True)
        for name, members in (("two", "alpha, beta"), ("three", "alpha, beta, gamma")):
            ssh = f"{{python: {sys.executable}, config: {hosts.config}}}"
            (targets / f"{name}.yaml").write_text(f"kind: hosts\nhosts: [{members}]\nssh: {ssh}\n")

    def launch(self) -> float:
        """Seconds from `holdfast run` to the end of the first all-reduce."""

        def commands(out: Path) -> list[list[str]]:
            program = [sys.executable, str(ALL_REDUCE), str(out)]
            return [[str(BIN / "holdfast"), "run", "--on", "two", "--nodes", "2", "--", *program]]

        return self._all_reduce_s(commands)

    def launch_by_hand(self) -> float:
        """The same of torchrun on both hosts."""
        head = self._hosts.node("alpha").address

        def commands(out: Path) -> list[list[str]]:
            self._number += 1
            common = f"--nnodes 2 --nproc-per-node 1 --master-addr {head} --master-port {PORT + self._number}"
            return [
                [
                    *("ssh", "-F", str(self._hosts.config), host),
                    f"OMP_NUM_THREADS=1 {BIN}/torchrun {common} --node-rank {rank} {ALL_REDUCE} {out}",
                ]
                for rank, host in enumerate(("alpha", "beta"))
            ]

        return self._all_reduce_s(commands)

    def _all_reduce_s(self, commands: Callable[[Path], list[list[str]]]) -> float:
        load_gate.wait_until_idle()
        out = Path(tempfile.mkdtemp(dir=self._base))
        words = [out / f"rank-{rank}" for rank in range(2)]
        with (out / "log").open("wb") as log:
            started = time.time()
            running = [
                subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self._work)
                for argv in commands(out)
            ]
            ended = [command.wait(WITHIN_S) for command in running]
        if any(ended):
            raise RuntimeError((out / "log").read_text(errors="replace")[-3000:])
        return max(float(word.read_text()) for word in words) - started

    def kill(self, target: str) -> float:
        """Seconds from SIGKILL of a rank to the next whole step."""
        with self._stepping(target) as (run, next_step):
            at = time.time()
            api.inject_fault(run, target=FaultTarget.RANK, index=1, action=FaultAction.KILL)
            return next_step(1) - at

    def lose_host(self) -> float:
        """Seconds from the power failure of a host to the next whole step."""
        with self._stepping("three") as (run, next_step):
            machine = next(
                event.machine for event in api.events(run) if isinstance(event, NodeCreated) and event.node == 1
            )
            at = time.time()
            self._hosts.kill(machine)
            took_s = next_step(1) - at
        self._hosts.start(machine)
        return took_s

    @contextlib.contextmanager
    def _stepping(self, target: str) -> Generator[tuple[RunDir, Callable[[int], float]]]:
        """A run that has made some steps; the function is the time of the first step of an attempt."""
        self._number += 1
        settings = (f"checkpoint.path={self._base / f'steps-{self._number}'}", f"recovery.node_grace_s={NODE_GRACE_S}")
        command = (sys.executable, str(STEPPER), "100000", "0.02")
        job = api.load_job(None, command=command, nodes=2, name="stepping", overrides=settings)
        run = api.start(job, target, base=self._work)
        events = api.follow(run)

        def step_of(attempt: int) -> float:
            return next(event.at for event in events if isinstance(event, StepCommitted) and event.attempt == attempt)

        try:
            step_of(0)
            yield run, step_of
        finally:
            api.cancel(run)
            for _ in events:
                pass


if __name__ == "__main__":
    main()
