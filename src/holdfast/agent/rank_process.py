"""One rank process: its start, its log file, its signals, and its exit."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import BinaryIO

from msgspec import Struct
from msgspec.structs import replace

from holdfast.agent.device_evidence import device_evidence
from holdfast.agent.error_line import last_error_line
from holdfast.agent.jax_coordinator import bind_address_env
from holdfast.agent.launcher_report import LauncherReport, error_of_first_rank, read_launcher_report
from holdfast.agent.nccl_warnings import nccl_warnings
from holdfast.agent.oom import OomSnapshot, oom_evidence, oom_snapshot
from holdfast.agent.rendezvous_port import port_conflict
from holdfast.agent.step_clock import step_clock_file, with_step_clock
from holdfast.agent.zygote import ColdStart, RankCommand
from holdfast.clock import Clock
from holdfast.errors import ExitCode
from holdfast.events import DeviceFault, ExitReason
from holdfast.host.files import private_opener
from holdfast.host.kernel_log import KERNEL_LOG
from holdfast.host.process_limits import become_rank
from holdfast.host.processes import by_env, descendants, send_signal
from holdfast.os_errors import probe_disk, room_in
from holdfast.protocol.nccl_log_files import FILE
from holdfast.protocol.orders import RankLaunch

MAX_LARGEST_SHOWN = 3
"""Most arguments and variables named when the command line and environment are too large."""

SHELL_SIGNAL = 128
"""A shell, apptainer or srun adds this to the signal number that ended its child, for its own exit code."""

KERNEL_LOG_WINDOW_US = 600 * 1_000_000
"""How long before a rank's end the kernel may have logged its cause: NCCL's default timeout, after which ranks end."""

_FATAL = frozenset((signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGKILL, signal.SIGSEGV))

ForkFunction = Callable[[RankCommand, int], Awaitable[int]]
"""Starts a rank as a fork of its zygote, with output to a descriptor; raises ColdStart if there is no zygote."""


class ProcessExit(Struct, frozen=True, kw_only=True):
    """How a rank's process exited; the fields are those of `RankExited`."""

    at: float
    reason: ExitReason
    code: int
    stopped: bool = False
    error: str = ""
    evidence: str = ""
    device_fault: DeviceFault | None = None
    first_failed_rank: int = -1
    error_location: str = ""


