"""What NVRx and DLRover show of the faults of bench/watch_kinds.py that need no GPU: real launchers, real faults.

.venv/bin/python -m bench.watch_peers --peers PYTHON [--kinds NAMES] [--peer nvrx]

PYTHON is the interpreter of an environment with torch, nvidia-resiliency-ext 0.4.1 and dlrover 0.6.1. Each run has four
ranks under two agents on this machine, and the fault is on rank 3. NVRx gets a heartbeat at each step and a timeout of
30 s, which is 45 min by default; DLRover has a local master. After the fault the launcher has 90 s.
"""

from __future__ import annotations

import argparse
import os
import re
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench import result_file
from bench.paired_stats import headline, say, table
from bench.replica_program import free_port
from bench.watch_verdicts import KINDS
from holdfast.host.processes import all_pids, by_env, descendants, kill_all

PROGRAM = Path(__file__).parent / "programs" / "peer_watched_loop.py"
MARK = "HOLDFAST_BENCH_PEER"
AGENTS, RANKS_PER_AGENT = 2, 2
PLANTED_RANK, AT_STEP = 3, 40
HEARTBEAT_S, WITHIN_S, START_S = 30, 90.0, 90.0
LOST_NODE = "lost node"
NEEDS_DEVICE = frozenset({"lost GPU", "throttled GPU", "link with errors"})
_RANK = re.compile(r"\brank (\d+)")
_EXIT = re.compile(r"failed \(exitcode: (-?\d+)\) local_rank: (\d+)")
_SILENT = re.compile(r"RankMonServer\d+@[^:\]]*:(\d+)\][^\n]*[Hh]eartbeat")


@dataclass(frozen=True, kw_only=True)
class Peer:
    """A launcher that watches ranks."""

    name: str
    env: Mapping[str, str]
    command: Callable[[Path, int, int], list[str]]
    """By interpreter, port and agent."""
    master: Callable[[Path, int], list[str]] | None = None
    heartbeats: bool = False


def _nvrx(python: Path, port: int, agent: int) -> list[str]:
    rendezvous = ("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=peer")
    watched = (f"--ft-rank-heartbeat-timeout={HEARTBEAT_S}", "--ft-initial-rank-heartbeat-timeout=120")
    nodes = (f"--nnodes=1:{AGENTS}", f"--nproc-per-node={RANKS_PER_AGENT}", "--max-restarts=3")
    return [str(python.with_name("ft_launcher")), *nodes, *rendezvous, *watched]


def _dlrover(python: Path, port: int, agent: int) -> list[str]:
    nodes = (f"--nnodes=1:{AGENTS}", f"--nproc_per_node={RANKS_PER_AGENT}", "--max_restarts=3")
    return [str(python.with_name("dlrover-run")), *nodes]


def _dlrover_master(python: Path, port: int) -> list[str]:
    options = ("--platform=local", f"--node_num={AGENTS}", f"--port={port}", "--job_name=peer")
    return [str(python), "-m", "dlrover.python.master.main", *options]


PEERS = (
    Peer(name="nvrx", env={}, command=_nvrx, heartbeats=True),
    Peer(name="dlrover", env={"NODE_NUM": str(AGENTS)}, command=_dlrover, master=_dlrover_master),
)


def measure(peer: Peer, kind: str, python: Path) -> str:
    """What a user of the peer sees of one fault, in words."""
    with tempfile.TemporaryDirectory(prefix="peer-") as name, _started(peer, kind, python, Path(name)) as agents:
        folder = Path(name)
        if not _wait(lambda: _step(folder) >= AT_STEP, START_S):
            return "its ranks did not start: " + _last_line(folder)
        if kind == LOST_NODE:
            (folder / "planted").touch()
            kill_all(lambda: [*descendants(agents[-1].pid), agents[-1].pid], within_s=10.0)
        if not _wait((folder / "planted").exists, 30.0):
            return "the fault did not come"
        fault_at = (folder / "planted").stat().st_mtime
        _wait(lambda: bool(_restarted_at(folder, fault_at)) or _ended(agents), WITHIN_S)
        restarted_at = _restarted_at(folder, fault_at)
        if restarted_at:
            action = f"steps again after {restarted_at - fault_at:.0f} s"
        else:
            action = "the job ends" if _ended(agents) else f"nothing in {WITHIN_S:.0f} s"
        named: dict[int, list[str]] = defaultdict(list)
        for rank, why in sorted(set(_named(folder))):
            named[rank].append(why)
        ranks = ", ".join(f"rank {rank} ({', '.join(reasons)})" for rank, reasons in named.items())
        return f"{action}; names {ranks or 'no rank'}"


def _named(folder: Path) -> Iterator[tuple[int, str]]:
    """The ranks that the launchers say failed, each with what is said of it."""
    for agent in range(AGENTS):
        said = (folder / f"out-{agent}").read_text(errors="replace")
        for code, local_rank in _EXIT.findall(said):
            yield agent * RANKS_PER_AGENT + int(local_rank), f"exit code {code}"
        for rank in _SILENT.findall(said):
            yield int(rank), "no heartbeat"


