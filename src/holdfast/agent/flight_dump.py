"""Collects the flight recorder dumps of a hung rank, and reduces them to its position in each process group.

NCCL groups dump by themselves when something is written to their pipe, a Session does for Gloo. Neither answers in a
rank that is stopped, or that has not made its groups yet.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from msgspec import Struct

from holdfast.diagnose.log_chunk import LogSource
from holdfast.diagnose.structured import flight_recorder
from holdfast.diagnose.structured.flight_recorder import FlightDump
from holdfast.diagnose.structured.flight_summary import summarise
from holdfast.events import GroupCollectives
from holdfast.protocol.flight_recorder_files import (
    DUMP_PREFIX,
    GLOO,
    NCCL_PIPE_PREFIX,
    dump_path,
    nccl_pipe,
    session_pipe,
)

NCCL_TIMEOUT_S = 2.5
"""Longest wait for the dump of NCCL groups, whose thread reads its pipe once per second."""
SESSION_TIMEOUT_S = 1.0
"""Longest wait for a Session, which needs 40 ms; a thread that keeps the GIL lets none answer."""
POLL_S = 0.02
_CLOCK_TICK_NS = 20_000_000
"""The times of files are this much coarser than the clock."""
MAX_DUMP_BYTES = 32 << 20
"""Most bytes read of a dump; one of 1,000 collectives has about 1 MB."""


class RankCollectives(Struct, frozen=True, kw_only=True):
    """What a rank's flight recorders show; empty if they did not answer."""

    files: tuple[str, ...] = ()
    collectives: tuple[GroupCollectives, ...] = ()


class _Recorder(Struct, frozen=True, kw_only=True):
    pipe: Path
    dump: Path
    """The file that is written last."""
    timeout_s: float


class FlightRecorders:
    """The flight recorders of one attempt's ranks on this node; `folder` keeps their dumps."""

    def __init__(self, folder: Path, attempt: int) -> None:
        self._prefix = f"{folder}/flight-attempt-{attempt}-rank-"
        self._environ: dict[int, Mapping[str, str]] = {}
        self._reading = asyncio.Semaphore(1)
        """Dumps are parsed one at a time, so that the agent keeps a core for its messages."""

    def env_defaults(self, socket: Path) -> dict[str, str]:
        """Where a rank's recorders take requests and dump, unless its job says otherwise."""
        return {DUMP_PREFIX: self._prefix, NCCL_PIPE_PREFIX: f"{socket}-nccl-"}

    def add(self, ranks: Iterable[int], environ: Mapping[str, str]) -> None:
        """Ranks start with this environment."""
        self._environ |= dict.fromkeys(ranks, environ)

    async def dump(self, rank: int) -> RankCollectives:
        """Have a rank's recorders dump; returns their files, and the rank's positions."""
        started = time.time_ns() - _CLOCK_TICK_NS
        asked = [recorder for recorder in self._recorders(rank) if _request(recorder.pipe)]
        if not asked:
            return RankCollectives()
        prefix = self._environ[rank][DUMP_PREFIX]
        found: dict[Path, FlightDump] = {}
        deadline = time.monotonic() + max(recorder.timeout_s for recorder in asked)
        while time.monotonic() < deadline and not all(recorder.dump in found for recorder in asked):
            await asyncio.sleep(POLL_S)
            for file in _dumps(prefix, rank):
                if file not in found and _is_newer(file, started):
                    async with self._reading:
                        if (dump := await asyncio.to_thread(_read, file, rank)) is not None:
                            found[file] = dump
        if not found:
            return RankCollectives()
        files = sorted(found)
        whole = flight_recorder.merged([found[file] for file in files])
        return RankCollectives(files=tuple(map(str, files)), collectives=summarise(whole))

    def close(self) -> None:
        """Remove the pipes; the dumps stay."""
        for rank in self._environ:
            for recorder in self._recorders(rank):
                with contextlib.suppress(OSError):
                    recorder.pipe.unlink()

    def _recorders(self, rank: int) -> list[_Recorder]:
        environ = self._environ.get(rank)
        if environ is None or not (prefix := environ.get(DUMP_PREFIX)):
            return []
        found: list[_Recorder] = []
        if pipes := environ.get(NCCL_PIPE_PREFIX):
            found.append(_Recorder(pipe=nccl_pipe(pipes, rank), dump=dump_path(prefix, rank), timeout_s=NCCL_TIMEOUT_S))
        if socket := environ.get("HOLDFAST_RANK_SOCKET"):
            pipe, dump = session_pipe(Path(socket), rank), dump_path(prefix, rank, GLOO)
            found.append(_Recorder(pipe=pipe, dump=dump, timeout_s=SESSION_TIMEOUT_S))
        return found


def _request(pipe: Path) -> bool:
    """Write to a pipe that somebody reads; whether there is one."""
    try:
        descriptor = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return os.write(descriptor, b"\n") == 1
    except OSError:
        return False
    finally:
        os.close(descriptor)


def _dumps(prefix: str, rank: int) -> list[Path]:
    """A rank's dump files, complete or not."""
    nccl = dump_path(prefix, rank)
    others = nccl.parent.glob(f"{nccl.name}.*")
    return [nccl, *(path for path in others if not path.suffix[1:].isdecimal())]


def _is_newer(path: Path, than_ns: int) -> bool:
    try:
        return path.stat().st_mtime_ns >= than_ns
    except OSError:
        return False


def _read(path: Path, rank: int) -> FlightDump | None:
    """A dump; None while it is being written, or if it is none."""
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_DUMP_BYTES + 1)
    except OSError:
        return None
    return flight_recorder.read(LogSource(name=str(path), rank=rank), data) if len(data) <= MAX_DUMP_BYTES else None
