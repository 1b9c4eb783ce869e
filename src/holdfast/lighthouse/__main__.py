"""The Lighthouse process: `python -m holdfast.lighthouse RUN_FOLDER HOST PORT MIN_REPLICAS GRACE_S`.

It is a separate process, so that replicas keep training while the controller restarts. Over a Unix socket in the run's
folder it sends the controller its address and receives which replicas have ranks, one line of JSON per message. It
exits when the controller requests it, or after GRACE_S seconds without a controller.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import sys
from pathlib import Path

from holdfast.lighthouse.lighthouse_supervisor import socket_path
from holdfast.lighthouse.service import Lighthouse, listen


async def serve(folder: Path, host: str, port: int, min_replicas: int, grace_s: float) -> None:
    """Serve until the controller requests the end, or is absent for too long."""
    stopping, controller_spoke = asyncio.Event(), asyncio.Event()
    lighthouse = Lighthouse(min_replicas=min_replicas)
    server, bound = await listen(lighthouse, f"{host}:{port}")

    async def on_controller(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(json.dumps({"port": bound, "pid": os.getpid()}).encode() + b"\n")
        async for line in reader:
            controller_spoke.set()
            writer.write(b"\n")
            alive: dict[str, str] | None = json.loads(line)
            if alive is None:
                break
            lighthouse.update_liveness({int(replica): store for replica, store in alive.items()})
        else:
            writer.close()  # this controller has gone; a new one will connect
            return
        writer.close()
        stopping.set()

    async def stop_without_controller() -> None:
        """Stop after a grace without a message; the controller sends one regularly."""
        while True:
            controller_spoke.clear()
            try:
                await asyncio.wait_for(controller_spoke.wait(), grace_s)
            except TimeoutError:
                stopping.set()

    with socket_path(folder) as path:
        path.unlink(missing_ok=True)
        control_server = await asyncio.start_unix_server(on_controller, path)
    tasks = [asyncio.ensure_future(lighthouse.tick_loop()), asyncio.ensure_future(stop_without_controller())]
    await stopping.wait()
    for task in tasks:
        task.cancel()
    control_server.close()
    with socket_path(folder) as path, contextlib.suppress(OSError):
        path.unlink()
    await server.stop(grace=None)


def main() -> None:
    """Serve the run folder named on the command line."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    folder, host, port, min_replicas, grace_s = sys.argv[1:]
    os.umask(0o077)
    asyncio.run(serve(Path(folder), host, int(port), int(min_replicas), float(grace_s)))


if __name__ == "__main__":
    main()
