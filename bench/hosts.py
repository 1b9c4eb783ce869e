"""Two hosts over ssh (lab/ssh_hosts.py): launch against torchrun started by hand, recovery against local runs.

.venv/bin/python -m bench.hosts [--quick | --rounds N]

launch: from the command to the end of the first all-reduce; the peer is `ssh HOST torchrun ...` on both hosts together.
kill: from SIGKILL of a rank to the next whole step; the peer is the local target.
host: from the power failure of a host to the next whole step, with a spare, beyond `recovery.node_grace_s`.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
from pathlib import Path

from bench import result_file
from bench.paired_stats import headline
from bench.target_runs import ALL_REDUCE, BIN, TargetRuns, beyond_grace, compared, options_of
from lab.ssh_hosts import SshHosts, ssh_hosts

LAUNCH_GOAL, KILL_GOAL, HOST_GOAL_S = 0.8, 1.1, 5.0
PORTS = itertools.count(29400)
TITLE = "Hosts over ssh"


def main() -> None:
    """Measure, and print a table."""
    count, results = options_of("bench.hosts", __doc__)
    headline("hosts over ssh: 2 hosts x 1 rank, network namespaces of this machine")
    with tempfile.TemporaryDirectory() as base, ssh_hosts(Path(base) / "hosts", "alpha", "beta", "gamma") as hosts:
        runs = TargetRuns(
            Path(base), {"two": _target(hosts, "alpha, beta"), "three": _target(hosts, "alpha, beta, gamma")}
        )

        def by_hand() -> float:
            return runs.all_reduce_s(lambda out: _torchrun(hosts, out))

        def lose_host() -> float:
            lost, took_s = runs.lose("three", lambda _, host: hosts.kill(host))
            hosts.start(lost)
            return took_s

        by_hand()
        runs.launch("two")  # the first run sends packages, and reads 5 GB of torch
        claim = "hosts over ssh: command → first all-reduce, 2 hosts"
        launch = compared(claim, count, "torchrun by hand", by_hand, lambda: runs.launch("two"), LAUNCH_GOAL)
        claim = "hosts over ssh: SIGKILL of a rank → next whole step"
        kill = compared(
            claim, count, "holdfast, local", lambda: runs.kill("local"), lambda: runs.kill("two"), KILL_GOAL
        )
        claim = "hosts over ssh: host lost → next whole step on a spare, beyond `node_grace_s`, median"
        host = beyond_grace(claim, [lose_host() for _ in range(count)], goal_s=HOST_GOAL_S)
    result_file.save(results, TITLE, [launch, kill, host])


def _target(hosts: SshHosts, members: str) -> str:
    return f"kind: hosts\nhosts: [{members}]\nssh: {{python: {sys.executable}, config: {hosts.config}}}\n"


def _torchrun(hosts: SshHosts, out: Path) -> list[list[str]]:
    head = hosts.node("alpha").address
    common = f"--nnodes 2 --nproc-per-node 1 --master-addr {head} --master-port {next(PORTS)}"
    return [
        [
            *("ssh", "-F", str(hosts.config), host),
            f"OMP_NUM_THREADS=1 {BIN}/torchrun {common} --node-rank {rank} {ALL_REDUCE} {out}",
        ]
        for rank, host in enumerate(("alpha", "beta"))
    ]


if __name__ == "__main__":
    main()
