"""Owns one started process of a rank: its start, its output file, its signals, and how it ended."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import signal
import subprocess
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import BinaryIO

from holdfast.agent.coordinator import bind_address
from holdfast.agent.held import Cold, Wanted
from holdfast.agent.lasterror import last_error
from holdfast.agent.lastwords import LastWords, last_words
from holdfast.agent.memory import MemoryWitness, before, out_of_memory
from holdfast.agent.port import taken
from holdfast.clock import Clock
from holdfast.events import RankExit
from holdfast.events.orders import RankLaunch
from holdfast.host.files import private
from holdfast.host.limits import become_rank
from holdfast.host.processes import descendants, marked, send
from holdfast.shortage import lacking, room_in

LARGEST = 3
"""Arguments and variables that are named where they are too large together."""

SHELL_SIGNAL = 128
"""What a shell, apptainer or srun adds to the number of the signal that ended its child, for its own exit code."""

_FATAL = frozenset((signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGKILL, signal.SIGSEGV))

Fork = Callable[[Wanted, int], Awaitable[int]]
"""Starts a rank, that writes to a descriptor, as a fork of its held program; raises Cold where there is none."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a rank's process ended; the fields are those of `RankExited`."""

    at: float
    how: RankExit
    code: int
    stopped: bool = False
    error: str = ""
    evidence: str = ""
    culprit: int = -1
    log: str = ""


