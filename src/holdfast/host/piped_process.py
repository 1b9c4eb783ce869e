"""A child process whose standard streams an event loop reads and writes; another module may have started it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess


class PipedProcess:
    """The process with its streams; `wait` and `end` belong to the loop that opened it."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        stdin: asyncio.StreamWriter,
        stdout: asyncio.StreamReader,
        stderr: asyncio.StreamReader,
    ) -> None:
        self._process = process
        self.stdin, self.stdout, self.stderr = stdin, stdout, stderr

    @classmethod
    async def open(cls, process: subprocess.Popen[bytes], *, line_limit: int) -> PipedProcess:
        """Take over the three pipes of a process; lines may have `line_limit` bytes."""
        loop = asyncio.get_running_loop()
        stdout, stderr = (asyncio.StreamReader(limit=line_limit) for _ in range(2))
        for reader, pipe in ((stdout, process.stdout), (stderr, process.stderr)):
            await loop.connect_read_pipe(lambda reader=reader: asyncio.StreamReaderProtocol(reader), pipe)
        transport, protocol = await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, process.stdin)
        return cls(process, asyncio.StreamWriter(transport, protocol, None, loop), stdout, stderr)

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    async def wait(self) -> int:
        """Return its exit code when it has ended."""
        if self._process.poll() is None:
            ended = asyncio.Event()
            descriptor = os.pidfd_open(self._process.pid)
            asyncio.get_running_loop().add_reader(descriptor, ended.set)
            try:
                await ended.wait()
            finally:
                asyncio.get_running_loop().remove_reader(descriptor)
                os.close(descriptor)
        return self._process.wait()

    async def end(self, within_s: float) -> None:
        """Close its input, and kill it if it has not ended in time."""
        self.stdin.close()
        try:
            async with asyncio.timeout(within_s):
                await self.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self.wait()
