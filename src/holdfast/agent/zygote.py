"""Zygote: a process that runs a rank's own command up to its first line, imports included, and forks the rank.

The code in the process is train/zygote/zygote_main.py. It starts with the rank's arguments, folder and environment;
`_PER_ATTEMPT` lists the variables that may differ between attempts. A fork becomes the rank, and the agent's child as
far as the kernel is concerned.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec
from msgspec import Struct
from msgspec.structs import replace

import holdfast
from holdfast.agent.error_line import last_error_line
from holdfast.agent.python_command import PythonCommand
from holdfast.host.files import private_opener
from holdfast.host.process_limits import become_zygote, rank_oom_score
from holdfast.host.processes import signal_name

HOOK_DIR = Path(holdfast.__file__).parent / "train" / "zygote"
"""The folder that is added to PYTHONPATH."""

MIN_MODULES = 500
"""Programs that load fewer modules start as fast cold: numpy has about 200, torch 1,500."""

INTERPRETER_START_TIMEOUT_S = 30.0
"""Longest that an interpreter takes to reach its site module."""

IMPORT_TIMEOUT_S = 1800.0
"""Longest that imports take: many gigabytes from a remote file system, while ranks are running."""

CODE_CHECK_TIMEOUT_S = 30.0
"""Longest that it takes to read changed code: a thousand files, while ranks are running."""

FORK_TIMEOUT_S = 30.0
"""Longest that a fork takes; a process of many gigabytes needs a tenth of a second, and a busy machine a hundred times
that. A cold start there takes longer still."""

EXIT_TIMEOUT_S = 0.5
"""Longest that a process takes to end after its sockets have closed."""

MAX_MESSAGE_BYTES = 1 << 20
"""Longest message of a zygote, whose imports may write to the socket as well."""

ENVIRON_SLACK_BYTES = 1 << 14
"""Bytes by which a rank's environment may be longer than its zygote's."""

_PER_ATTEMPT = re.compile(
    r"MASTER_ADDR|MASTER_PORT|JAX_COORDINATOR_ADDRESS|JAX_COORDINATOR_BIND_ADDRESS|TORCHELASTIC_RESTART_COUNT"
    r"|HOLDFAST_(?!RUN$)\w+|TORCH_FR_DUMP_TEMP_FILE|TORCH_NCCL_DEBUG_INFO_PIPE_FILE"
    r"|NCCL_DEBUG_FILE"
)
"""Variables that may differ from the zygote's, because no import reads them: rendezvous addresses, where flight
recorders and NCCL write, and holdfast's own."""


class ColdStart(Exception):
    """The rank must start cold; the message says why."""


class NotWorthPrewarming(ColdStart):
    """A program with fast imports gets no zygote; this is not reported."""

    def __init__(self) -> None:
        super().__init__("it imports nothing large from installed packages")


class UnsafeModule(ColdStart):
    """A module is unsafe to import in advance."""

    def __init__(self, module: str, why: str) -> None:
        super().__init__(f"importing {module}: {why}")
        self.module = module


class RankCommand(Struct, frozen=True, kw_only=True):
    """Command that starts a rank."""

    rank: int
    argv: tuple[str, ...]
    cwd: Path
    environ: Mapping[str, str]
    provisional: frozenset[str] = frozenset()
    """Variables with preliminary values, which no import may read."""
    code_dir: Path = Path()
    """The folder of its unpacked code, which contains `cwd`; empty if the code is used in place."""
    cgroup: Path | None = None
    """The cgroup that it enters."""

    @property
    def stable_environ(self) -> dict[str, str]:
        """The variables that its imports may read."""
        return {name: value for name, value in self.environ.items() if not _PER_ATTEMPT.fullmatch(name)}

    def with_code(self, code: Path) -> RankCommand:
        """The same command with other code, unpacked in this folder."""
        return replace(self, code_dir=code, cwd=code / self.cwd.relative_to(self.code_dir))

    def mismatch(self, other: RankCommand) -> str:
        """Why a zygote for this command cannot become `other`; empty if it can."""
        if (self.argv, self.cwd) != (other.argv, other.cwd):
            return "its command or folder is another"
        before, now = self.stable_environ, other.stable_environ
        names = sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
        names = [name for name in names if name not in self.provisional]
        return f"{', '.join(names[:4])} changed" if names else ""


class _Ready(msgspec.Struct):
    """A zygote's message once its imports are done; any other message goes to its log."""

    packages: dict[str, int] = {}