@contextmanager
def _started(peer: Peer, kind: str, python: Path, folder: Path) -> Generator[list[subprocess.Popen[bytes]]]:
    port, mark = free_port(), secrets.token_hex(4)
    env = os.environ | {"OMP_NUM_THREADS": "1", MARK: mark} | dict(peer.env)
    program = [str(PROGRAM), str(folder), kind, str(PLANTED_RANK), str(AT_STEP)]
    program += ["--heartbeats"] * peer.heartbeats
    started: list[subprocess.Popen[bytes]] = []

    def start(command: Sequence[str], output: str, **more: str) -> subprocess.Popen[bytes]:
        with (folder / output).open("ab") as out:
            started.append(subprocess.Popen(command, env=env | more, cwd=folder, stdin=-3, stdout=out, stderr=out))
        return started[-1]

    try:
        if peer.master is not None:
            start(peer.master(python, port), "out-master")
            _wait(lambda: b"master" in (folder / "out-master").read_bytes().lower(), 30.0)
        more = {"DLROVER_MASTER_ADDR": f"127.0.0.1:{port}"} if peer.master is not None else {}
        agents = []
        for each in range(AGENTS):
            node = {"NODE_RANK": str(each), "NODE_ID": str(each), **more}
            agents.append(start([*peer.command(python, port, each), *program], f"out-{each}", **node))
            _wait(lambda: _listens(port), 60.0)  # the first agent has the store, and the last one is lost
        yield agents
    finally:
        kill_all(lambda: by_env(all_pids(), **{MARK: mark}), within_s=20.0)
        for process in started:
            process.wait()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _outputs(folder: Path) -> list[Path]:
    return sorted(folder.glob("out-*"))


def _step(folder: Path) -> int:
    try:
        return int((folder / "step").read_text() or 0)
    except OSError:
        return 0


def _restarted_at(folder: Path, fault_at: float) -> float:
    """When steps began again after the fault; 0 if they have not."""
    begun = [float(path.name.removeprefix("attempt-")) for path in folder.glob("attempt-*")]
    return min((at for at in begun if at > fault_at), default=0.0)


def _ended(agents: Sequence[subprocess.Popen[bytes]]) -> bool:
    return all(each.poll() is not None for each in agents)


def _last_line(folder: Path) -> str:
    lines = [
        line for path in _outputs(folder) for line in path.read_text(errors="replace").splitlines() if line.strip()
    ]
    return lines[-1][:200] if lines else "no output"


def _wait(until: Callable[[], bool], within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while not until():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True


def measure_all(python: Path, kinds: Sequence[str], peers: Sequence[Peer] = PEERS) -> dict[str, dict[str, str]]:
    """By peer and kind; the peers run side by side."""

    def one(peer: Peer) -> dict[str, str]:
        return {kind: measure(peer, kind, python) for kind in kinds if kind not in NEEDS_DEVICE}

    with ThreadPoolExecutor(len(peers)) as pool:
        return dict(zip((peer.name for peer in peers), pool.map(one, peers), strict=True))


def main() -> int:
    """Run each kind under each peer, and print a table."""
    parser = argparse.ArgumentParser(prog="bench.watch_peers", description=__doc__)
    parser.add_argument("--peers", type=Path, required=True, metavar="PYTHON")
    parser.add_argument("--kinds", help="names, separated by commas")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--peer", action="append", choices=[peer.name for peer in PEERS])
    options = parser.parse_args()
    kinds = [kind.name for kind in KINDS if not options.kinds or kind.name in options.kinds.split(",")]
    headline(f"what NVRx and DLRover show of {len(kinds)} kinds of faults")
    peers = [peer for peer in PEERS if not options.peer or peer.name in options.peer]
    seen = measure_all(options.peers.absolute(), kinds, peers)
    rows = [(kind, *(seen[peer.name].get(kind, "needs a device") for peer in peers)) for kind in kinds]
    say(table(("kind", *(peer.name for peer in peers)), rows))
    result_file.save(options.json, "What peers show of faults", [_result(peer, seen[peer.name]) for peer in peers])
    return 0


def _result(peer: Peer, seen: Mapping[str, str]) -> result_file.Result:
    right = sum(set(_RANK.findall(words)) == {str(PLANTED_RANK)} for words in seen.values())
    return result_file.Result(
        claim=f"{peer.name}: kinds of faults of which it names the rank",
        command=result_file.command(),
        date=result_file.today(),
        figure=result_file.Figure(value=right, unit=f"of {len(seen)}"),
        conditions=f"4 ranks, 2 agents, CPU over Gloo; {WITHIN_S:.0f} s after the fault; kinds that need no device",
        details=dict(seen),
    )


if __name__ == "__main__":
    sys.exit(main())
