"""How fast a large log is diagnosed on one core, compared with Python's re on each line and grep -c.

.venv/bin/python -m bench.large_log [--quick]

The log is generated: steps and data loading of many ranks, and one line in two hundred about a closed connection, so
that at most a hundredth of it matters. Each side reads the same file from the page cache in a separate process. The
figure is its CPU time, since the claim is about one core and the machine is shared. The peers match eight plain
strings, holdfast every rule. Its start-up (imports, preparing the rules) is measured before each round, on a file of
the same size that is a hole except for its first page, and subtracted.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench.paired_stats import headline, say, table

MIB = 1 << 20
LINES = (
    "2026-11-20T10:00:{:02d}.123Z [rank{}]: step {} loss {:.4f} grad_norm 0.412 lr 3.0e-4 tokens/s 91234 mem 61.2GiB",
    "[2026-11-20 10:00:{:02d},123] [INFO] [rank {}] iteration {} | elapsed {:.2f} ms | lm loss: 2.4113E+00 | tok 88123",
    "10:00:{:02d} INFO dataloader: worker {} fetched shard {} in {:.3f} s (48.1 MB), cache hit 93, ratio 0.91",
)
RELEVANT = "n1:8:9 [0] misc/socket.cc:49 NCCL WARN socketProgress: Connection closed by remote peer n3<51159>"
WORDS = "CUDA out of memory|Connection closed|Socket recv failed|Traceback|NVRM|oom-kill|Watchdog caught|unhandled"
HOLDFAST = "from pathlib import Path; from holdfast import api; print(api.diagnose([Path({path!r})]).failure_class)"
RE = (
    "import re; f = re.compile({words!r}).search; print(sum(1 for line in open({path!r}, errors='replace') if f(line)))"
)


def main() -> None:
    """Measure in turn, and print rates and peak memory."""
    parser = argparse.ArgumentParser(prog="bench.large_log", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a small log, once")
    quick = parser.parse_args().quick
    size, rounds = (64 * MIB, 1) if quick else (256 * MIB, 3)
    headline("diagnosing a large log")
    with tempfile.TemporaryDirectory() as folder:
        log, empty = Path(folder) / "all.log", Path(folder) / "none.log"
        with log.open("w") as file:
            file.writelines(_lines(size))
        with empty.open("w") as file:
            file.write("nothing\n" * 512)
            file.truncate(log.stat().st_size)
        sides = {
            "holdfast diagnose": [sys.executable, "-c", HOLDFAST.format(path=str(log))],
            "python re, each line": [sys.executable, "-c", RE.format(words=WORDS, path=str(log))],
            "grep -c -E": ["grep", "-c", "-E", WORDS, str(log)],
        }
        out = Path(folder) / "out"
        start = [sys.executable, "-c", HOLDFAST.format(path=str(empty))]
        taken: dict[str, list[tuple[float, int]]] = {name: [] for name in sides}
        for _ in range(rounds):
            for name, command in sides.items():
                start_s = _measured(start, out)[0] if name.startswith("holdfast") else 0.0
                cpu_s, peak = _measured(command, out)
                taken[name].append((cpu_s - start_s, peak))
        size = log.stat().st_size
    say(f"log of {size / MIB:.0f} MiB")
    rows = [_row(name, size, runs) for name, runs in taken.items()]
    say(table(("side", "MB/s of CPU time, median", "least", "most", "peak memory, MiB"), rows))


def _lines(size: int) -> Iterator[str]:
    chance, written = random.Random(1), 0
    while written < size:
        line = RELEVANT if chance.random() < 0.005 else chance.choice(LINES)
        line = (
            line.format(chance.randrange(60), chance.randrange(4096), chance.randrange(99_999), chance.random()) + "\n"
        )
        written += len(line)
        yield line


def _measured(command: Sequence[str], out: Path) -> tuple[float, int]:
    """CPU seconds and peak bytes of a process; its output goes to a file, because grep reads less for /dev/null."""
    quiet = [(os.POSIX_SPAWN_OPEN, 1, str(out), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)]
    pid = os.posix_spawnp(command[0], command, os.environ, file_actions=quiet)
    _, status, usage = os.wait4(pid, 0)
    if os.waitstatus_to_exitcode(status) != 0:
        raise SystemExit(f"{command[0]} failed")
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024


def _row(name: str, size: int, runs: Sequence[tuple[float, int]]) -> Sequence[str]:
    rates = [size / cpu_s / 1e6 for cpu_s, _ in runs]
    peak = max(peak for _, peak in runs) / MIB
    return (name, *(f"{rate:.0f}" for rate in (statistics.median(rates), min(rates), max(rates))), f"{peak:.0f}")


if __name__ == "__main__":
    sys.exit(main())
