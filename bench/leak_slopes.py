"""Resource use of a run over time: descriptors, threads, memory, processes, files; sampled repeatedly.

A leak is a slope. Controllers and agents restart, so a slope is fitted within the lifetime of each process, without the
first sample, which precedes warm-up, and then over all of them.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from holdfast.host.processes import all_pids
from holdfast.launch.local import socket_dir
from holdfast.run_dir import RunDir

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One figure of one process (or of the whole run, with pid 0) after `fault` requested faults."""

    fault: int
    who: str
    what: str
    pid: int
    value: float


@dataclass(frozen=True, kw_only=True)
class Trend:
    """The trend of one figure over a run."""

    who: str
    what: str
    first: float
    last: float
    slope: float | None
    """Per hundred faults; None when no process was sampled often enough."""
    processes: int


def samples(run: RunDir, fault: int) -> list[Sample]:
    """Sample everything now; skip what exits meanwhile."""
    taken: list[Sample] = []
    for who, pid in _holdfast_processes(run):
        try:
            figures = _figures(pid)
        except (OSError, ValueError):
            continue
        taken.extend(Sample(fault=fault, who=who, what=what, pid=pid, value=value) for what, value in figures.items())
    whole = {
        "processes": float(len(processes_of(run))),
        "socket folders": float(len(socket_folders(run))),
        "files": float(sum(len(files) for _, _, files in os.walk(run.path))),
        "event log, MiB": run.events.stat().st_size / 2**20,
    }
    return [*taken, *(Sample(fault=fault, who="run", what=what, pid=0, value=value) for what, value in whole.items())]


def trends(taken: Sequence[Sample]) -> list[Trend]:
    """One for each figure, in the order in which they were first seen."""
    series: dict[tuple[str, str], list[Sample]] = defaultdict(list)
    for sample in taken:
        series[sample.who, sample.what].append(sample)
    return [
        Trend(
            who=who,
            what=what,
            first=group[0].value,
            last=group[-1].value,
            slope=_slope(group),
            processes=len({sample.pid for sample in group}),
        )
        for (who, what), group in series.items()
    ]


def load_samples(path: Path) -> list[Sample]:
    """Samples from an earlier part of a soak."""
    return [Sample(**json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []


def append_samples(path: Path, taken: Iterable[Sample]) -> None:
    """Add samples to a file."""
    with path.open("a") as file:
        file.writelines(json.dumps(asdict(sample)) + "\n" for sample in taken)


def processes_of(run: RunDir) -> list[int]:
    """Every process of a run: its supervisor and controllers by their arguments, all others by their marks."""
    marks = (f"HOLDFAST_NODE={run.run_id}/".encode(), f"HOLDFAST_RUN={run.run_id}".encode())
    folder = os.fsencode(run.path)
    return [
        pid
        for pid in all_pids()
        if folder in _read(pid, "cmdline") or any(word.startswith(marks) for word in _read(pid, "environ").split(b"\0"))
    ]


def socket_folders(run: RunDir) -> list[Path]:
    """Directories for ranks' sockets that a run currently has."""
    return [folder for node in run.nodes.glob("*") for folder in socket_dir.existing(node)]


def _holdfast_processes(run: RunDir) -> Iterator[tuple[str, int]]:
    for pid in processes_of(run):
        words = _read(pid, "cmdline").split(b"\0")
        for module, who in ((b"local_supervisor", "supervisor"), (b"server", "controller"), (b"agent", "agent")):
            if b"-m" in words and words[words.index(b"-m") + 1].split(b".")[-1] == module:
                yield who, pid


def _figures(pid: int) -> dict[str, float]:
    resident = int(_read(pid, "statm").split()[1]) * PAGE_BYTES
    return {
        "descriptors": float(len(os.listdir(f"/proc/{pid}/fd"))),
        "threads": float(len(os.listdir(f"/proc/{pid}/task"))),
        "memory, MiB": resident / 2**20,
    }


def _slope(group: Sequence[Sample]) -> float | None:
    """Least squares over all processes, each with a separate offset."""
    lives: dict[int, list[Sample]] = defaultdict(list)
    for sample in group:
        lives[sample.pid].append(sample)
    rise = run = 0.0
    for life in (samples[1:] for samples in lives.values() if len(samples) > 1):
        middle = sum(sample.fault for sample in life) / len(life)
        level = sum(sample.value for sample in life) / len(life)
        rise += sum((sample.fault - middle) * (sample.value - level) for sample in life)
        run += sum((sample.fault - middle) ** 2 for sample in life)
    return 100 * rise / run if run else None


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""
