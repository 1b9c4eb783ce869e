"""Starts and restarts the Lighthouse service, and sends it what the controller knows about replicas."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Generator, Mapping
from pathlib import Path

from holdfast.host.files import atomic_write, read_line

log = logging.getLogger("holdfast.controller")

SOCKET_NAME = "lighthouse.sock"
POLL_S = 0.02
"""Seconds between two polls for a service that is starting."""
HEARTBEAT_S = 1.0
"""Seconds between two messages to the service, which answers each, and exits after a long silence."""
MAX_UNANSWERED = 5
"""Unanswered messages after which the supervisor kills a stuck service and starts another."""


@contextlib.contextmanager
def socket_path(folder: Path) -> Generator[Path]:
    """The socket's path, short however deep the folder lies: a Unix socket's path holds 107 bytes."""
    directory = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    try:
        yield Path(f"/proc/self/fd/{directory}") / SOCKET_NAME
    finally:
        os.close(directory)


def _read_port(record: Path) -> int:
    """The port of an earlier service; 0 if unknown."""
    try:
        port = int(read_line(record))
    except (OSError, ValueError):
        return 0
    return port if 0 < port < 1 << 16 else 0


class LighthouseSupervisor:
    """Keeps one service running for a run, on the same port for as long as possible."""

    def __init__(self, folder: Path, *, host: str, public_host: str, min_replicas: int, grace_s: float) -> None:
        self._folder = folder
        self._host = host
        self._public_host = public_host
        self._service_args = (str(min_replicas), f"{grace_s:g}")
        self._port_file = folder / "lighthouse.port"
        self._port = _read_port(self._port_file)
        self._live_stores: Mapping[int, str] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._unanswered = 0
        self.pid = 0
        """The service's pid, while it is connected."""
        self._connected = asyncio.Event()

    @property
    def port(self) -> int:
        """The service's port on this machine; 0 until it is known."""
        return self._port

    @property
    def url(self) -> str:
        return f"http://{self._public_host}:{self._port}"

    async def wait_address(self) -> None:
        """Return when the service's address is known; it then stays known."""
        if not self._port:
            await self._connected.wait()

    def publish_liveness(self, live_stores: Mapping[int, str]) -> None:
        """Send which replicas have ranks: the store of each, or an empty string."""
        if live_stores != self._live_stores:
            self._live_stores = live_stores
            self._send_liveness()

    async def run(self) -> None:
        """Start the service unless it is running, and restart it whenever it has exited."""
        while True:
            with contextlib.suppress(OSError, ValueError):
                await self._exchange()
            self._writer, self.pid = None, 0
            if self._process is not None and self._process.poll() is None:
                await asyncio.sleep(POLL_S)  # it is starting
                continue
            self._start()
            await asyncio.sleep(POLL_S)

    async def stop(self) -> None:
        """Have the service exit."""
        if self._writer is not None:
            self._writer.write(b"null\n")
            with contextlib.suppress(OSError):
                await self._writer.drain()
                self._writer.close()

    async def _exchange(self) -> None:
        """Connect, and exchange messages until the connection ends."""
        with socket_path(self._folder) as path:
            reader, writer = await asyncio.open_unix_connection(path)
        try:
            async with asyncio.timeout(MAX_UNANSWERED * HEARTBEAT_S):
                address = json.loads(await reader.readline())
        except TimeoutError:
            _kill(_peer_pid(writer))
            writer.close()
            return
        self._port, self.pid = address["port"], address["pid"]
        # if the disk is full, the service itself sends its port to a restarted controller
        with contextlib.suppress(OSError):
            atomic_write(self._port_file, str(self._port).encode())
        self._writer = writer
        self._connected.set()
        self._unanswered = 0
        answers = asyncio.ensure_future(self._read_answers(reader))
        try:
            while not answers.done() and self._unanswered < MAX_UNANSWERED:
                self._unanswered += 1
                self._send_liveness()
                await asyncio.wait([answers], timeout=HEARTBEAT_S)
        finally:
            answers.cancel()
            writer.close()
        if self._unanswered >= MAX_UNANSWERED:
            _kill(self.pid)

    async def _read_answers(self, reader: asyncio.StreamReader) -> None:
        """Read answers until the service disconnects."""
        with contextlib.suppress(OSError):
            while await reader.readline():
                self._unanswered = 0

    def _send_liveness(self) -> None:
        if self._writer is not None:
            self._writer.write(json.dumps(self._live_stores).encode() + b"\n")

    def _start(self) -> None:
        log.info("starting the Lighthouse service")
        argv = [
            sys.executable,
            "-m",
            "holdfast.lighthouse",
            str(self._folder),
            self._host,
            str(self._port),
            *self._service_args,
        ]
        with (self._folder / "lighthouse.log").open("ab") as output:
            self._process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=output, stderr=output)


def _peer_pid(writer: asyncio.StreamWriter) -> int:
    """The pid of the process at the other end, even before it sends anything; the credentials are pid, uid and gid."""
    credentials = writer.get_extra_info("socket").getsockopt(
        socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")
    )
    return int(struct.unpack("3i", credentials)[0])


def _kill(service: int) -> None:
    """Kill the service, unless its pid is 0: a process outside this pid namespace, or this process's own group."""
    if service > 0:
        log.warning("killing the Lighthouse service, which does not answer (pid %s)", service)
        os.kill(service, signal.SIGKILL)