class _CodeCheck(msgspec.Struct):
    """A zygote's answer on a rank with other code."""

    stuck: str
    """Why it cannot become that rank; empty if it can."""
    more: bool = False
    """Whether that rank imports more than the zygote has."""


class Zygote:
    """A process that forks one rank, as often as needed."""

    def __init__(self, process: subprocess.Popen[bytes], connection: socket.socket, command: RankCommand) -> None:
        self._code_checks: dict[Path, _CodeCheck] = {}
        """Keyed by the folder of other code, which never changes."""
        self._packages: dict[str, int] = {}
        """Folders of installed packages, with the time of the last change before the imports."""
        self._process = process
        self._connection = connection
        self._ended = asyncio.Event()
        self._waiters = 0
        """Number of tasks that wait for its end."""
        self._command = command

    @classmethod
    async def start(
        cls,
        program: PythonCommand,
        command: RankCommand,
        log: Path,
        *,
        skip_modules: Iterable[str] = (),
        min_modules: int = MIN_MODULES,
    ) -> Zygote:
        """Start a zygote and wait until it has imported at least `min_modules` modules; raise ColdStart if it cannot.

        Its output goes to `log` meanwhile.
        """
        await _probe(program, command, log)
        request = {"kind": program.kind, "program": program.text, "without": sorted(skip_modules), "least": min_modules}
        request |= {"unknown": sorted(command.provisional), "code": str(command.code_dir)}
        process, connection = _spawn(command.argv, command, log, request)
        zygote = cls(process, connection, command)
        try:
            messages = _MessageReader(process, connection, log)
            await messages.read(INTERPRETER_START_TIMEOUT_S, "here")
            message = await messages.read(IMPORT_TIMEOUT_S)
            if "unfit" in message:
                if message["unfit"]:
                    raise UnsafeModule(str(message["unfit"]), str(message["why"]))
                if not message["why"]:
                    raise NotWorthPrewarming
                raise ColdStart(
                    f"{message['why']} changes the environment or sys.path before anything large is imported"
                )
            zygote._packages = msgspec.convert(message["ready"], type=_Ready).packages
        except BaseException:
            zygote.kill()
            raise
        return zygote

    @property
    def pid(self) -> int:
        return self._process.pid

    def mismatch(self, command: RankCommand) -> str:
        """Why a rank cannot start as a fork of this zygote; empty if it can."""
        if self._process.poll() is not None:
            return f"its zygote ended ({_format_exit(self._process.returncode)})"
        for folder, changed_ns in self._packages.items():
            if _mtime_ns(folder) != changed_ns:
                return f"packages in {folder} changed since it was prewarmed"
        if command.cwd != self._command.cwd:
            check = self._code_checks.get(command.cwd)
            if check is None or check.stuck:
                return check.stuck if check else "its code lies in another folder than before"
        return replace(self._command, cwd=command.cwd).mismatch(command)

    def needs_more_imports(self, command: RankCommand) -> bool:
        """Whether a rank imports more than the zygote has, as far as `check_code` knows."""
        return command.cwd in self._code_checks and self._code_checks[command.cwd].more

    async def check_code(self, command: RankCommand) -> None:
        """Ask the zygote whether a fork of it can become a rank with other code."""
        if (
            command.cwd == self._command.cwd
            or command.cwd in self._code_checks
            or Path() in (command.code_dir, self._command.code_dir)
        ):
            return
        with contextlib.suppress(ColdStart):
            answer = await self._request_fork(b"?", command, 2, CODE_CHECK_TIMEOUT_S)  # the log descriptor is not used
            self._code_checks[command.cwd] = msgspec.json.decode(answer, type=_CodeCheck)

    async def wait_ended(self) -> None:
        """Return when the process has ended: its end of the socket closes a moment earlier."""
        self._waiters += 1
        try:
            if not self._ended.is_set():
                asyncio.get_running_loop().add_reader(self._connection, self._ended.set)
                await self._ended.wait()
        finally:
            self._waiters -= 1
            if not self._waiters:
                self._remove_reader()
        self.kill()

    async def fork(self, command: RankCommand, log: int) -> int:
        """Fork a rank that writes to `log`; return its pid, a child of this process. Raise ColdStart on failure."""
        return int(await self._request_fork(b"!", command, log, FORK_TIMEOUT_S))

    async def _request_fork(self, verb: bytes, command: RankCommand, log: int, within_s: float) -> bytes:
        """Have a fork read a rank's parameters; return its answer. Raise ColdStart on failure."""
        rank = {
            "environ": dict(command.environ),
            "code": str(command.code_dir),
            "cwd": str(command.cwd),
            "oom_score_adj": rank_oom_score(),
            "agent": os.getpid(),
            "group": str(command.cgroup or ""),
        }
        ours, theirs = socket.socketpair()
        request_file = os.memfd_create("holdfast-rank", os.MFD_CLOEXEC)
        try:
            os.write(request_file, json.dumps(rank).encode())
            with theirs:
                socket.send_fds(self._connection, [verb], [request_file, log, theirs.fileno()])
            ours.setblocking(False)
            async with asyncio.timeout(within_s):
                if answer := await asyncio.get_running_loop().sock_recv(ours, 4096):
                    return answer
            raise OSError("its fork ended before it answered")
        except (OSError, TimeoutError) as error:
            self.kill()
            raise ColdStart(f"its zygote did not fork ({str(error) or type(error).__name__})") from error
        finally:
            os.close(request_file)
            ours.close()

    def kill(self) -> None:
        """Kill and reap the process; wake the tasks that wait for its end."""
        self._remove_reader()
        self._connection.close()
        self._ended.set()
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _remove_reader(self) -> None:
        """Call this before closing the socket: the loop would ignore a new socket with the same descriptor."""
        if self._connection.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self._connection)


