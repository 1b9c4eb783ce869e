"""The connection of a run's controller to one host: an ssh process, restarted when it ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import random
from collections.abc import AsyncGenerator, Callable
from pathlib import Path

import msgspec
from msgspec import Struct

from holdfast.host.piped_process import PipedProcess
from holdfast.job.targets import SshSettings
from holdfast.launch.hosts import host_packages, prestarted_links
from holdfast.launch.hosts.host_messages import (
    FileChunk,
    FromHost,
    HostReady,
    RunEnded,
    Setup,
    ToHost,
    decode_from_host,
    encode,
)
from holdfast.launch.hosts.prestarted_links import PrestartedLink
from holdfast.launch.hosts.ssh_command import (
    HOST_PROCESS,
    PORTS,
    boot_request,
    explain_ssh,
    host_folder,
    ssh_argv,
    start_ssh,
    unforward_argv,
)

log = logging.getLogger("holdfast.controller")

FIRST_DELAY_S, MAX_DELAY_S = 0.2, 5.0
"""Between two connections to a host."""
LINE_LIMIT = 1 << 20
MAX_ERROR_BYTES = 4096
END_S = 5.0
"""Longest wait for the end of ssh, once its input is closed."""


class _BootReply(msgspec.Struct, frozen=True, kw_only=True):
    """What host_boot.py answers."""

    python: tuple[int, int] = (0, 0)
    machine: str = ""
    missing: tuple[str, ...] = ()
    error: str = ""
    detail: str = ""


class HostUnusable(Exception):
    """A host cannot take part; has the reason and what to do."""

    def __init__(self, what: str, remedy: str) -> None:
        super().__init__(what)
        self.what, self.remedy = what, remedy


class HostSettings(Struct, frozen=True, kw_only=True):
    """What the links to all hosts share."""

    ssh: SshSettings
    base: Path
    """Folder that relative paths of the target start from."""
    port: int
    """The controller's port on this machine's loopback; 0 for none."""
    run: str = ""

    def first_port(self, host: str) -> int:
        """The port of a host's loopback that a controller of the run tries first, unless a connection has begun."""
        return random.Random(f"{self.run}/{host}").choice(PORTS)


class HostLink:
    """Keeps a host connected; calls back with what it says, and when it is connected or not."""

    def __init__(
        self,
        host: str,
        settings: HostSettings,
        *,
        setup: Callable[[str, int], Setup],
        on_message: Callable[[str, FromHost, bytes], None],
        on_change: Callable[[str], None],
    ) -> None:
        self.host = host
        self._settings, self._setup, self._on_message, self._on_change = settings, setup, on_message, on_change
        self.ready: HostReady | None = None
        """What the host said of itself; None while it is not connected."""
        self.problem = ""
        """Why it is not connected, and what to do; empty if it is, or before the first try has ended."""
        self.tried = asyncio.Event()
        """Set once it was connected, or could not be."""
        self._input: asyncio.StreamWriter | None = None
        self._port = settings.first_port(host)
        """The forwarded port there; it stays the same while it can, so agents find the controller again immediately."""
        self._closed = False

    def send(self, message: ToHost) -> None:
        """Send a message, if the host is connected: what it misses is repeated after the next connection."""
        if self._input is not None:
            self._input.write(encode(message))

    def close(self) -> None:
        """Let the connection end, and make no other."""
        self._closed = True
        if self._input is not None:
            self._input.close()

    async def run(self) -> None:
        """Stay connected until closed."""
        delay_s = FIRST_DELAY_S
        while not self._closed:
            try:
                await self._connect()
                delay_s = FIRST_DELAY_S
                problem = "the connection ended"
            except HostUnusable as error:
                problem = f"{error.what}. {error.remedy}"
                self._port = random.choice(PORTS)
            except (OSError, ValueError, asyncio.IncompleteReadError) as error:
                problem = f"the connection failed: {error}"
            if self._closed:
                return
            if problem != self.problem:
                log.warning("host %s: %s", self.host, problem)
            self.problem = problem
            self.tried.set()
            self._on_change(self.host)
            await asyncio.sleep(delay_s)
            delay_s = min(MAX_DELAY_S, delay_s * 2)

    async def _connect(self) -> None:
        begun = prestarted_links.take(self.host, self._settings.ssh, self._settings.base, self._settings.port)
        if begun is not None:
            self._port = begun.remote_port
        async with connected(self.host, self._settings, self._port, begun=begun) as (output, input_):
            self._input = input_
            try:
                input_.write(encode(self._setup(self.host, self._port)))
                while line := await output.readline():
                    message = decode_from_host(line)
                    data = await output.readexactly(message.bytes) if isinstance(message, FileChunk) else b""
                    if isinstance(message, HostReady):
                        self.ready, self.problem = message, ""
                        self.tried.set()
                    self._on_message(self.host, message, data)
                    if isinstance(message, RunEnded):
                        self.close()
            finally:
                self._input = self.ready = None


