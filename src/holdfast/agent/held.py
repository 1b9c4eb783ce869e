"""Owns one held program: the process of a rank's own command that waits before its first line (train/warm/hold.py).

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
from holdfast.agent.program import Program
from holdfast.host.files import private
from holdfast.host.limits import become_held, rank_oom_score
from holdfast.host.processes import signal_name

HOOK = Path(holdfast.__file__).parent / "train" / "warm"
"""The folder that goes onto PYTHONPATH."""

WORTH_MODULES = 500
"""A program that loads fewer is started as fast cold: numpy has about 200, torch 1,500."""

HERE_S = 30.0
"""Longest that an interpreter takes to come to its site."""

IMPORTED_S = 1800.0
"""Longest that imports take: of many gigabytes from a file system that is far away, beside ranks at work."""

ANSWERED_S = 30.0
"""Longest that it takes to read a program anew: a thousand files, beside ranks at work."""

FORKED_S = 10.0
"""Longest that a fork takes; one of a process of many gigabytes takes a tenth of a second."""

WORD_BYTES = 1 << 20
"""Longest message of a held program, whose imports may write to the link as well."""

ROOM_BYTES = 1 << 14
"""By how much a rank's environment may be longer than that of its program as it was held."""

_VARYING = re.compile(
    r"MASTER_ADDR|MASTER_PORT|JAX_COORDINATOR_ADDRESS|JAX_COORDINATOR_BIND_ADDRESS|TORCHELASTIC_RESTART_COUNT"
    r"|HOLDFAST_(?!RUN$)\w+"
)
"""Variables that may differ from those the imports saw, which no import reads: where ranks meet, and our own."""


class Cold(Exception):
    """A rank has to be started cold; the words say why."""


class Small(Cold):
    """A program whose imports take no time is not held, which is not worth a word."""

    def __init__(self) -> None:
        super().__init__("it imports nothing large from installed packages")