class RankProcess:
    """A rank's process; it writes to its log file directly, and is killed when the agent dies."""

    def __init__(self, launch: RankLaunch, socket: Path, clock: Clock, kernel_log: Path = KERNEL_LOG) -> None:
        self.launch = launch
        self._clock = clock
        self.rank = launch.rank
        self.pid = 0
        self.exit: ProcessExit | None = None
        self._program_exit_code: int | None = None
        """Exit code of the program, which counts as the rank's if the agent kills the process afterwards."""
        self._stop_signals: set[signal.Signals] = set()
        """Signals that the agent sent to stop it."""
        self.socket = socket
        """Path of the socket on which it reaches its agent."""
        self._oom_before: OomSnapshot | None = None
        self._kernel_log = kernel_log
        self._cwd = Path(launch.cwd)
        self._nccl_file = ""
        """Where NCCL logs, if that is the private file."""
        self._started_at = 0.0
        """Seconds of the system's clock, as files have them."""
        self.prewarmed = False
        """Whether it was forked from a zygote."""

    @property
    def running(self) -> bool:
        return self.pid > 0 and self.exit is None

    @property
    def succeeded(self) -> bool:
        ended = self.exit
        return ended is not None and not ended.stopped and ended.reason.is_success(ended.code)

    @property
    def failed(self) -> bool:
        """Whether it ended, and not because the agent stopped it or its program was done."""
        ended = self.exit
        return ended is not None and not (ended.stopped or ended.reason.is_success(ended.code))

    @property
    def ranks(self) -> range:
        """The ranks of this process: its own, or those that it launches."""
        return range(self.rank, self.rank + self.launch.rank_count)

    def pids(self) -> dict[int, int]:
        """The pid of each of its ranks; its own pid for those that cannot be found among its descendants."""
        if self.launch.rank_count == 1:
            return {self.rank: self.pid}
        below = descendants(self.pid)
        found = (
            (rank, by_env(below, RANK=str(rank)) or by_env(below, OMPI_COMM_WORLD_RANK=str(rank)))
            for rank in self.ranks
        )
        return {rank: next(iter(pids), self.pid) for rank, pids in found}

    @property
    def has_peer_checkpoint(self) -> bool:
        """Whether it keeps a peer checkpoint in another node's memory."""
        return self.launch.rank_count == 1 and "HOLDFAST_PEER_CHECKPOINTS" in self.launch.env

    def command(
        self, code: Path, memory: Mapping[str, str], defaults: Mapping[str, str], cgroup: Path | None = None
    ) -> RankCommand:
        """The command to start, in its code folder; `memory` holds the variables that name its memfds.

        The environments of the node and of the job override `defaults`. The process enters `cgroup`, if there is one,
        and its children with it.
        """
        ours = {"HOLDFAST_RANK_SOCKET": str(self.socket)}
        if self.launch.rank_count == 1:
            ours |= memory
        cwd = code / self.launch.cwd
        ours |= bind_address_env(self.launch.argv, cwd, self.launch.env.get("JAX_COORDINATOR_ADDRESS", ""))
        environ = with_step_clock({**defaults, **self.launch.env_defaults, **os.environ, **self.launch.env, **ours})
        self._nccl_file = defaults.get(FILE, "") if environ.get(FILE) == defaults.get(FILE) else ""
        return RankCommand(
            rank=self.rank, argv=self.launch.argv, cwd=cwd, environ=environ, code_dir=code, cgroup=cgroup
        )

    async def start(
        self, on_exit: Callable[[RankProcess], None], command: RankCommand, fork: ForkFunction | None = None
    ) -> None:
        """Start the process, forking its zygote if there is one; call `on_exit` when it exits or fails to start."""
        log = Path(self.launch.log)
        self._cwd, self._started_at = command.cwd, time.time()
        self._oom_before = oom_snapshot()
        try:
            log.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            for path, text in self.launch.files.items():
                _write_private(path, text)
            with _open_log(log) as output:
                pid = await self._fork_from_zygote(fork, command, output.fileno()) or _spawn(command, output.fileno())
            self.pid = pid
            descriptor = os.pidfd_open(pid)
        except (OSError, subprocess.SubprocessError, ValueError) as error:
            missing = isinstance(error, FileNotFoundError)
            number = ExitCode.PROGRAM_NOT_FOUND if missing else ExitCode.NOT_EXECUTABLE
            message, evidence = self._with_disk_space(f"{self.launch.argv[0]}: {error}")
            if isinstance(error, OSError) and error.errno == errno.E2BIG:
                evidence = _largest_arguments(command)
            ended = ProcessExit(
                at=self._clock(), reason=ExitReason.NOT_STARTED, code=number, error=message, evidence=evidence
            )
            if self.pid:  # it runs, but cannot be watched
                self.pid = _kill_and_reap(self.pid)
            self.end_without_process(ended, on_exit)
            return
        asyncio.get_running_loop().add_reader(descriptor, self._reap, descriptor, on_exit)

    async def _fork_from_zygote(self, fork: ForkFunction | None, command: RankCommand, log: int) -> int:
        """Return the pid of the fork, or 0 if the rank must start cold."""
        if fork is None:
            return 0
        try:
            pid = await fork(command, log)
        except ColdStart:
            return 0
        self.prewarmed = True
        return pid

    def end_without_process(self, ended: ProcessExit, on_exit: Callable[[RankProcess], None]) -> None:
        """Record an exit for a process that was never started."""
        self.exit = ended
        asyncio.get_running_loop().call_soon(on_exit, self)

    def mark_orphaned_ranks(self, rank: int) -> None:
        """The launcher exited successfully while one of its ranks still runs: something else ended the launcher."""
        assert self.exit is not None
        evidence = f"rank {rank} was at work"
        self.exit = replace(
            self.exit, reason=ExitReason.ORPHANED_RANKS, evidence=evidence, error_location=self.launch.log
        )

    def signal(self, number: signal.Signals, *, group: bool = False) -> None:
        """Send a signal to the process or its process group; do nothing if it has exited."""
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
        """Stop the process; its exit then does not count as a failure."""
        self._stop_signals.add(number)
        if (
            self.launch.signal_children
            and number is signal.SIGTERM
            and self.running
            and (below := descendants(self.pid))
        ):
            for pid in below:
                send_signal(pid, number)
        else:
            self.signal(number, group=True)

    def kill_as_exited(self, code: int) -> None:
        """Kill the process, whose program has ended with this exit code."""
        self._program_exit_code = code
        self.signal(signal.SIGKILL, group=True)

    def clean_up(self) -> None:
        """Remove what lies next to its socket and must not outlive it."""
        shutil.rmtree(f"{self.socket}.d", ignore_errors=True)
        for rank in self.ranks:
            with contextlib.suppress(OSError):  # the agent has usually removed it at the rank's first step
                os.unlink(step_clock_file(self.socket, rank))

    def _reap(self, descriptor: int, on_exit: Callable[[RankProcess], None]) -> None:
        at = self._clock()
        asyncio.get_running_loop().remove_reader(descriptor)
        os.close(descriptor)
        try:
            end = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        except ChildProcessError:  # killed and reaped with the attempt's orphans, because the agent exits
            status = -signal.SIGKILL
        else:
            if not self._exits_successfully(end):
                # Kill the children in its process group. The kernel does not reuse its pid before it is reaped.
                try:
                    os.killpg(self.pid, signal.SIGKILL)
                except (ProcessLookupError, PermissionError):
                    pass
            status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        if self._program_exit_code is not None and not self._stop_signals and status == -signal.SIGKILL:
            status = self._program_exit_code
        self.exit = self._classify(at, status)
        on_exit(self)

    def _exits_successfully(self, end: os.waitid_result | None) -> bool:
        """Whether it exited on its own with code 0; call this before reaping it."""
        return not self._stop_signals and end is not None and (end.si_code, end.si_status) == (os.CLD_EXITED, 0)

    def _classify(self, at: float, status: int) -> ProcessExit:
        if status == 0 or self._was_stopped(status):
            how = ExitReason.CODE if status >= 0 else ExitReason.SIGNAL
            return ProcessExit(at=at, reason=how, code=abs(status), stopped=bool(self._stop_signals))
        error, place = last_error_line(Path(self.launch.log))
        report = read_launcher_report(Path(self.launch.log)) if status > 0 else None
        passed_on = report is None and status - SHELL_SIGNAL in _FATAL
        if status > 0 and not passed_on:
            error, evidence = self._with_disk_space(error)
            port = int(self.launch.env.get("MASTER_PORT", "0"))
            if port and (stranger := port_conflict(error, port)):
                return ProcessExit(
                    at=at,
                    reason=ExitReason.PORT_TAKEN,
                    code=status,
                    error=error,
                    evidence=stranger,
                    error_location=place,
                )
            ended = ProcessExit(
                at=at, reason=ExitReason.CODE, code=status, error=error, evidence=evidence, error_location=place
            )
            return self._with_device_fault(self._apply_launcher_report(ended, report))
        number = status - SHELL_SIGNAL if passed_on else -status
        evidence = f"exit code {status}: its command passed on how its own child ended" if passed_on else ""
        starved = ""
        if number == signal.SIGKILL and self._oom_before is not None:
            starved = oom_evidence(self._oom_before, self.pid)
        how = ExitReason.OUT_OF_MEMORY if starved else ExitReason.SIGNAL
        ended = ProcessExit(
            at=at, reason=how, code=number, error=error, evidence=starved or evidence, error_location=place
        )
        return ended if number == signal.SIGKILL else self._with_device_fault(ended)

    def _apply_launcher_report(self, ended: ProcessExit, report: LauncherReport | None) -> ProcessExit:
        """Replace a launcher's exit with that of the rank it names; a rank killed by a signal has written no error.

        A launcher that polls may see a rank that lost its peer before this peer, which has written why it failed.
        """
        if report is None or ended.evidence:
            return ended
        who = "one of its ranks" if report.rank < 0 else f"rank {report.rank}"
        evidence = f"its launcher says that {who} ended first"
        if report.code < 0:
            return ProcessExit(
                at=ended.at,
                reason=ExitReason.SIGNAL,
                code=-report.code,
                evidence=evidence,
                first_failed_rank=report.rank,
                error_location=self.launch.log,
            )
        rank, error, place = error_of_first_rank(Path(self.launch.log), report.rank) or (
            report.rank,
            ended.error,
            ended.error_location,
        )
        if rank != report.rank:
            evidence = f"rank {rank} wrote this; its launcher names rank {report.rank}, which had only lost its peer"
        return replace(
            ended, code=report.code, error=error, error_location=place, evidence=evidence, first_failed_rank=rank
        )

    def _with_device_fault(self, ended: ProcessExit) -> ProcessExit:
        """An exit with the fault of a device that caused it, if its output, NCCL or the kernel reports one."""
        assert self._oom_before is not None
        recent_us = time.monotonic_ns() // 1000 - KERNEL_LOG_WINDOW_US
        found = device_evidence(
            ended.error,
            Path(self.launch.log),
            since_us=max(self._oom_before.since_us, recent_us),
            by_signal=ended.reason is ExitReason.SIGNAL,
            warnings=partial(nccl_warnings, self._nccl_file, self._started_at, self.launch.rank_count),
            kernel_log=self._kernel_log,
        )
        if found is None:
            return ended
        told = dict.fromkeys((*found.warnings, found.line, ended.evidence))
        lines = [line for line in told if line and line != ended.error]
        return replace(ended, device_fault=found.fault, evidence="; ".join(lines))

    def _with_disk_space(self, error: str) -> tuple[str, str]:
        """An error, and the disk space if it is about that; a full disk may have kept the error out of the log."""
        log = Path(self.launch.log)
        if not error and (refusal := probe_disk(log)) is not None:
            error = f"{log.name} could not be written: {refusal}"
        return error, "; ".join(room_in(error, self._cwd, log))

    def _was_stopped(self, status: int) -> bool:
        """Whether the agent stopped it: after SIGTERM any exit counts, after SIGKILL only death by SIGKILL."""
        return signal.SIGTERM in self._stop_signals or (bool(self._stop_signals) and -status in self._stop_signals)


