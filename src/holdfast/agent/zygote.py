"""Owns one held program: the process of a rank's own command that waits before its first line (train/zygote/zygote_main.py).

It is started with the words, the folder and the environment that the rank will have; what differs between two attempts
is listed here. A fork of it becomes the rank, and to the kernel this agent's child.
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
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

import holdfast
from holdfast.agent.python_command import PythonCommand
from holdfast.host.files import private_opener
from holdfast.host.process_limits import become_zygote, rank_oom_score
from holdfast.host.processes import signal_name

HOOK_DIR = Path(holdfast.__file__).parent / "train" / "zygote"
"""The folder that goes onto PYTHONPATH."""

MIN_MODULES = 500
"""A program that loads fewer is started as fast cold: numpy has about 200, torch 1,500."""

INTERPRETER_START_TIMEOUT_S = 30.0
"""Longest that an interpreter takes to come to its site."""

IMPORT_TIMEOUT_S = 1800.0
"""Longest that imports take: of many gigabytes from a file system that is far away, beside ranks at work."""

CODE_CHECK_TIMEOUT_S = 30.0
"""Longest that it takes to read a program anew: a thousand files, beside ranks at work."""

FORK_TIMEOUT_S = 10.0
"""Longest that a fork takes; one of a process of many gigabytes takes a tenth of a second."""

MAX_MESSAGE_BYTES = 1 << 20
"""Longest message of a held program, whose imports may write to the link as well."""

ENVIRON_SLACK_BYTES = 1 << 14
"""By how much a rank's environment may be longer than that of its program as it was held."""

_PER_ATTEMPT = re.compile(
    r"MASTER_ADDR|MASTER_PORT|JAX_COORDINATOR_ADDRESS|JAX_COORDINATOR_BIND_ADDRESS|TORCHELASTIC_RESTART_COUNT"
    r"|HOLDFAST_(?!RUN$)\w+"
)
"""Variables that may differ from those the imports saw, which no import reads: where ranks meet, and our own."""


class ColdStart(Exception):
    """A rank has to be started cold; the words say why."""


class NotWorthPrewarming(ColdStart):
    """A program whose imports take no time is not held, which is not worth a word."""

    def __init__(self) -> None:
        super().__init__("it imports nothing large from installed packages")


class UnsafeModule(ColdStart):
    """A module must not be imported beforehand."""

    def __init__(self, module: str, why: str) -> None:
        super().__init__(f"importing {module}: {why}")
        self.module = module


@dataclass(frozen=True, kw_only=True)
class RankCommand:
    """What a rank is to be started as."""

    rank: int
    argv: tuple[str, ...]
    cwd: Path
    environ: Mapping[str, str]
    provisional: frozenset[str] = frozenset()
    """Variables whose values are a guess as yet, so that no import may read them."""
    code_dir: Path = Path()
    """The folder that its code was unpacked in, which `cwd` is in; none where that lies in place."""
    cgroup: Path | None = None
    """The cgroup that it enters."""

    @property
    def stable_environ(self) -> dict[str, str]:
        """The variables that its imports may see."""
        return {name: value for name, value in self.environ.items() if not _PER_ATTEMPT.fullmatch(name)}

    def with_code(self, code: Path) -> RankCommand:
        """The same with other code, unpacked in this folder."""
        return replace(self, code_dir=code, cwd=code / self.cwd.relative_to(self.code_dir))

    def mismatch(self, other: RankCommand) -> str:
        """Why a process that was held to be the one cannot be the other; empty when it can."""
        if (self.argv, self.cwd) != (other.argv, other.cwd):
            return "its command or folder is another"
        before, now = self.stable_environ, other.stable_environ
        names = sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
        names = [name for name in names if name not in self.provisional]
        return f"{', '.join(names[:4])} changed" if names else ""


class _Ready(msgspec.Struct):
    """What a held program says once its imports are done; what else it says is for its log."""

    packages: dict[str, int] = {}


class _CodeCheck(msgspec.Struct):
    """What it says of a rank with other code."""

    stuck: str
    """Why it cannot be that; empty when it can."""
    more: bool = False
    """Whether that imports more than was imported here."""


