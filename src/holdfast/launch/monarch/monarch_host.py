"""Monarch's process on the machine of one node, under which Monarch's client starts the node's agent.

`python -m holdfast.launch.monarch.monarch_host RUN NODE GENERATION ADDRESS PORT`, started by host_process.py with the
node's certificate. It listens there, on a port that the kernel chooses if PORT is 0, prints that in Monarch's notation,
and is killed with its node; or ends some time after its agent if no controller is left to kill it. Each node has
another, at a fresh address: Monarch does not always find a process that replaces one at the same.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from holdfast.host.files import lines_at_end
from holdfast.host.processes import read_process_id
from holdfast.job.backend import NodeId
from holdfast.launch.local import socket_dir
from holdfast.launch.local.node_processes import node_mark
from holdfast.launch.monarch.mesh_tls import MeshIdentity, store, tls_environ
from holdfast.launch.monarch.monarch_messages import PLACE_TIMEOUT_S, START_TIMEOUT_S
from holdfast.run_dir import AGENT_RECORD_NAME, RunDir

LOG_NAME = "host.log"
POLL_S = 10.0
ALONE_S = 300.0
"""Longest time without an agent: before it is started, and after its end."""

assert ALONE_S > PLACE_TIMEOUT_S


def start_host(run: RunDir, node_id: NodeId, own: MeshIdentity, inherited: tuple[int, ...]) -> str:
    """Start the process, wait until it listens, and return its address; raises OSError if it does not.

    The descriptors stay open in the agent, too.
    """
    folder = _folder(run, node_id)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    store(folder, own)
    environ = {
        **os.environ,
        **tls_environ(folder),
        "HOLDFAST_NODE": node_mark(run.run_id, node_id),
        "TMPDIR": str(socket_dir.create(folder)),
    }
    with (folder / LOG_NAME).open("ab") as output:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "holdfast.launch.monarch.monarch_host"),
                *map(str, (run.path, node_id.node, node_id.generation, own.address, own.port)),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=output,
            env=environ,
            cwd="/",
            start_new_session=True,
            pass_fds=inherited,
        )
    assert process.stdout is not None
    with process.stdout as answer:
        address = answer.readline().decode().strip() if select.select([answer], [], [], START_TIMEOUT_S)[0] else ""
    if not address:
        process.kill()
        process.wait()
        raise OSError((lines_at_end(folder / LOG_NAME) or ("Monarch's process printed nothing",))[-1])
    return address


def remove_host(run: RunDir, node_id: NodeId) -> None:
    """Delete what `start_host` has written, once the processes of the node are killed."""
    folder = _folder(run, node_id)
    socket_dir.remove(folder)
    for path in folder.glob("*.pem"):
        path.unlink(missing_ok=True)


def _folder(run: RunDir, node_id: NodeId) -> Path:
    return run.nodes / f"monarch{node_id.node}.{node_id.generation}"


def _main(run: RunDir, node_id: NodeId, address: str, port: int) -> None:
    # Slurm announces an end to all processes. It is the agent that has ranks save a checkpoint then.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    answer = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    from holdfast.launch.monarch.monarch_adapter import serve_host

    with socket.create_server((address, port)) as free:
        place = f"tls://{address}:{free.getsockname()[1]}"
    serving = serve_host(place)
    with os.fdopen(answer, "w") as output:
        output.write(f"{place}\n")
    record = run.node_dir(node_id.node, node_id.generation) / AGENT_RECORD_NAME
    seen_at = time.monotonic()
    while time.monotonic() - seen_at < ALONE_S:
        with contextlib.suppress(TimeoutError):
            serving.get(timeout=POLL_S)
        if (agent := read_process_id(record)) is not None and agent.alive:
            seen_at = time.monotonic()
    remove_host(run, node_id)


if __name__ == "__main__":
    folder, number, generation, *where = sys.argv[1:]
    _main(RunDir(Path(folder)), NodeId(node=int(number), generation=int(generation)), where[0], int(where[1]))
