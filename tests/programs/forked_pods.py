"""Runs the lab's kubelet so that Python in its pods is forked from it: `forked_pods.py -m lab.kubelet CONFIGURATION`.

What starts a container (`nsenter`, `unshare`, a script of `sh` that mounts, `lab/kubelet/container_fs.py`) ends with
the `exec` of the container's program. Here one fork of the kubelet makes the same system calls, and becomes that
program if it is Python (python_forks.py). All that the kubelet, Kubernetes and the program see is the same.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any, cast

import python_forks

IMPORTED = (
    *python_forks.IMPORTED,
    "holdfast.agent.bootstrap",
    "holdfast.launch.kubernetes.incluster.pod_supervisor",
    "holdfast.launch.kubernetes.incluster.prepare_controller",
    "starlette.websockets",
    "uvicorn",
)
SLACK = "HOLDFAST_TEST_SLACK"
"""A variable that makes room where the kernel shows a fork's environment; the last argument does that for arguments."""
ROOM = "-" * 48 * 1024
THREADS = {"OMP_NUM_THREADS": "1"}
_execve = os.execve


def execute(path: str, argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> None:
    """In place of `os.execve` and `os.execv`."""
    words, variables = [os.fsdecode(word) for word in argv], {**environ}
    command = python_forks.python_command(words, [os.fsencode(path)])
    if not python_forks.can_fork(command, os.getcwd(), variables):
        _execve(path, argv, variables)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        try:
            if not os.get_inheritable(descriptor):
                os.close(descriptor)
        except OSError:  # that of the list itself
            continue
    python_forks.become(command, variables)


def main() -> None:
    if SLACK not in os.environ:
        _execve(sys.executable, [sys.executable, *sys.argv, ROOM], os.environ | {SLACK: ROOM} | THREADS)
    environ = {name: value for name, value in os.environ.items() if name not in (SLACK, *THREADS)}
    cast("Any", subprocess)._fork_exec = python_forks.fork_exec
    os.execve = cast("Any", execute)
    os.execv = cast("Any", execute)
    python_forks.prepare(IMPORTED)
    python_forks.become([sys.executable, *sys.argv[1:-1]], environ)


if __name__ == "__main__":
    main()