class UnfitModule(Cold):
    """A module must not be imported beforehand."""

    def __init__(self, module: str, why: str) -> None:
        super().__init__(f"importing {module}: {why}")
        self.module = module


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What a rank is to be started as."""

    rank: int
    argv: tuple[str, ...]
    cwd: Path
    environ: Mapping[str, str]
    unknown: frozenset[str] = frozenset()
    """Variables whose values are a guess as yet, so that no import may read them."""
    code: Path = Path()
    """The folder that its code was unpacked in, which `cwd` is in; none where that lies in place."""
    group: Path | None = None
    """The cgroup that it enters."""

    @property
    def settled(self) -> dict[str, str]:
        """The variables that its imports may see."""
        return {name: value for name, value in self.environ.items() if not _VARYING.fullmatch(name)}

    def with_code(self, code: Path) -> Wanted:
        """The same with other code, unpacked in this folder."""
        return replace(self, code=code, cwd=code / self.cwd.relative_to(self.code))

    def differs(self, other: Wanted) -> str:
        """Why a process that was held to be the one cannot be the other; empty when it can."""
        if (self.argv, self.cwd) != (other.argv, other.cwd):
            return "its command or folder is another"
        held, now = self.settled, other.settled
        names = sorted(name for name in held.keys() | now.keys() if held.get(name) != now.get(name))
        names = [name for name in names if name not in self.unknown]
        return f"{', '.join(names[:4])} changed" if names else ""


class _Ready(msgspec.Struct):
    """What a held program says once its imports are done; what else it says is for its log."""

    packages: dict[str, int] = {}


class _Answer(msgspec.Struct):
    """What it says of a rank with other code."""

    stuck: str
    """Why it cannot be that; empty when it can."""
    more: bool = False
    """Whether that imports more than was imported here."""


class Held:
    """A process that waits to become one rank, again and again."""

    def __init__(self, process: subprocess.Popen[bytes], link: socket.socket, wanted: Wanted) -> None:
        self._answers: dict[Path, _Answer] = {}
        """By the folder of other code, which never changes."""
        self._packages: dict[str, int] = {}
        """Folders that packages are installed in, and when one was added or taken away last, before the imports."""
        self._process = process
        self._link = link
        self._over = asyncio.Event()
        self._waiting = 0
        """How many wait for its end."""
        self._wanted = wanted

    @classmethod
    async def begin(
        cls, program: Program, wanted: Wanted, log: Path, *, without: Iterable[str] = (), least: int = WORTH_MODULES
    ) -> Held:
        """Hold a program and wait until its imports are done, unless they are less than so many modules. Raises Cold.

        What it writes meanwhile goes to `log`.
        """
        await _probe(program, wanted, log)
        told = {"kind": program.kind, "program": program.text, "without": sorted(without), "least": least}
        told |= {"unknown": sorted(wanted.unknown), "code": str(wanted.code)}
        process, link = _spawn(wanted.argv, wanted, log, told)
        held = cls(process, link, wanted)
        try:
            words = _Words(link)
            await words.hear(HERE_S, "here")
            said = await words.hear(IMPORTED_S)
            if "unfit" in said:
                if said["unfit"]:
                    raise UnfitModule(str(said["unfit"]), str(said["why"]))
                if not said["why"]:
                    raise Small
                raise Cold(f"{said['why']} changes the environment or sys.path before anything large is imported")
            held._packages = msgspec.convert(said["ready"], type=_Ready).packages
        except BaseException:
            held.end()
            raise
        return held

    @property
    def pid(self) -> int:
        return self._process.pid

    def differs(self, wanted: Wanted) -> str:
        """Why a rank cannot be started as a fork of this; empty when it can."""
        if self._process.poll() is not None:
            return f"the process that had its imports done ended ({_ending(self._process.returncode)})"
        for folder, changed_ns in self._packages.items():
            if _changed_ns(folder) != changed_ns:
                return f"packages in {folder} changed since it was held"
        if wanted.cwd != self._wanted.cwd:
            answer = self._answers.get(wanted.cwd)
            if answer is None or answer.stuck:
                return answer.stuck if answer else "its code lies in another folder than before"
        return replace(self._wanted, cwd=wanted.cwd).differs(wanted)

    def lacks(self, wanted: Wanted) -> bool:
        """Whether a rank imports more than is imported here, as far as was asked."""
        return wanted.cwd in self._answers and self._answers[wanted.cwd].more

    async def ask(self, wanted: Wanted) -> None:
        """Find out whether a rank with other code can be a fork of this."""
        if wanted.cwd == self._wanted.cwd or wanted.cwd in self._answers or Path() in (wanted.code, self._wanted.code):
            return
        with contextlib.suppress(Cold):
            said = await self._send(b"?", wanted, 2, ANSWERED_S)  # the second is not used
            self._answers[wanted.cwd] = msgspec.json.decode(said, type=_Answer)

    async def ended(self) -> None:
        """Return when it has ended, by whatever: its end of the link is closed then, a moment before it is gone."""
        self._waiting += 1
        try:
            if not self._over.is_set():
                asyncio.get_running_loop().add_reader(self._link, self._over.set)
                await self._over.wait()
        finally:
            self._waiting -= 1
            if not self._waiting:
                self._unwatch()
        self.end()

    async def fork(self, wanted: Wanted, log: int) -> int:
        """Have a fork become the rank that writes to `log`; its number, of a child of this process. Raises Cold."""
        return int(await self._send(b"!", wanted, log, FORKED_S))

    async def _send(self, word: bytes, wanted: Wanted, log: int, within_s: float) -> bytes:
        """Have a fork take in what a rank is given; what that answers. Raises Cold."""
        rank = {
            "environ": dict(wanted.environ),
            "code": str(wanted.code),
            "cwd": str(wanted.cwd),
            "oom_score_adj": rank_oom_score(),
            "agent": os.getpid(),
            "group": str(wanted.group or ""),
        }
        ours, theirs = socket.socketpair()
        given = os.memfd_create("holdfast-rank", os.MFD_CLOEXEC)
        try:
            os.write(given, json.dumps(rank).encode())
            with theirs:
                socket.send_fds(self._link, [word], [given, log, theirs.fileno()])
            ours.setblocking(False)
            async with asyncio.timeout(within_s):
                if said := await asyncio.get_running_loop().sock_recv(ours, 4096):
                    return said
            raise OSError("its fork ended before it answered")
        except (OSError, TimeoutError) as error:
            self.end()
            raise Cold(
                f"the process that had its imports done did not fork ({error or type(error).__name__})"
            ) from error
        finally:
            os.close(given)
            ours.close()

    def end(self) -> None:
        """End it, and take in its end; whoever waits for that is told."""
        self._unwatch()
        self._link.close()
        self._over.set()
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _unwatch(self) -> None:
        """Before it is closed: else the loop takes the next descriptor of its number for one watched already."""
        if self._link.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self._link)


async def _probe(program: Program, wanted: Wanted, log: Path) -> None:
    """Make sure, with a program that does nothing, that this interpreter can be held: or it would run the real one."""
    process, link = _spawn((*program.python, "-c", "pass"), wanted, log, {"probe": True})
    try:
        await _Words(link).hear(HERE_S, "here")
    finally:
        link.close()
        process.kill()
        process.wait()


def _spawn(
    argv: tuple[str, ...], wanted: Wanted, log: Path, told: Mapping[str, object]
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    environ = wanted.settled
    pythonpath = environ.get("PYTHONPATH")
    ours, theirs = socket.socketpair()
    word = {"probe": False, **told, "socket": theirs.fileno(), "pythonpath": pythonpath}
    environ |= {
        "PYTHONPATH": f"{HOOK}{os.pathsep}{pythonpath}" if pythonpath else str(HOOK),
        "HOLDFAST_WARM": json.dumps(word),
        "HOLDFAST_WARM_ROOM": " " * ROOM_BYTES,
    }
    try:
        with theirs, open(log, "wb", opener=private) as output:
            process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environ,
                cwd=wanted.cwd,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                preexec_fn=become_held,  # noqa: PLW1509 - the agent has no other threads
            )
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        ours.close()
        raise Cold(f"{argv[0]}: {error}") from error
    ours.setblocking(False)
    return process, ours


class _Words:
    """What a held program says, a JSON object a line."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._rest = b""

    async def hear(self, within_s: float, expected: str = "") -> dict[str, object]:
        """Its next word; raises Cold when there is none in time, or another than expected."""
        try:
            async with asyncio.timeout(within_s):
                while b"\n" not in self._rest:
                    more = await asyncio.get_running_loop().sock_recv(self._link, 4096)
                    if not more:
                        raise Cold("its interpreter ended before the program could be held")
                    self._rest += more
                    if len(self._rest) > WORD_BYTES:
                        raise Cold("it wrote to the agent's link")
            line, _, self._rest = self._rest.partition(b"\n")
            said: dict[str, object] = json.loads(line)
        except (OSError, ValueError, TimeoutError) as error:
            raise Cold(f"its interpreter cannot be held ({error or type(error).__name__})") from error
        if expected and expected not in said:
            raise Cold("its interpreter cannot be held")
        return said


def _changed_ns(folder: str) -> int:
    try:
        return os.stat(folder).st_mtime_ns
    except OSError:
        return 0


def _ending(status: int) -> str:
    return f"exit code {status}" if status >= 0 else signal_name(-status)
