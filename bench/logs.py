"""A rank's output: the cost for a rank that prints as fast as possible, and the lag of following 64 ranks.

.venv/bin/python -m bench.logs [--quick | --rounds N] [--only print | follow]

The peer of printing is a shell's redirect with the same buffering, the peer of following `tail -F`. After each run the
log is compared, byte by byte, with the printed output.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

from bench import load_gate
from bench.contenders import BIN, ContenderFailed, Running, holdfast, raise_priority, redirected
from bench.paired_stats import OURS, PEER, PEER_AGAIN, compare, headline, interleave, machine, percentile, say, table

GOAL = 1.05
ROUNDS, QUICK_ROUNDS = 12, 2
ROTATED = "C"
LIMIT = "32MiB"
WRITERS = {"c": 15_000_000, "python": 250_000}
"""Lines that each rank prints in one turn."""
TURNS = 5
"""Turns of each start; its figure is their median."""
UNBUFFERED = {"PYTHONUNBUFFERED": "1"}
"""holdfast's environment for every rank; the redirect gets the same."""
WITHIN_S = 90.0

RANKS, LINES_A_SECOND = 64, 2000
FOLLOW_S, SETTLE_S = 10.0, 2.0
FOLLOW_ROUNDS, QUICK_FOLLOW_ROUNDS = 4, 1
SAMPLE_EVERY = 64
"""One line in this many is sampled, so that the measurement does not take CPU time from the measured process."""


