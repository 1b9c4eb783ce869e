"""Runs the lab's kubelet so that Python in its pods is forked from it: `forked_pods.py -m lab.kubelet CONFIGURATION`.

What starts a container (`nsenter`, `unshare`, a script of `sh` that mounts, `lab/kubelet/container_fs.py`) ends with
the `exec` of the container's program. Here one fork of the kubelet makes the same system calls, and becomes that
program if it is Python (python_forks.py). All that the kubelet, Kubernetes and the program see is the same.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import python_forks

from holdfast.launch.local.netns import namespace

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
NAMESPACES = {"--net": namespace.NEW_NET, "--uts": namespace.NEW_UTS}
RECURSIVE = 1 << 14
PROPAGATION = {"slave": RECURSIVE | 1 << 19, "unchanged": 0}
"""Flags of linux/mount.h; by none a mount changes nothing."""
_libc = ctypes.CDLL(None, use_errno=True)
_execve = os.execve


def steps_of(argv: list[str]) -> tuple[list[Callable[[], object]], list[str]]:
    """What the commands before a program do, and the program; no steps where one of them is not known here."""
    steps: list[Callable[[], object]] = []
    rest = argv
    while rest and rest[0] in ("nsenter", "unshare"):
        end = rest.index("--")
        for option in rest[1:end]:
            name, _, value = option.partition("=")
            if rest[0] == "nsenter" and name in NAMESPACES and value:
                steps.append(partial(namespace.join, Path(value), NAMESPACES[name]))
            elif option == "--mount" and rest[0] == "unshare":
                steps.append(partial(namespace.unshare, namespace.NEW_MOUNT))
            elif name == "--propagation" and value in PROPAGATION:
                steps.append(partial(_propagate, PROPAGATION[value]))
            else:
                return [], argv
        rest = rest[end + 1 :]
    if steps and rest[:2] == ["sh", "-c"]:
        steps.append(partial(subprocess.run, [*rest[:4], "true"], check=True))
        rest = rest[4:]
    return steps, rest


def _propagate(flags: int) -> None:
    if flags and _libc.mount(b"none", b"/", None, ctypes.c_ulong(flags), None) != 0:
        raise OSError(ctypes.get_errno(), "mount")


def start(*given: Any) -> int:
    """In place of `_posixsubprocess.fork_exec`."""
    steps, argv = steps_of([os.fsdecode(word) for word in given[0]])
    if not steps or not python_forks.python_command(argv, [os.fsencode(argv[0])]):
        return python_forks.fork_exec(*given)
    before: Callable[[], object] | None = given[21]

    def prepare() -> None:
        for step in (before, *steps):
            if step is not None:
                step()

    words = [os.fsencode(word) for word in argv]
    return python_forks.fork_exec(words, (words[0],), *given[2:21], prepare, *given[22:])


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
    cast("Any", subprocess)._fork_exec = start
    os.execve = cast("Any", execute)
    os.execv = cast("Any", execute)
    python_forks.prepare(IMPORTED)
    python_forks.become([sys.executable, *sys.argv[1:-1]], environ)


if __name__ == "__main__":
    main()