async def _probe(program: PythonCommand, command: RankCommand, log: Path) -> None:
    """Check with an empty program that the interpreter runs the zygote hook: else it would run the real program."""
    process, connection = _spawn((*program.python, "-c", "pass"), command, log, {"probe": True})
    try:
        await _MessageReader(process, connection, log).read(INTERPRETER_START_TIMEOUT_S, "here")
    finally:
        connection.close()
        process.kill()
        process.wait()


def _spawn(
    argv: tuple[str, ...], command: RankCommand, log: Path, request: Mapping[str, object]
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    environ = command.stable_environ
    pythonpath = environ.get("PYTHONPATH")
    ours, theirs = socket.socketpair()
    message = {"probe": False, **request, "socket": theirs.fileno(), "pythonpath": pythonpath}
    environ |= {
        "PYTHONPATH": f"{HOOK_DIR}{os.pathsep}{pythonpath}" if pythonpath else str(HOOK_DIR),
        "HOLDFAST_ZYGOTE": json.dumps(message),
        "HOLDFAST_ZYGOTE_ENVIRON_SLACK": " " * ENVIRON_SLACK_BYTES,
    }
    try:
        with theirs, open(log, "wb", opener=private_opener) as output:
            process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environ,
                cwd=command.cwd,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                preexec_fn=become_zygote,  # noqa: PLW1509 - the agent has no other threads
            )
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        ours.close()
        raise ColdStart(f"{argv[0]}: {error}") from error
    ours.setblocking(False)
    return process, ours


class _MessageReader:
    """Reads a zygote's messages, one JSON object per line."""

    def __init__(self, process: subprocess.Popen[bytes], connection: socket.socket, log: Path) -> None:
        self._process = process
        self._connection = connection
        self._log = log
        self._buffer = b""

    async def read(self, within_s: float, expected: str = "") -> dict[str, object]:
        """Return the next message; raise ColdStart if none arrives in time, or not the expected one."""
        try:
            async with asyncio.timeout(within_s):
                while b"\n" not in self._buffer:
                    more = await asyncio.get_running_loop().sock_recv(self._connection, 4096)
                    if not more:
                        raise ColdStart(self._reason_it_ended())
                    self._buffer += more
                    if len(self._buffer) > MAX_MESSAGE_BYTES:
                        raise ColdStart("it wrote to the agent's link")
            line, _, self._buffer = self._buffer.partition(b"\n")
            message: dict[str, object] = json.loads(line)
        except (OSError, ValueError, TimeoutError) as error:
            raise ColdStart(f"its interpreter cannot be prewarmed ({str(error) or type(error).__name__})") from error
        if expected and expected not in message:
            raise ColdStart("its interpreter cannot be prewarmed")
        return message

    def _reason_it_ended(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(EXIT_TIMEOUT_S)
        status, (error, _) = self._process.poll(), last_error_line(self._log)
        notes = [*([] if status is None else [_format_exit(status)]), *([error] if error else [])]
        return f"its interpreter ended before the program could be prewarmed ({': '.join(notes) or 'it still runs'})"


def _mtime_ns(folder: str) -> int:
    try:
        return os.stat(folder).st_mtime_ns
    except OSError:
        return 0


def _format_exit(status: int) -> str:
    return f"exit code {status}" if status >= 0 else signal_name(-status)
