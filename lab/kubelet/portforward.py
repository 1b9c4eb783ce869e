"""`pods/portforward`: connects to a port of a pod, over the WebSocket that the API server forwards.

The protocol is v4.channel.k8s.io with one port: a message's first byte is its channel, and the first message of each
channel is the port's number. `kubectl port-forward` speaks SPDY instead, which is not supported here.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from pathlib import Path

from starlette.websockets import WebSocket, WebSocketDisconnect

PROTOCOL = "v4.channel.k8s.io"
_DATA, _ERROR = 0, 1
_CHUNK_BYTES = 32768
_RELAY = Path(__file__).with_name("port_relay.py")


async def forward(socket: WebSocket, prefix: tuple[str, ...], port: int) -> None:
    """Forward a port until either end disconnects; `prefix` runs a command in the pod's network namespace."""
    await socket.accept(subprotocol=PROTOCOL)
    for channel in (_DATA, _ERROR):
        await socket.send_bytes(bytes([channel]) + port.to_bytes(2, "little"))
    relay = await asyncio.create_subprocess_exec(
        *prefix,
        *(sys.executable, "-I", "-S", str(_RELAY), str(port)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert relay.stdout is not None
    assert relay.stderr is not None
    hearing = asyncio.create_task(_pump_input(socket, relay))
    try:
        while data := await relay.stdout.read(_CHUNK_BYTES):
            await socket.send_bytes(bytes([_DATA]) + data)
        if failed := await relay.stderr.read():
            await socket.send_bytes(bytes([_ERROR]) + failed)
        await socket.close()
    except (WebSocketDisconnect, RuntimeError):
        pass
    finally:
        hearing.cancel()
        with contextlib.suppress(ProcessLookupError):
            relay.kill()
        await relay.wait()


async def _pump_input(socket: WebSocket, relay: asyncio.subprocess.Process) -> None:
    assert relay.stdin is not None
    try:
        while True:
            message = await socket.receive_bytes()
            if message[0] == _DATA:
                relay.stdin.write(message[1:])
                await relay.stdin.drain()
    except (WebSocketDisconnect, KeyError):
        with contextlib.suppress(ProcessLookupError):
            relay.kill()
    except (BrokenPipeError, ConnectionResetError):
        return