class RankProcess:
    """A rank's process; its output goes straight into its log file, and it dies when the agent dies."""

    def __init__(self, launch: RankLaunch, socket: Path, clock: Clock) -> None:
        self.launch = launch
        self._clock = clock
        self.rank = launch.rank
        self.pid = 0
        self.ended: Ended | None = None
        self._concluded: int | None = None
        """The exit code that it counts as ended with, once it was killed after its program had ended."""
        self._stop_signals: set[signal.Signals] = set()
        """Signals by which we have asked it to end."""
        self.socket = socket
        """Where it reaches its agent."""
        self._witness: MemoryWitness | None = None
        self._cwd = Path(launch.cwd)
        self.warm = False
        """Whether its imports were done before it was started."""

    @property
    def running(self) -> bool:
        return self.pid > 0 and self.ended is None

    @property
    def ended_well(self) -> bool:
        ended = self.ended
        return ended is not None and not ended.stopped and ended.how.is_well(ended.code)

    @property
    def ranks(self) -> range:
        """The ranks it stands for: its own, or those that it starts."""
        return range(self.rank, self.rank + self.launch.ranks)

    def pids(self) -> dict[int, int]:
        """The process of each rank it stands for; its own for those whose cannot be told from it."""
        if self.launch.ranks == 1:
            return {self.rank: self.pid}
        below = descendants(self.pid)
        found = (
            (rank, marked(below, RANK=str(rank)) or marked(below, OMPI_COMM_WORLD_RANK=str(rank)))
            for rank in self.ranks
        )
        return {rank: next(iter(pids), self.pid) for rank, pids in found}

    @property
    def copies(self) -> bool:
        """Whether it copies its state to another node's memory."""
        return self.launch.ranks == 1 and "HOLDFAST_PEER_COPIES" in self.launch.env

    def wanted(self, code: Path, memory: Mapping[str, str], group: Path | None = None) -> Wanted:
        """What it is to be started as, in the folder of its code; `memory` tells where it may leave its state.

        It and what it starts are in the cgroup `group`, where there is one.
        """
        ours = {"HOLDFAST_RANK_SOCKET": str(self.socket)}
        if self.launch.ranks == 1:
            ours |= memory
        cwd = code / self.launch.cwd
        ours |= bind_address(self.launch.argv, cwd, self.launch.env.get("JAX_COORDINATOR_ADDRESS", ""))
        environ = self.launch.defaults | os.environ | self.launch.env | ours
        return Wanted(rank=self.rank, argv=self.launch.argv, cwd=cwd, environ=environ, code=code, group=group)

    async def start(self, on_end: Callable[[RankProcess], None], wanted: Wanted, fork: Fork | None = None) -> None:
        """Start it, as a fork of its held program where there is one; `on_end` is called when it has ended or could
        not be started.
        """
        log = Path(self.launch.log)
        self._cwd = wanted.cwd
        self._witness = before()
        try:
            log.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            for path, text in self.launch.files.items():
                _write_private(path, text)
            with _appended(log) as output:
                pid = await self._warm(fork, wanted, output.fileno()) or _cold(wanted, output.fileno())
            self.pid = pid
            descriptor = os.pidfd_open(pid)
        except (OSError, subprocess.SubprocessError, ValueError) as error:
            number = 127 if isinstance(error, FileNotFoundError) else 126
            words, evidence = self._with_shortage(f"{self.launch.argv[0]}: {error}")
            if isinstance(error, OSError) and error.errno == errno.E2BIG:
                evidence = _largest(wanted)
            ended = Ended(at=self._clock(), how=RankExit.NOT_STARTED, code=number, error=words, evidence=evidence)
            if self.pid:  # it runs, and cannot be watched
                self.pid = _undone(self.pid)
            self.give_up(ended, on_end)
            return
        asyncio.get_running_loop().add_reader(descriptor, self._reap, descriptor, on_end)

    async def _warm(self, fork: Fork | None, wanted: Wanted, log: int) -> int:
        """Its number as a fork; 0 where it is to be started cold."""
        if fork is None:
            return 0
        try:
            pid = await fork(wanted, log)
        except Cold:
            return 0
        self.warm = True
        return pid

    def give_up(self, ended: Ended, on_end: Callable[[RankProcess], None]) -> None:
        """Have it ended without a process."""
        self.ended = ended
        asyncio.get_running_loop().call_soon(on_end, self)

    def disown(self, rank: int) -> None:
        """It ended well, and yet a rank that it had started is at work: somebody else ended it."""
        assert self.ended is not None
        evidence = f"rank {rank} was at work"
        self.ended = replace(self.ended, how=RankExit.LEFT_RANKS, evidence=evidence, log=self.launch.log)

    def signal(self, number: signal.Signals, *, group: bool = False) -> None:
        """Send a signal to it, or to its whole process group; nothing happens when it has ended."""
        if not self.running:
            return
        try:
            if group:
                os.killpg(self.pid, number)
            else:
                os.kill(self.pid, number)
        except ProcessLookupError:
            pass

    def stop(self, number: signal.Signals) -> None:
        """End it on purpose; how it ends for that is no failure."""
        self._stop_signals.add(number)
        if self.launch.stop_below and number is signal.SIGTERM and self.running and (below := descendants(self.pid)):
            for pid in below:
                send(pid, number)
        else:
            self.signal(number, group=True)

    def conclude(self, code: int) -> None:
        """Kill it: its program has ended with this exit code, and its process has not."""
        self._concluded = code
        self.signal(signal.SIGKILL, group=True)

    def clear_away(self) -> None:
        """Remove the folder beside its socket, where it may keep what must not outlive it."""
        shutil.rmtree(f"{self.socket}.d", ignore_errors=True)

    def _reap(self, descriptor: int, on_end: Callable[[RankProcess], None]) -> None:
        at = self._clock()
        asyncio.get_running_loop().remove_reader(descriptor)
        os.close(descriptor)
        try:
            end = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        except ChildProcessError:  # killed and reaped with all that its attempt left, when the agent leaves
            status = -signal.SIGKILL
        else:
            if not self._ends_well(end):
                # Children it left in its process group end with it; nobody else has its number until it is reaped.
                try:
                    os.killpg(self.pid, signal.SIGKILL)
                except (ProcessLookupError, PermissionError):
                    pass
            status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        if self._concluded is not None and not self._stop_signals and status == -signal.SIGKILL:
            status = self._concluded
        self.ended = self._classify(at, status)
        on_end(self)

    def _ends_well(self, end: os.waitid_result | None) -> bool:
        """Whether it has ended by itself with code 0, asked before it is reaped."""
        return not self._stop_signals and end is not None and (end.si_code, end.si_status) == (os.CLD_EXITED, 0)

    def _classify(self, at: float, status: int) -> Ended:
        if status == 0 or self._was_stopped(status):
            how = RankExit.CODE if status >= 0 else RankExit.SIGNAL
            return Ended(at=at, how=how, code=abs(status), stopped=bool(self._stop_signals))
        error, place = last_error(Path(self.launch.log))
        words = last_words(Path(self.launch.log)) if status > 0 else None
        passed_on = words is None and status - SHELL_SIGNAL in _FATAL
        if status > 0 and not passed_on:
            error, evidence = self._with_shortage(error)
            port = int(self.launch.env.get("MASTER_PORT", "0"))
            if port and (stranger := taken(error, port)):
                return Ended(at=at, how=RankExit.PORT_TAKEN, code=status, error=error, evidence=stranger, log=place)
            ended = Ended(at=at, how=RankExit.CODE, code=status, error=error, evidence=evidence, log=place)
            return self._in_its_own_words(ended, words)
        number = status - SHELL_SIGNAL if passed_on else -status
        evidence = f"exit code {status}: its command passed on how its own child ended" if passed_on else ""
        starved = ""
        if number == signal.SIGKILL and self._witness is not None:
            starved = out_of_memory(self._witness, self.pid)
        how = RankExit.OUT_OF_MEMORY if starved else RankExit.SIGNAL
        return Ended(at=at, how=how, code=number, error=error, evidence=starved or evidence, log=place)

    def _in_its_own_words(self, ended: Ended, words: LastWords | None) -> Ended:
        """A launcher's end as that of the rank it names; one that a signal ended has written no error."""
        if words is None or ended.evidence:
            return ended
        who = "one of its ranks" if words.rank < 0 else f"rank {words.rank}"
        evidence = f"its launcher says that {who} ended first"
        if words.code < 0:
            return Ended(
                at=ended.at,
                how=RankExit.SIGNAL,
                code=-words.code,
                evidence=evidence,
                culprit=words.rank,
                log=self.launch.log,
            )
        return replace(ended, code=words.code, evidence=evidence, culprit=words.rank)

    def _with_shortage(self, error: str) -> tuple[str, str]:
        """An error with the state of its disk, where it speaks of that; a full disk may hold no word of it."""
        log = Path(self.launch.log)
        if not error and (refusal := lacking(log)) is not None:
            error = f"{log.name} could not be written: {refusal}"
        return error, "; ".join(room_in(error, self._cwd, log))

    def _was_stopped(self, status: int) -> bool:
        """Whether it ended because we asked; SIGKILL leaves it no other way to end, SIGTERM may be answered by any."""
        return signal.SIGTERM in self._stop_signals or (bool(self._stop_signals) and -status in self._stop_signals)


