"""On each node of an allocation: connects to the run's controller, and runs host_process.py for each connection.

`python -m holdfast.launch.slurm.slurm_node [--in-job] ADDRESS PORT`, started by srun. Agents outlive a connection. With
`--in-job` the controller is on a node of the same job, which Slurm may lose.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import logging
import os
import signal
import socket
import ssl
import sys
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from holdfast.host.processes import adopt_orphans, children, command_line, descendants, reap, send_signal
from holdfast.launch.hosts.host_address import ADDRESS
from holdfast.security.tls import CONTROLLER_NAME

if TYPE_CHECKING:
    from holdfast.launch.slurm.own_job import OwnJob

log = logging.getLogger("holdfast.slurm_node")

RETRY_S = 1.0
ALONE_S = 3600.0
"""Longest time without a controller, after which agents have ended; the allocation is then given back."""
READ_BYTES = 1 << 16
LOSS_MS = 12_000
LEAVE_S = 2.0
"""Time without an agent, after Slurm has announced the end, before this process ends: the last logs are sent in it."""
ASK_SLURM_S = 10.0
"""Time without a controller after which a node asks Slurm whether the job has lost its first node, and until it asks
again."""


async def _serve(address: str, port: int, own: OwnJob | None) -> None:
    """Connect until no controller has answered for ALONE_S; have a job `own` that lost its first node start again."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_verify_locations(cadata=base64.b64decode(os.environ.pop("HOLDFAST_CA")).decode())
    key = os.environ.pop("HOLDFAST_HOST_KEY")
    heard_at = asked_at = time.monotonic()
    while time.monotonic() - heard_at < ALONE_S:
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_connection(
                address, port, ssl=context, server_hostname=CONTROLLER_NAME, limit=READ_BYTES
            )
            await _connection(reader, writer, key)
            heard_at = asked_at = time.monotonic()
        if own is not None and time.monotonic() - asked_at > ASK_SLURM_S:
            await asyncio.to_thread(own.continue_without_batch_host)
            asked_at = time.monotonic()
        reap(children(os.getpid()))
        await asyncio.sleep(RETRY_S)
    log.warning("no controller answered for %g s", ALONE_S)


def notice_loss(writer: asyncio.StreamWriter) -> None:
    """Have the connection fail when the other end has not answered for some seconds."""
    connection: socket.socket = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 3), (socket.TCP_KEEPINTVL, 3), (socket.TCP_KEEPCNT, 3)):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, LOSS_MS)


async def _connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: str) -> None:
    notice_loss(writer)
    hello = {
        "key": key,
        "name": os.environ.get("SLURMD_NODENAME", ""),
        "order": int(os.environ.get("SLURM_NODEID", "0")),
        "switches": os.environ.get("SLURM_TOPOLOGY_ADDR", "").rpartition(".")[0],
    }
    writer.write(json.dumps(hello).encode() + b"\n")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "holdfast.launch.hosts.host_process"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, ADDRESS: writer.get_extra_info("sockname")[0]},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    ways = [
        asyncio.ensure_future(_copy(reader, process.stdin)),
        asyncio.ensure_future(_copy(process.stdout, writer)),
    ]
    await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
    process.stdin.close()
    await process.wait()
    writer.close()
    await asyncio.gather(*ways, return_exceptions=True)


async def _copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await source.read(READ_BYTES):
            sink.write(data)
            await sink.drain()


def _agents(pids: Iterable[int]) -> list[int]:
    return [pid for pid in pids if "holdfast.agent" in command_line(pid)]


async def _leave(announced: asyncio.Event) -> None:
    """Wait for Slurm's announcement of the end, have agents end, and return when none has been left for a while.

    Slurm sends the same signal when the run cancels its job; a node that stayed would hold it until `KillWait`.
    """
    await announced.wait()
    for pid in _agents(children(os.getpid())):
        send_signal(pid, signal.SIGTERM)  # ranks save a checkpoint
    without = 0
    while without < LEAVE_S / RETRY_S:
        await asyncio.sleep(RETRY_S)
        without = 0 if _agents(descendants(os.getpid())) else without + 1


async def _main() -> None:
    announced = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, announced.set)
    asyncio.get_running_loop().add_signal_handler(signal.SIGCONT, int)
    *options, address, port = sys.argv[1:]
    own = None
    if "--in-job" in options:
        from holdfast.launch.slurm.own_job import OwnJob

        own = OwnJob.of(os.environ)
    serving = asyncio.ensure_future(_serve(address, int(port), own))
    leaving = asyncio.ensure_future(_leave(announced))
    await asyncio.wait([serving, leaving], return_when=asyncio.FIRST_COMPLETED)


if __name__ == "__main__":
    adopt_orphans()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    asyncio.run(_main())
