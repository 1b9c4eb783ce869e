"""`kubectl exec`: runs a command in a container, over the WebSocket that the API server forwards.

The protocol is v5.channel.k8s.io: a message's first byte is its channel.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pty
import signal

from starlette.websockets import WebSocket, WebSocketDisconnect

from lab.kubelet.container import Container

PROTOCOL = "v5.channel.k8s.io"
_STDIN, _STDOUT, _STDERR, _STATUS, _CLOSE = 0, 1, 2, 3, 255
_CHUNK_BYTES = 32768


async def execute(socket: WebSocket, container: Container | None, command: list[str], *, tty: bool) -> None:
    """Run a command until it exits or the client disconnects."""
    await socket.accept(subprotocol=PROTOCOL)
    if container is None or container.pid is None:
        return await _send_status(socket, 126, "the container does not run")
    near, far = pty.openpty() if tty else (None, None)
    process = await asyncio.create_subprocess_exec(
        *container.exec_argv(*command),
        env=container.environment | ({"TERM": "xterm"} if tty else {}),
        stdin=asyncio.subprocess.PIPE if far is None else far,
        stdout=asyncio.subprocess.PIPE if far is None else far,
        stderr=asyncio.subprocess.PIPE if far is None else far,
        start_new_session=True,
    )
    if far is not None:
        os.close(far)
    hearing = asyncio.create_task(_pump_input(socket, process, near))
    try:
        await asyncio.gather(*_output_pumps(socket, process, near))
        await _send_status(socket, await process.wait())
    except (WebSocketDisconnect, RuntimeError):
        _kill(process)
    finally:
        hearing.cancel()
        if near is not None:
            os.close(near)


def _output_pumps(
    socket: WebSocket, process: asyncio.subprocess.Process, near: int | None
) -> list[asyncio.Future[None] | asyncio.Task[None]]:
    if near is not None:
        return [asyncio.ensure_future(_pump_terminal(socket, near))]
    channels = ((_STDOUT, process.stdout), (_STDERR, process.stderr))
    return [asyncio.ensure_future(_pump_output(socket, channel, stream)) for channel, stream in channels if stream]


async def _pump_output(socket: WebSocket, channel: int, stream: asyncio.StreamReader) -> None:
    while data := await stream.read(_CHUNK_BYTES):
        await socket.send_bytes(bytes([channel]) + data)


async def _pump_terminal(socket: WebSocket, near: int) -> None:
    # Reading a terminal whose other end is closed raises an error instead of returning EOF.
    with contextlib.suppress(OSError):
        while data := await asyncio.to_thread(os.read, near, _CHUNK_BYTES):
            await socket.send_bytes(bytes([_STDOUT]) + data)


async def _pump_input(socket: WebSocket, process: asyncio.subprocess.Process, near: int | None) -> None:
    try:
        while True:
            message = await socket.receive_bytes()
            channel, data = message[0], message[1:]
            if channel == _STDIN and near is not None:
                os.write(near, data)
            elif channel == _STDIN and process.stdin is not None:
                process.stdin.write(data)
                await process.stdin.drain()
            elif channel == _CLOSE and process.stdin is not None:
                process.stdin.close()
    except (WebSocketDisconnect, KeyError):
        _kill(process)
    except (BrokenPipeError, ConnectionResetError):
        return


def _kill(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


async def _send_status(socket: WebSocket, code: int, message: str = "") -> None:
    status: dict[str, object] = {"metadata": {}, "status": "Success"}
    if code != 0:
        status |= {
            "status": "Failure",
            "reason": "NonZeroExitCode",
            "message": message or f"command terminated with non-zero exit code: {code}",
            "details": {"causes": [{"reason": "ExitCode", "message": str(code)}]},
        }
    await socket.send_bytes(bytes([_STATUS]) + json.dumps(status).encode())
    await socket.close()
