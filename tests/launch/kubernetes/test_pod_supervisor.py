"""The supervisor of a controller's pod while a controller that the cluster has lost still holds the run."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from holdfast.host.files import atomic_write
from holdfast.run_dir import RunDir
from holdfast.security.tls import make_identity

WITHIN_S = 60.0


def until(reached: Callable[[], object], supervisor: subprocess.Popen[bytes], what: str) -> None:
    deadline = time.monotonic() + WITHIN_S
    while not reached():
        assert supervisor.poll() is None, f"it has ended with {supervisor.returncode} before {what}"
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def write_keys(keys: Path) -> None:
    (keys / "token").write_text("token")
    make_identity(keys / "ca.pem", keys / "identity.pem")


def answers(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


def test_supervisor_waits_for_a_lock_answers_probes_and_leaves_the_run_to_its_successor(tmp_path: Path) -> None:
    folder, keys, job = RunDir(tmp_path / "run"), tmp_path / "keys", tmp_path / "job.json"
    folder.path.mkdir()
    keys.mkdir()
    write_keys(keys)
    job.write_text('{"job": {}}')
    with socket.create_server(("127.0.0.1", 0)) as chosen:
        port = chosen.getsockname()[1]
    lock = folder.lock()
    assert lock is not None
    words = (str(folder.path), "--job", str(job), "--keys", str(keys), "--port", str(port), "--sync-port", "0")
    errors = tmp_path / "stderr"
    with errors.open("wb") as said:
        supervisor = subprocess.Popen(
            [sys.executable, "-m", "holdfast.launch.kubernetes.incluster.pod_supervisor", *words], stderr=said
        )
    try:
        until(lambda: answers(port), supervisor, "it answers probes")
        assert "holds" in errors.read_text()
        assert not folder.job.exists(), "it touches nothing before the lock is its own"
        os.close(lock)
        until(folder.job.exists, supervisor, "it has the lock")
        until(lambda: folder.read_controller_record().get("port") == port, supervisor, "it listens for agents")
        # A file system without locks: another pod has the lock too, and writes itself down.
        folder.synced.touch()
        other = json.dumps({**folder.read_controller_record(), "id": "another"}).encode()

        def superseded() -> bool:
            atomic_write(
                folder.controller_record, other
            )  # again: a record that this supervisor is just writing takes the first one's place
            return "another pod is" in errors.read_text()

        until(superseded, supervisor, "it is superseded")
        assert folder.control_socket.exists(), "the other pod listens there"
        assert answers(port)
    finally:
        supervisor.terminate()
        supervisor.wait()


def test_folder_of_another_run_that_had_the_id_of_a_tree_is_refused(tmp_path: Path) -> None:
    folder, job = RunDir(tmp_path / "run"), tmp_path / "job.json"
    folder.path.mkdir()
    write_keys(tmp_path)
    folder.job.write_text('{"job": {}, "created_at": 1.0}')
    job.write_text('{"job": {}, "created_at": 2.0}')
    words = (str(folder.path), "--job", str(job), "--keys", str(tmp_path), "--port", "0", "--sync-port", "0")
    command = [sys.executable, "-m", "holdfast.launch.kubernetes.incluster.pod_supervisor", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WITHIN_S, check=False)
    assert done.returncode == 1
    assert "another run that had this id" in done.stderr
