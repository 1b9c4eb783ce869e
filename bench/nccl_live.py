"""How soon an agent has a verdict on a communicator: programs write NCCL's lines while its watch reads them."""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from bench.nccl_log_generator import Job, Version
from bench.paired_stats import say, table
from holdfast.agent.fabric_watch import FabricWatch
from holdfast.clock import Clock
from holdfast.events import FabricObserved
from holdfast.protocol.nccl_log_files import FILE
from holdfast.protocol.orders import StartRanks

GOAL_S = 5.0
NODES, ROUNDS = 2, 3
"""Nodes at a time, which share one process here, and how often."""
WAIT_S, POLL_S = 15.0, 0.05
"""Seconds after the last line for which reports are awaited."""
SMALL = Job(version=Version.of("2.27.7"), nodes=2, channels=16, replicas=2)
LARGE = replace(SMALL, nodes=2048, replicas=1024, filler=2500)
"""One of 2,048 nodes, whose ranks log 0.6 MB each."""
LOGGER = Path(__file__).parent / "programs" / "nccl_logger.py"


@dataclass(frozen=True, kw_only=True)
class _Node:
    """A node's prepared logs, its agent's folder, and what has been reported."""

    prepared: Path
    folder: Path
    reports: list[tuple[float, FabricObserved]]


def measure() -> None:
    """Measure both kinds of jobs, and print a table."""
    rows: list[tuple[str, ...]] = []
    for name, job in (("2 nodes of 8 ranks", SMALL), ("1 of 2,048 nodes", LARGE)):
        with tempfile.TemporaryDirectory(prefix="nccl-live-") as folder:
            size, delays = asyncio.run(_run(job, Path(folder)))
        spread = [statistics.median(delays), sorted(delays)[int(len(delays) * 0.95)], max(delays)]
        what = f"{name}, {size / 1e6:.1f} MB, {len(delays)} communicators"
        rows.append((what, " / ".join(f"{each:.2f} s" for each in spread), f"{GOAL_S:g} s"))
    say("\n" + table(("last line of a set-up → report", "median / 95 % / longest", "goal"), rows))


async def _run(job: Job, root: Path) -> tuple[int, list[float]]:
    size, delays = 0, list[float]()
    for turn in range(ROUNDS):
        nodes = [
            _Node(prepared=root / f"{turn}-{node}" / "prepared", folder=root / f"{turn}-{node}", reports=[])
            for node in range(NODES)
        ]
        size = max([_prepare(job, node.prepared) for node in nodes])
        for found in await asyncio.gather(*map(_watch, nodes)):
            delays += found
    return size, delays


def _prepare(job: Job, folder: Path) -> int:
    """Write what each rank of a node logs up to the end of each communicator's set-up; returns the bytes."""
    for rank in range(job.gpus):
        *parts, _ = b"".join(job.log(rank)).split(b"Init COMPLETE\n")
        for number, part in enumerate(parts):
            (folder / str(number)).mkdir(parents=True, exist_ok=True)
            (folder / str(number) / f"rank-{rank}").write_bytes(part + b"Init COMPLETE\n")
    return sum(path.stat().st_size for path in folder.glob("*/*"))


async def _watch(node: _Node) -> list[float]:
    """Seconds from the last line of each communicator's set-up to its report."""
    start = StartRanks(replica=0, attempt=0, ranks=(), env={}, fabric="infiniband", nccl_logs=True)

    def send(seen: FabricObserved) -> None:
        node.reports.append((time.time(), seen))

    watch = FabricWatch(start, node=0, folder=node.folder, clock=Clock(), send=send)
    private = Path(watch.env_defaults(0, ())[FILE]).parent
    watch.start()
    program = await asyncio.create_subprocess_exec(
        sys.executable, str(LOGGER), str(node.prepared), str(private), stdout=asyncio.subprocess.PIPE
    )
    assert program.stdout is not None
    written = [float(line) async for line in program.stdout]
    await program.wait()
    until = time.monotonic() + WAIT_S
    while len(_first(node.reports)) < len(written) and time.monotonic() < until:  # noqa: ASYNC110 - no bell rings
        await asyncio.sleep(POLL_S)
    watch.stop()
    return [at - end for at, end in zip(_first(node.reports), written, strict=True)]


def _first(reports: Sequence[tuple[float, FabricObserved]]) -> list[float]:
    """When all communicators of a size, which are set up together, had been reported, in order."""
    first: dict[tuple[int, str], float] = {}
    for at, seen in reports:
        first.setdefault((seen.size, seen.communicator), at)
    return sorted(max(at for (size, _), at in first.items() if size == each) for each in {size for size, _ in first})