def main() -> None:
    """Measure, and print a line per round and tables."""
    parser = argparse.ArgumentParser(prog="bench.logs", description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--quick", action="store_true", help=f"only {QUICK_ROUNDS} rounds")
    parser.add_argument("--only", choices=("print", "follow"))
    options = parser.parse_args()
    headline("logs: printing compared with a shell's redirect, following with tail -F")
    if options.only != "follow":
        _print_side(QUICK_ROUNDS if options.quick else options.rounds)
    if options.only != "print":
        _follow_side(QUICK_FOLLOW_ROUNDS if options.quick else FOLLOW_ROUNDS)


# Printing


@dataclass
class _Seen:
    """Measurements of one side's runs besides their time."""

    agents_kib: list[int]
    cpu_s: list[float]
    """CPU seconds of one turn of the rank, in kernel and user mode, for each start."""
    compared_bytes: int = 0
    dropped_bytes: int = 0


def _print_side(rounds: int) -> None:
    say("A sh redirect, B holdfast, C holdfast with logs.max_bytes=" + LIMIT)
    rows: list[tuple[str, ...]] = []
    for writer, lines in WRITERS.items():
        seen: dict[str, _Seen] = defaultdict(lambda: _Seen(agents_kib=[], cpu_s=[]))
        with tempfile.TemporaryDirectory(prefix="hfbench-") as folder:
            reference = Path(folder) / "reference"
            words = (writer, str(lines), str(TURNS))
            peer = partial(redirected, "printer.py", *words, env=UNBUFFERED)
            _printing_s(peer, reference, None)
            ours = partial(holdfast, "printer.py", *words, nodes=1, env=UNBUFFERED)
            sides: dict[str, Callable[[], AbstractContextManager[Running]]] = {
                PEER: peer,
                OURS: ours,
                PEER_AGAIN: peer,
                ROTATED: partial(ours, settings=(f"logs.max_bytes={LIMIT}",)),
            }
            measured = interleave(
                {name: partial(_printing_s, side, reference, seen[name]) for name, side in sides.items()},
                rounds,
                unit="s",
            )
            size = reference.stat().st_size / TURNS
        for name, what in ((OURS, "default"), (ROTATED, f"kept to {LIMIT}")):
            result = compare(measured, ours=name)
            cpu = compare([{side: seen[side].cpu_s[index] for side in sides} for index in range(rounds)], ours=name)
            own = seen[name]
            rows.append(
                (
                    f"{writer}, {size / median(each[PEER] for each in measured) / 1e6:,.0f} MB/s, {what}",
                    f"<= {GOAL}x",
                    f"{result.ratio}x",
                    str(result.floor),
                    f"{cpu.ratio}x",
                    str(rounds),
                    result.verdict(GOAL),
                    f"{max(own.agents_kib) / 1024:.0f} MiB",
                    f"0 of {own.compared_bytes / 1e6:,.0f} MB kept, {own.dropped_bytes / 1e6:,.0f} MB dropped",
                )
            )
    say("")
    say(
        table(
            ("rank that prints", "goal", "time", "A/A floor", "its CPU time", "rounds", "met", "agent at most", "lost"),
            rows,
        )
    )
    say("")


def _printing_s(side: Callable[[], AbstractContextManager[Running]], reference: Path, seen: _Seen | None) -> float:
    """Seconds of one turn, the median of a start's; compare the output with the reference, or make it the reference."""
    load_gate.wait_until_idle()
    with side() as running:
        if not running.wait_for(lambda: bool(_logs(running)), WITHIN_S):
            raise ContenderFailed(f"no rank started: {running.last_words()}")
        time.sleep(1.0)  # start-up has finished
        raise_priority(running.pids())
        (running.out / "go").touch()
        if not running.wait_for((running.out / "took").exists, WITHIN_S):
            raise ContenderFailed(f"not printed within {WITHIN_S:g} s: {running.last_words()}")
        took: list[tuple[float, float]] = json.loads((running.out / "took").read_text())
        if seen is not None:
            seen.cpu_s.append(sum(cpu_s for _, cpu_s in took) / len(took))
            seen.agents_kib += [_peak_kib(pid) for pid in running.pids() if b"holdfast.agent" in _argv(pid)] or [0]
        (running.out / "leave").touch()
        for command in running.commands:
            command.wait(WITHIN_S)
        (log,) = _logs(running)
        if seen is None:
            os.replace(log, reference)
        else:
            _compare(log, reference, seen)
    return median(wall_s for wall_s, _ in took)


def _logs(running: Running) -> list[Path]:
    return [*running.out.glob("log"), *running.folder.glob("home/runs/*/logs/attempt-0/rank-*.log")]


def _compare(log: Path, reference: Path, seen: _Seen) -> None:
    with log.open("rb") as ours, reference.open("rb") as theirs:
        size = os.fstat(ours.fileno()).st_size
        if size != os.fstat(theirs.fileno()).st_size:
            raise ContenderFailed(
                f"{size:,} bytes were written where {os.fstat(theirs.fileno()).st_size:,} were printed"
            )
        begin = os.lseek(ours.fileno(), 0, os.SEEK_DATA)
        theirs.seek(begin)
        while block := ours.read(1 << 20):
            if block != theirs.read(1 << 20):
                raise ContenderFailed("the retained log differs from the printed output")
    seen.compared_bytes += size - begin
    seen.dropped_bytes += begin


def _peak_kib(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+)", status)[1])  # type: ignore[index]


def _argv(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


# Following


@dataclass(frozen=True, kw_only=True)
class _Followed:
    """What one follower has shown in a period."""

    lags_s: list[float]
    lines_a_second: float
    cpu_share: float


def _follow_side(rounds: int) -> None:
    say(f"{RANKS} ranks of one run, {LINES_A_SECOND:,} lines a second each; lag is from a line's write to its reading")
    settings = (f"ranks_per_node={RANKS}",)
    followed: dict[str, list[_Followed]] = defaultdict(list)
    with holdfast("timed_lines.py", str(LINES_A_SECOND), nodes=1, settings=settings) as running:
        if not running.wait_for(lambda: len(list(running.out.glob("up-*"))) == RANKS, WITHIN_S):
            raise ContenderFailed(f"not all ranks are up: {running.last_words()}")
        environ = os.environ | {"HOLDFAST_HOME": str(running.folder / "home"), "NO_COLOR": "1"}
        tail = ["tail", "-q", "-n", "0", "-F", *map(str, _logs(running))]
        followers = {
            PEER: tail,
            OURS: [str(BIN / "holdfast"), "logs", "-f", "--tail", "0"],
            PEER_AGAIN: tail,
        }
        for index in range(rounds):
            for name, command in followers.items():
                one = _follow(command, environ)
                followed[name].append(one)
                say(f"{index + 1:3d}/{rounds}  {name:2}  {_told(one)}")
        (running.out / "leave").touch()
    say("")
    rows = [
        (what, *_row(followed[name]))
        for name, what in ((PEER, "tail -F"), (PEER_AGAIN, "tail -F again"), (OURS, "holdfast logs -f"))
    ]
    say(table(("follower", "lag p50", "p99", "most", "lines a second", "CPU of a core"), rows))
    say(machine())


def _follow(command: Sequence[str], environ: dict[str, str]) -> _Followed:
    lags_s: list[float] = []
    lines = 0
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environ) as follower:
        assert follower.stdout is not None
        pipe = follower.stdout.fileno()
        torn = os.read(pipe, 1 << 20)
        began = time.monotonic() + SETTLE_S
        used_s = 0.0
        while (now := time.monotonic()) < began + FOLLOW_S:
            data = os.read(pipe, 1 << 20)
            at = time.time()
            if now < began:
                used_s = load_gate.cpu_s(follower.pid)
                torn = b""
                continue
            whole = (torn + data).split(b"\n")
            torn = whole.pop()
            lines += len(whole)
            for line in whole[::SAMPLE_EVERY]:
                if written := re.search(rb"at=([0-9.]+) ", line):
                    lags_s.append(at - float(written[1]))
        used_s = load_gate.cpu_s(follower.pid) - used_s
        follower.terminate()
        follower.stdout.close()
    return _Followed(lags_s=lags_s, lines_a_second=lines / FOLLOW_S, cpu_share=used_s / FOLLOW_S)


def _told(one: _Followed) -> str:
    p50, p99, most, lines, cpu = _row([one])
    return f"lag p50 {p50}, p99 {p99}, most {most}; {lines} lines/s; {cpu} of a core"


def _row(several: list[_Followed]) -> tuple[str, str, str, str, str]:
    lags_s = [lag_s for one in several for lag_s in one.lags_s]
    return (
        f"{percentile(lags_s, 50) * 1e3:.0f} ms",
        f"{percentile(lags_s, 99) * 1e3:.0f} ms",
        f"{max(lags_s) * 1e3:.0f} ms",
        f"{median(one.lines_a_second for one in several):,.0f}",
        f"{median(one.cpu_share for one in several):.0%}",
    )


if __name__ == "__main__":
    main()
