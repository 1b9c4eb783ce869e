"""Forwards a port of this machine to a port of a pod: `python -m lab.pod_forward NAMESPACE POD PORT` prints the port.

`kubectl port-forward` speaks SPDY, which the lab's kubelet does not.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys

from holdfast.launch.kubernetes.client.api_errors import ClusterError
from holdfast.launch.kubernetes.client.cluster import ClusterClient
from holdfast.launch.kubernetes.client.pod_port import PodPort, PortClosed

_CHUNK_BYTES = 1 << 16


async def forward(namespace: str, pod: str, port: int) -> None:
    """Listen on a free port of the loopback address, print it, and forward connections until the process ends."""
    cluster = ClusterClient(namespace=namespace)

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ClusterError, PortClosed, OSError):
            async with cluster.connect_to_port(pod, port) as remote:
                sending = asyncio.ensure_future(_send(reader, remote))
                try:
                    while True:
                        writer.write(await remote.receive())
                        await writer.drain()
                finally:
                    sending.cancel()
        writer.close()

    server = await asyncio.start_server(carry, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


async def _send(reader: asyncio.StreamReader, remote: PodPort) -> None:
    while data := await reader.read(_CHUNK_BYTES):
        await remote.send(data)


if __name__ == "__main__":
    asyncio.run(forward(sys.argv[1], sys.argv[2], int(sys.argv[3])))
