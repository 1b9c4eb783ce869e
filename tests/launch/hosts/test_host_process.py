"""The processes of two hosts that share their folder, as in most Slurm clusters."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from holdfast.launch.hosts.host_messages import EndRun, RunEnded, Setup, encode

DEADLINE_S = 200.0
SETUP = Setup(
    run="shared",
    node_slots=2,
    ca="",
    controller_host="localhost",
    controller_port=1,
    nodes=(),
    exclusive=False,
    sizes={},
)


def test_run_ends_on_a_host_although_another_one_has_deleted_its_files(home: Path) -> None:
    hosts = [
        subprocess.Popen(
            [sys.executable, "-m", "holdfast.launch.hosts.host_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for _ in range(2)
    ]
    for host in hosts:
        assert host.stdin is not None
        assert host.stdout is not None
        host.stdin.write(encode(SETUP))
        host.stdin.flush()
        assert host.stdout.readline()  # it has made the folder
    folder = home / "runs" / SETUP.run
    assert folder.exists()
    for host in hosts:
        said, errors = host.communicate(encode(EndRun()), DEADLINE_S)
        assert not folder.exists()
        assert encode(RunEnded()) in said
        assert (host.returncode, errors) == (0, b"")
