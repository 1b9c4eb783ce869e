"""The ssh process by which Monarch's client and its process on a host reach one another, on loopback ports of both."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator

log = logging.getLogger("holdfast.monarch")

FIRST_DELAY_S, MAX_DELAY_S = 0.5, 5.0
"""Between two connections."""
OPEN_TIMEOUT_S = 30.0
"""Longest wait for a connection; ssh itself gives up earlier."""
OPENED = "open"
REMOTE_COMMAND = f"echo {OPENED}; exec cat"
"""What runs on the host meanwhile, in any shell: it ends with its input, and so with the client."""


@contextlib.asynccontextmanager
async def open_tunnel(command: tuple[str, ...]) -> AsyncGenerator[None]:
    """Keep the command running, once it has printed that it is open; raises OSError with its last words if it ends."""
    if not command:
        yield
        return
    keeping = asyncio.ensure_future(_keep(command, await _open(command)))
    try:
        yield
    finally:
        keeping.cancel()
        await asyncio.wait([keeping])


async def _keep(command: tuple[str, ...], process: asyncio.subprocess.Process) -> None:
    try:
        while True:
            await process.wait()
            log.warning("a connection to a host has ended, and is made again")
            delay_s = FIRST_DELAY_S
            while process.returncode is not None:
                await asyncio.sleep(delay_s)
                delay_s = min(MAX_DELAY_S, delay_s * 2)
                with contextlib.suppress(OSError):
                    process = await _open(command)
    finally:
        await _end(process)


async def _open(command: tuple[str, ...]) -> asyncio.subprocess.Process:
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, stderr=pipe)
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        async with asyncio.timeout(OPEN_TIMEOUT_S):
            while line := await process.stdout.readline():
                if line.decode(errors="replace").strip() == OPENED:
                    return process
            said = (await process.stderr.read()).decode(errors="replace").splitlines()
    except TimeoutError:
        said = [f"ssh did not connect within {OPEN_TIMEOUT_S:g} s"]
    await _end(process)
    raise OSError(said[-1] if said else "ssh has ended")


async def _end(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    await process.wait()
