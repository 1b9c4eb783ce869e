"""The process of a run's Monarch client: starts it, ends it with all of Monarch's processes, and reads its log.

The run's supervisor starts the first one while the controller is being imported (`prestart`), and so must not import
much; the controller starts the next ones (monarch_link.py).
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from holdfast.host.files import lines_at_end
from holdfast.host.processes import all_pids, by_env, kill_all
from holdfast.launch.controller_supervisor import controller_grace_s, listen_unix
from holdfast.launch.local import socket_dir
from holdfast.launch.monarch.mesh_tls import tls_environ
from holdfast.run_dir import RunDir

FOLDER_NAME = "monarch"
"""Folder of the Monarch client, next to those of nodes."""
SOCKET_NAME = "client.sock"
LOG_NAME = "client.log"
KILL_TIMEOUT_S = 10.0


def client_folder(run: RunDir) -> Path:
    """The folder of the client, which `start_client` creates."""
    return run.nodes / FOLDER_NAME


def prestart(run: RunDir) -> None:
    """Start a client for the first controller; a later supervisor's run may have one."""
    if not (client_folder(run) / SOCKET_NAME).exists():
        start_client(run)


def start_client(run: RunDir, address: str = "") -> subprocess.Popen[bytes]:
    """Start a client, which accepts the controller's connection from now on; raises OSError if that is impossible.

    With an address, such as `10.0.0.1:0`, it listens there for Monarch on other machines, with the certificate in
    `run.mesh`.
    """
    own = client_folder(run)
    own.mkdir(parents=True, exist_ok=True, mode=0o700)
    environ = {**os.environ, "HOLDFAST_NODE": _mark(run), "TMPDIR": str(socket_dir.create(own))}
    if address:
        environ |= tls_environ(run.mesh)
    with listen_unix(own / SOCKET_NAME) as listening, (own / LOG_NAME).open("ab") as output:
        return subprocess.Popen(
            [
                *(sys.executable, "-m", "holdfast.launch.monarch.monarch_client"),
                *(str(run.path), f"{controller_grace_s(run):g}", str(listening.fileno()), address),
            ],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environ,
            cwd="/",
            start_new_session=True,
            pass_fds=(listening.fileno(),),
        )


def kill_client(run: RunDir) -> None:
    """Kill all clients of a run and all of Monarch's processes, but no agents."""
    kill_all(lambda: by_env(all_pids(), HOLDFAST_NODE=_mark(run)), within_s=KILL_TIMEOUT_S)
    (client_folder(run) / SOCKET_NAME).unlink(missing_ok=True)


def last_lines(run: RunDir) -> tuple[str, ...]:
    """What the client logged last: Monarch's own words."""
    return lines_at_end(client_folder(run) / LOG_NAME)[-5:]


def _mark(run: RunDir) -> str:
    """The value of HOLDFAST_NODE in the client and in Monarch's processes, but not in agents."""
    return f"{run.run_id}/{FOLDER_NAME}"
