"""What others find of the faults that can be planted on this machine: dlrover's node check, and torchrun's error.

.venv/bin/python -m bench.peer_checks --peers PYTHON [--kind NAME ...]

PYTHON is the interpreter of an environment with dlrover, nvidia-resiliency-ext and torch. The nodes are as those of
bench/planted_faults.py: namespaces, mounts and limits. dlrover checks four nodes, as `dlrover-run --network-check` with
a local master does; torchrun runs a small job on two. NVRx's checks read NVML and the adapters' counters: they need
GPUs.
"""

from __future__ import annotations

import argparse
import os
import re
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.paired_stats import headline, say, table
from bench.planted.kinds import KINDS, Base
from bench.planted.node_entry import VARIABLE
from bench.planted.nodes import ROOT, end, prepare
from bench.planted.probes import PROBE_KINDS, ProbeKind
from holdfast.host.processes import all_pids, by_env, kill_all
from holdfast.launch.local import netns
from holdfast.launch.local.netns import NetnsNetwork

PEER_NODES, TORCHRUN_NODES = 4, 2
PLANTED = 1
MARK = "HOLDFAST_BENCH_PEER"
DLROVER_S, TORCHRUN_S = 180.0, 75.0
DLROVER_TIMES = "/tmp/dlrover/network_check"
NO_SUBJECT = ("clock not synchronised", "other torch")
"""Only the agent's answer is planted, or only the file that the check reads."""
_ERROR = re.compile(r"(?:\w+Error|RuntimeError|ENOSPC|Bus error|No space left|SIGBUS|terminate called)[^\n]{0,140}")
_VERDICT = re.compile(
    r"[^\n]*(?:fault nodes|Fault nodes|straggler|Straggler|network check (?:fail|succ)|is breakdown)[^\n]*"
)


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What a user of the peer sees."""

    outcome: str
    took_s: float
    lines: tuple[str, ...]


class Nodes:
    """Network namespaces, of which one has a fault."""

    def __init__(self, name: str, count: int, work: Path) -> None:
        self._network = NetnsNetwork.create(f"pc{os.getpid()}")
        self.nodes = [self._network.add_node(f"node{each}") for each in range(count)]
        self._kind = next((each for each in KINDS if each.name == name), None)
        planted = prepare(work, Base.MACHINE, self._kind, PLANTED)
        self.work, self.mark = work, secrets.token_hex(4)
        self._environ = os.environ | {VARIABLE: planted.as_text(), MARK: self.mark, "PYTHONPATH": str(ROOT)}
        self._environ |= {"OMP_NUM_THREADS": "1"} | dict(self._kind.env if self._kind else {})
        self._probe: ProbeKind | None = next((each for each in PROBE_KINDS if each.name == name), None)
        if self._probe:
            self._probe.plant(self._network, self.nodes[PLANTED].name)

    def start(self, node: int, command: Sequence[str], **env: str) -> subprocess.Popen[bytes]:
        """Start a command on a node; its output goes to its own file."""
        with (self.work / f"out{node}").open("ab") as out:
            return subprocess.Popen(
                [*self.nodes[node].prefix, sys.executable, "-m", "bench.planted", str(node), *command],
                env=self._environ | env,
                cwd=self.work,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
            )

    def remove(self) -> None:
        """End everything."""
        kill_all(lambda: by_env(all_pids(), **{MARK: self.mark}), within_s=10.0)
        netns.remove(self._network.tag)


def torchrun(name: str, python: Path, work: Path) -> Seen:
    """A small job under two torchrun agents."""
    nodes = Nodes(name, TORCHRUN_NODES, work)
    options = ("--nnodes=2", "--nproc-per-node=1", f"--rdzv-endpoint={nodes.nodes[0].address}:29400")
    program = (str(ROOT / "bench/programs/small_job.py"), str(work / "checkpoints"))
    image = str(work / "image/bin/python")
    command = [image, "-m", "torch.distributed.run", *options, "--rdzv-backend=c10d", "--rdzv-id=a", *program]
    try:
        began = time.monotonic()
        agents = [nodes.start(each, command) for each in range(TORCHRUN_NODES)]
        return _seen(agents, began, TORCHRUN_S, work, _ERROR, range(TORCHRUN_NODES))
    finally:
        nodes.remove()


def dlrover(name: str, python: Path, work: Path) -> Seen:
    """`dlrover-run --network-check` of four nodes with a local master, on the first of them."""
    nodes = Nodes(name, PEER_NODES, work)
    address = nodes.nodes[0].address
    master = ("--platform=local", f"--node_num={PEER_NODES}", "--port=29500", "--job_name=check")
    options = (f"--nnodes={PEER_NODES}", "--nproc_per_node=1", "--network-check", "--exclude-straggler")
    program = (str(ROOT / "bench/programs/small_job.py"), str(work / "checkpoints"))
    # Each node keeps its times in this folder, so that nodes of one machine must not share it.
    own_folder = f'mkdir -p {DLROVER_TIMES} && mount -t tmpfs own {DLROVER_TIMES} && exec "$@"'
    run = ("sh", "-c", own_folder, "sh", str(python.with_name("dlrover-run")), *options, *program)
    started: list[subprocess.Popen[bytes]] = []
    try:
        began = time.monotonic()
        started.append(nodes.start(0, [str(python), "-m", "dlrover.python.master.main", *master]))
        time.sleep(4.0)  # dlrover-run on node 0 starts its own master unless this one answers
        for rank in range(PEER_NODES):
            env = {"DLROVER_MASTER_ADDR": f"{address}:29500", "NODE_RANK": str(rank), "NODE_ID": str(rank)}
            started.append(nodes.start(rank, run, **env, NODE_NUM=str(PEER_NODES), NETWORK_CHECK_TIMEOUT="40"))
        return _seen(started[1:], began, DLROVER_S, work, _VERDICT, range(PEER_NODES))
    finally:
        nodes.remove()
        for process in started:
            end(process)


def _seen(
    agents: Sequence[subprocess.Popen[bytes]],
    began: float,
    within_s: float,
    work: Path,
    pattern: re.Pattern[str],
    nodes: range,
) -> Seen:
    while any(each.poll() is None for each in agents) and time.monotonic() - began < within_s:
        time.sleep(0.2)
    codes = [each.poll() for each in agents]
    lines: dict[str, None] = {}
    for node in nodes:
        text = (work / f"out{node}").read_text(errors="replace")
        for line in pattern.findall(text)[-3:]:
            lines[f"node{node}: {line.strip()[:200]}"] = None
    outcome = "runs" if codes == [0] * len(codes) else f"exit codes {codes}"
    return Seen(outcome=outcome, took_s=time.monotonic() - began, lines=tuple(lines))


def main() -> None:
    """Run each peer on each fault, and print what it shows."""
    parser = argparse.ArgumentParser(prog="bench.peer_checks", description=__doc__)
    parser.add_argument("--peers", type=Path, required=True, metavar="PYTHON")
    parser.add_argument("--peer", action="append", choices=("torchrun", "dlrover"))
    parser.add_argument("--kind", action="append")
    options = parser.parse_args()
    headline("what dlrover's node check and torchrun show of planted faults")
    names = [each.name for each in KINDS if each.base is Base.MACHINE] + [each.name for each in PROBE_KINDS]
    rows: list[tuple[str, ...]] = []
    for name in options.kind or (each for each in ("none", *names) if each not in NO_SUBJECT):
        for peer in (torchrun, dlrover):
            if options.peer and peer.__name__ not in options.peer:
                continue
            with tempfile.TemporaryDirectory(prefix="holdfast-") as folder:
                seen = peer(name, options.peers, Path(folder))
            rows.append((name, peer.__name__, seen.outcome, f"{seen.took_s:.0f} s", " / ".join(seen.lines)))
            say(" | ".join(rows[-1]))
    say(table(("fault", "peer", "outcome", "took", "what it prints"), rows))


if __name__ == "__main__":
    main()
