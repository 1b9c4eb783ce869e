"""NCCL set-up logs: speed on one core compared with Python's re, 16,384 ranks, and the delay of a live verdict.

.venv/bin/python -m bench.nccl_setup_log [--quick | --rounds N] [--only {speed,scale,live} ...]

The logs are generated (nccl_log_generator.py). The peer matches the prefix and the connection of each line with one
regular expression and keeps the groups, the minimum for any reader; it builds no matrix. Times are CPU times, so that
other load on the machine matters little.
"""

from __future__ import annotations

import argparse
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from bench import nccl_live
from bench.nccl_log_generator import Job, Version
from bench.paired_stats import OURS, PEER, PEER_AGAIN, compare, headline, interleave, say, table
from holdfast.diagnose.log_chunk import LogChunk, LogSource
from holdfast.diagnose.nccl_transport import read_setup_logs

GOAL_MB_S = 60
GOAL_SPEED_MIB = 300
GOAL_SCALE_S, GOAL_SCALE_MIB = 15, 300
PARTS = ("speed", "scale", "live")
ROUNDS, QUICK_ROUNDS = 12, 2
SPEED = Job(version=Version.of("2.27.7"), nodes=64, channels=16, replicas=2, filler=8)
SCALE = Job(version=Version.of("2.27.7"), nodes=2048, channels=16)
LINE = re.compile(
    rb"([^\s:]+):(\d+):(\d+) \[-?\d+\] NCCL INFO (?:Channel (\d+)(?:/\d+)? : (\d+)\[[0-9a-f]+\] -> (\d+)\[[0-9a-f]+\] "
    rb"(?:\[(send|receive)\] )?via (\S.*)|(.*))"
)


def main() -> None:
    """Measure, and print tables."""
    parser = argparse.ArgumentParser(prog="bench.nccl_setup_log", description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--quick", action="store_true", help=f"only {QUICK_ROUNDS} rounds")
    parser.add_argument("--read", metavar="FOLDER", help="only read the files of a folder")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    options = parser.parse_args()
    if options.read:
        say(str(read_setup_logs(_files(Path(options.read))).verdict.outcome))
        return
    headline("transport: NCCL's set-up logs into a matrix")
    if "speed" in options.only:
        _speed(QUICK_ROUNDS if options.quick else options.rounds)
    if "scale" in options.only:
        _scale()
    if "live" in options.only:
        nccl_live.measure()


def _speed(rounds: int) -> None:
    logs = [b"".join(SPEED.log(rank)) for rank in range(SPEED.ranks)]
    size = sum(map(len, logs))
    blocks = [
        LogChunk(source=LogSource(name=f"rank-{rank}.log"), first_line=1, data=data) for rank, data in enumerate(logs)
    ]
    say(f"\n{SPEED.ranks} ranks, {len(SPEED.groups)} communicators, {SPEED.channels} channels: {size / 1e6:.1f} MB")

    def peer() -> float:
        began = time.process_time()
        for data in logs:
            for line in data.split(b"\n"):
                if found := LINE.search(line):
                    found.groups()
        return time.process_time() - began

    def ours() -> float:
        began = time.process_time()
        transport = read_setup_logs(blocks)
        spent = time.process_time() - began
        assert len(transport.processes) == SPEED.ranks
        assert len(transport.communicators) == len(SPEED.groups)
        return spent

    done = interleave({PEER: peer, OURS: ours, PEER_AGAIN: peer}, rounds, unit="s of CPU")
    compared = compare(done)
    best = size / 1e6 / min(each[OURS] for each in done)
    middle = size / 1e6 / sorted(each[OURS] for each in done)[len(done) // 2]
    theirs = size / 1e6 / sorted(each[PEER] for each in done)[len(done) // 2]
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    rows = [
        ("holdfast, whole matrix", f"{middle:.0f} MB/s (best {best:.0f})", str(compared.ratio), f"{GOAL_MB_S} MB/s"),
        ("Python re, line by line", f"{theirs:.0f} MB/s", str(compared.floor), ""),
        ("most memory, logs and all", f"{held} MiB", "", f"{GOAL_SPEED_MIB} MiB"),
    ]
    say("\n" + table(("reading", "median", "time / peer's", "goal"), rows))


def _scale() -> None:
    with tempfile.TemporaryDirectory(prefix="transport-") as folder:
        size = 0
        for rank in range(SCALE.ranks):
            size += Path(folder, f"rank-{rank}.log").write_bytes(b"".join(SCALE.log(rank)))
        say(f"\n{SCALE.ranks:,} ranks in as many files: {size / 1e6:.0f} MB, each from the start of a process")
        rows = [
            _measured("the reader", [sys.executable, "-m", "bench.nccl_setup_log", "--read", folder]),
            _measured("`holdfast diagnose FOLDER`", [sys.executable, "-m", "holdfast", "diagnose", folder]),
        ]
    goal = ("goal", f"{GOAL_SCALE_S} s", "", f"{GOAL_SCALE_MIB} MiB", "")
    say("\n" + table((f"{SCALE.ranks:,} ranks", "wall", "CPU", "most memory", "verdict"), [*rows, goal]))


def _measured(name: str, command: list[str]) -> tuple[str, ...]:
    """Wall time, CPU time and memory of a process, and its verdict."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    answer = subprocess.run(command, capture_output=True, text=True, check=True)
    wall = time.monotonic() - began
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    verdict = next(word for word in answer.stdout.replace(":", " ").split() if word.startswith("fabric-"))
    return name, f"{wall:.1f} s", f"{cpu:.1f} s", f"{after.ru_maxrss // 1024} MiB", verdict


def _files(folder: Path) -> Iterator[LogChunk]:
    for path in folder.iterdir():
        yield LogChunk(source=LogSource(name=path.name), first_line=1, data=path.read_bytes())


if __name__ == "__main__":
    main()