def _spawn(command: RankCommand, log: int) -> int:
    """Start a process; return its pid."""
    process = subprocess.Popen(
        command.argv,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        env=command.environ,
        cwd=command.cwd,
        start_new_session=True,
        preexec_fn=partial(become_rank, command.cgroup),  # noqa: PLW1509 - the agent has no other threads
    )
    process.returncode = 0  # the agent reaps it by pid, like a forked rank, not through this object
    return process.pid


def _kill_and_reap(pid: int) -> int:
    """Kill and reap a started process; return 0, no process's pid."""
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return 0


def _open_log(log: Path) -> BinaryIO:
    return open(log, "ab", opener=private_opener)


def _write_private(path: str, text: str) -> None:
    with open(path, "w", opener=private_opener) as file:
        file.write(text)


def _largest_arguments(command: RankCommand) -> str:
    """The largest arguments and environment variables of a command."""
    sizes = {f"variable {name}": len(name) + len(os.fsencode(value)) + 2 for name, value in command.environ.items()}
    sizes |= {f"argument {number}": len(os.fsencode(word)) + 1 for number, word in enumerate(command.argv)}
    largest = sorted(sizes, key=lambda name: sizes[name], reverse=True)[:MAX_LARGEST_SHOWN]
    named = ", ".join(f"{name}: {sizes[name]:,} bytes" for name in largest)
    return f"{sum(sizes.values()):,} bytes of arguments and environment; {named}"
