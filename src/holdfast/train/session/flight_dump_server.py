"""Dumps a rank's flight recorders when its agent requests it, while the main thread may wait in a collective.

torch dumps those of NCCL groups itself; Gloo groups have nothing that could be asked from outside.
"""

from __future__ import annotations

import os
from pathlib import Path
from threading import Thread

from holdfast.host.files import atomic_write
from holdfast.protocol.flight_recorder_files import dump_path, session_pipe
from holdfast.train import torch_private
from holdfast.train.session.agent_client import log_line

_READ_BYTES = 4096


def serve_dumps(socket: Path | None, prefix: str, rank: int) -> None:
    """Dump to files with this prefix whenever the agent writes to the pipe next to its socket.

    The thread waits in a system call, so it costs a step nothing. A second Session of a process changes nothing.
    """
    if socket is None or not prefix:
        return
    pipe = session_pipe(socket, rank)
    try:
        os.mkfifo(pipe, 0o600)
        # Open for writing too, so that the pipe never reaches its end.
        requests = os.open(pipe, os.O_RDWR | os.O_CLOEXEC)
    except FileExistsError:
        return
    except OSError as error:
        log_line(f"rank {rank}: flight recorders cannot be dumped on request: {error}")
        return
    Thread(target=_serve, args=(requests, prefix, rank), name="holdfast flight recorder", daemon=True).start()


def _serve(requests: int, prefix: str, rank: int) -> None:
    while os.read(requests, _READ_BYTES):
        for recorder in torch_private.flight_recorders():
            try:
                atomic_write(dump_path(prefix, rank, recorder), torch_private.flight_recorder_dump(recorder))
            except (OSError, RuntimeError, TypeError) as error:
                log_line(f"rank {rank}: its flight recorder of {recorder} cannot be dumped: {error}")