def _cold(wanted: Wanted, log: int) -> int:
    """Start a process; its number."""
    process = subprocess.Popen(
        wanted.argv,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        env=wanted.environ,
        cwd=wanted.cwd,
        start_new_session=True,
        preexec_fn=partial(become_rank, wanted.group),  # noqa: PLW1509 - the agent has no other threads
    )
    process.returncode = 0  # It is reaped by its number, like one that was forked, and not by this object.
    return process.pid


def _undone(pid: int) -> int:
    """End a process that was started; the number of no process."""
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return 0


def _appended(log: Path) -> BinaryIO:
    return open(log, "ab", opener=private)


def _write_private(path: str, text: str) -> None:
    with open(path, "w", opener=private) as file:
        file.write(text)


def _largest(wanted: Wanted) -> str:
    """What of a command line and its environment takes the most room."""
    sizes = {f"variable {name}": len(name) + len(os.fsencode(value)) + 2 for name, value in wanted.environ.items()}
    sizes |= {f"argument {number}": len(os.fsencode(word)) + 1 for number, word in enumerate(wanted.argv)}
    largest = sorted(sizes, key=lambda name: sizes[name], reverse=True)[:LARGEST]
    named = ", ".join(f"{name}: {sizes[name]:,} bytes" for name in largest)
    return f"{sum(sizes.values()):,} bytes of arguments and environment; {named}"