class Zygote:
    """A process that waits to become one rank, again and again."""

    def __init__(self, process: subprocess.Popen[bytes], connection: socket.socket, command: RankCommand) -> None:
        self._code_checks: dict[Path, _CodeCheck] = {}
        """By the folder of other code, which never changes."""
        self._packages: dict[str, int] = {}
        """Folders that packages are installed in, and when one was added or taken away last, before the imports."""
        self._process = process
        self._connection = connection
        self._ended = asyncio.Event()
        self._waiters = 0
        """How many wait for its end."""
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
        """Hold a program and wait until its imports are done, unless they are less than so many modules. Raises Cold.

        What it writes meanwhile goes to `log`.
        """
        await _probe(program, command, log)
        request = {"kind": program.kind, "program": program.text, "without": sorted(skip_modules), "least": min_modules}
        request |= {"unknown": sorted(command.provisional), "code": str(command.code_dir)}
        process, connection = _spawn(command.argv, command, log, request)
        zygote = cls(process, connection, command)
        try:
            messages = _MessageReader(connection)
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
        """Why a rank cannot be started as a fork of this; empty when it can."""
        if self._process.poll() is not None:
            return f"the process that had its imports done ended ({_format_exit(self._process.returncode)})"
        for folder, changed_ns in self._packages.items():
            if _mtime_ns(folder) != changed_ns:
                return f"packages in {folder} changed since it was held"
        if command.cwd != self._command.cwd:
            check = self._code_checks.get(command.cwd)
            if check is None or check.stuck:
                return check.stuck if check else "its code lies in another folder than before"
        return replace(self._command, cwd=command.cwd).mismatch(command)

    def needs_more_imports(self, command: RankCommand) -> bool:
        """Whether a rank imports more than is imported here, as far as was asked."""
        return command.cwd in self._code_checks and self._code_checks[command.cwd].more

    async def check_code(self, command: RankCommand) -> None:
        """Find out whether a rank with other code can be a fork of this."""
        if (
            command.cwd == self._command.cwd
            or command.cwd in self._code_checks
            or Path() in (command.code_dir, self._command.code_dir)
        ):
            return
        with contextlib.suppress(ColdStart):
            answer = await self._request_fork(b"?", command, 2, CODE_CHECK_TIMEOUT_S)  # the second is not used
            self._code_checks[command.cwd] = msgspec.json.decode(answer, type=_CodeCheck)

    async def wait_ended(self) -> None:
        """Return when it has ended, by whatever: its end of the link is closed then, a moment before it is gone."""
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
        """Have a fork become the rank that writes to `log`; its number, of a child of this process. Raises Cold."""
        return int(await self._request_fork(b"!", command, log, FORK_TIMEOUT_S))

    async def _request_fork(self, verb: bytes, command: RankCommand, log: int, within_s: float) -> bytes:
        """Have a fork take in what a rank is given; what that answers. Raises Cold."""
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
            raise ColdStart(
                f"the process that had its imports done did not fork ({error or type(error).__name__})"
            ) from error
        finally:
            os.close(request_file)
            ours.close()

    def kill(self) -> None:
        """End it, and take in its end; whoever waits for that is told."""
        self._remove_reader()
        self._connection.close()
        self._ended.set()
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _remove_reader(self) -> None:
        """Before it is closed: else the loop takes the next descriptor of its number for one watched already."""
        if self._connection.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self._connection)


async def _probe(program: PythonCommand, command: RankCommand, log: Path) -> None:
    """Make sure, with a program that does nothing, that this interpreter can be held: or it would run the real one."""
    process, connection = _spawn((*program.python, "-c", "pass"), command, log, {"probe": True})
    try:
        await _MessageReader(connection).read(INTERPRETER_START_TIMEOUT_S, "here")
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
    """What a held program says, a JSON object a line."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._buffer = b""

    async def read(self, within_s: float, expected: str = "") -> dict[str, object]:
        """Its next word; raises Cold when there is none in time, or another than expected."""
        try:
            async with asyncio.timeout(within_s):
                while b"\n" not in self._buffer:
                    more = await asyncio.get_running_loop().sock_recv(self._connection, 4096)
                    if not more:
                        raise ColdStart("its interpreter ended before the program could be held")
                    self._buffer += more
                    if len(self._buffer) > MAX_MESSAGE_BYTES:
                        raise ColdStart("it wrote to the agent's link")
            line, _, self._buffer = self._buffer.partition(b"\n")
            message: dict[str, object] = json.loads(line)
        except (OSError, ValueError, TimeoutError) as error:
            raise ColdStart(f"its interpreter cannot be held ({error or type(error).__name__})") from error
        if expected and expected not in message:
            raise ColdStart("its interpreter cannot be held")
        return message


def _mtime_ns(folder: str) -> int:
    try:
        return os.stat(folder).st_mtime_ns
    except OSError:
        return 0


def _format_exit(status: int) -> str:
    return f"exit code {status}" if status >= 0 else signal_name(-status)