@contextlib.asynccontextmanager
async def connected(
    host: str,
    settings: HostSettings,
    remote_port: int,
    module: str = HOST_PROCESS,
    *,
    begun: PrestartedLink | None = None,
) -> AsyncGenerator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Run a module on a host, with the packages that it needs; raises HostUnusable with what prevents that.

    A connection that was `begun` has requested the module already.
    """
    forward = (remote_port, settings.port) if settings.port else None
    if begun is None:
        if forward:
            await end_forwarding(host, settings, remote_port)  # of a controller that was killed
        started = start_ssh(ssh_argv(host, settings.ssh, settings.base, forward=forward))
    else:
        started = begun.process
    process = await PipedProcess.open(started, line_limit=LINE_LIMIT)
    errors = bytearray()
    reading = asyncio.ensure_future(_read_errors(process.stderr, errors))
    try:
        try:
            if begun is None:
                process.stdin.write(boot_request(settings.ssh, module))
            await _boot(process.stdin, process.stdout, settings.ssh)
            yield process.stdout, process.stdin
        except (OSError, asyncio.IncompleteReadError, msgspec.DecodeError) as error:
            await process.end(END_S)
            await reading
            raise HostUnusable(*explain_ssh(host, errors.decode(errors="replace") or str(error))) from error
        if process.stdout.at_eof() and (errors or process.exit_code):
            await process.end(END_S)
            await reading
            raise HostUnusable(*explain_ssh(host, errors.decode(errors="replace")))
    finally:
        await process.end(END_S)
        reading.cancel()
        if forward:
            await end_forwarding(host, settings, remote_port)


async def end_forwarding(host: str, settings: HostSettings, remote_port: int) -> None:
    """End the forwarding of a host's port to the controller on a connection of the user's, which would keep it."""
    if not settings.ssh.shared_connection:
        return
    argv = unforward_argv(host, settings.ssh, settings.base, (remote_port, settings.port))
    await (await PipedProcess.open(start_ssh(argv), line_limit=LINE_LIMIT)).end(END_S)


async def _read_errors(stream: asyncio.StreamReader, into: bytearray) -> None:
    while data := await stream.read(4096):
        into += data
        del into[:-MAX_ERROR_BYTES]


async def _boot(input_: asyncio.StreamWriter, output: asyncio.StreamReader, ssh: SshSettings) -> None:
    """Talk with host_boot.py until it becomes the module that was requested."""
    found = await _reply(output)
    if found.error:
        raise _refusal(found, ssh)
    missing = found.missing
    if not missing:
        return
    foreign = (found.python, found.machine) != (host_packages.PYTHON, host_packages.MACHINE)
    if foreign and missing != (host_packages.OWN,):
        names = " ".join(name for name in missing if name != host_packages.OWN)
        version, here = (".".join(map(str, python)) for python in (found.python, host_packages.PYTHON))
        raise HostUnusable(
            f"its Python {version} on {found.machine} lacks packages, and this machine has those of Python {here} on"
            f" {host_packages.MACHINE}",
            f"Install them on the host: `{ssh.python} -m pip install {names}`.",
        )
    packed = await asyncio.to_thread(host_packages.archive, missing)
    input_.write(json.dumps({"bytes": len(packed)}).encode() + b"\n" + packed)
    await input_.drain()


async def _reply(output: asyncio.StreamReader) -> _BootReply:
    line = await output.readline()
    if not line:
        raise asyncio.IncompleteReadError(b"", None)
    try:
        return msgspec.json.decode(line, type=_BootReply)
    except msgspec.DecodeError as error:
        shown = line[:100].decode(errors="replace").strip()
        raise HostUnusable(
            f"its shell prints something else first: {shown!r}", "Let its start-up files print nothing."
        ) from error


def _refusal(found: _BootReply, ssh: SshSettings) -> HostUnusable:
    if found.error == "version":
        what = f"its Python is {found.detail}, and holdfast needs 3.11 or newer"
        return HostUnusable(what, "Set `ssh.python` in the target to another.")
    what = f"its folder cannot be used: {found.detail}"
    return HostUnusable(what, f"Set `ssh.folder` to another than {host_folder(ssh)}.")
