"""Starts one program of a lab and waits until it is ready."""

from __future__ import annotations

import os
import ssl
import subprocess
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import httpx
import msgspec

from holdfast.errors import ExitCode, failure
from holdfast.findings import Owner
from holdfast.host import processes
from holdfast.host.processes import ProcessId
from lab import state
from lab.programs import LabPaths, LabProgram

MARK = "HOLDFAST_LAB"
"""The variable that marks all processes of a lab; its value is the lab's folder."""

_READY_WITHIN_S = 300
_LOOK_S = 0.05
_EVIDENCE_LINES = 15
_ROOT = Path(__file__).resolve().parents[1]


def start(program: LabProgram, paths: LabPaths, *, dies_with_parent: bool, keep: tuple[int, ...] = ()) -> ProcessId:
    """Start a program that outlives this process unless `dies_with_parent`; it inherits the descriptors in `keep`."""
    if program.configuration is not None:
        paths.configuration(program.name).write_bytes(msgspec.json.encode(program.configuration, enc_hook=os.fspath))
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH")))),
        "KUBECONFIG": str(paths.kubeconfig),
        "GOGC": "200",  # a third less CPU time of the API server; with 400 it took 2.8 GB
        **program.environment,
        MARK: str(paths.folder),
    }
    with log_path(paths, program.name).open("ab") as output:
        process = subprocess.Popen(
            [os.fspath(word) for word in program.argv],
            env=environment,
            cwd=paths.folder,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            pass_fds=keep,
            start_new_session=True,
            preexec_fn=processes.die_with_parent if dies_with_parent else None,  # noqa: PLW1509 it makes one system call
        )
    identity = processes.identify(process.pid)
    return identity or ProcessId(process.pid, 0)  # as one that has exited


def wait_ready(started: Iterable[LabProgram], paths: LabPaths, is_crash_looping: Callable[[str], bool]) -> None:
    """Return when every program is ready; raise for one that crash-loops, with the end of its log."""
    deadline = time.monotonic() + _READY_WITHIN_S
    trust = ssl.create_default_context(cafile=paths.pki / "ca.crt")
    token = (paths.pki / "token").read_text()
    with httpx.Client(verify=trust, headers={"Authorization": f"Bearer {token}"}, timeout=5) as client:
        for program in started:
            while program.ready and not _responds(client, program.ready):
                if is_crash_looping(program.name):
                    raise crash_error(program.name, paths)
                if time.monotonic() > deadline:
                    raise _not_ready_error(program, paths)
                time.sleep(_LOOK_S)


def log_path(paths: LabPaths, name: str) -> Path:
    """The log file of a program."""
    return paths.folder / "log" / f"{name}.log"


def _responds(client: httpx.Client, url: str) -> bool:
    try:
        return client.get(url).is_success
    except httpx.HTTPError:
        return False


def crash_error(name: str, paths: LabPaths) -> Exception:
    """The error for a program that crash-loops."""
    known = state.load(paths.folder)
    times = known.crash_counts(name).total if known else 0
    return failure(
        "lab-program-died",
        f"{name} has crashed" + (f", {times} times" if times > 1 else ""),
        exit_code=ExitCode.CANNOT_RUN_HERE,
        evidence=_last_log_lines(name, paths),
        remedy="See the end of its log; with too little memory or disk, end other labs (python -m lab down).",
        owner=Owner.CLUSTER,
    )


def _not_ready_error(program: LabProgram, paths: LabPaths) -> Exception:
    return failure(
        "lab-not-ready",
        f"{program.name} was not ready within {_READY_WITHIN_S} s",
        exit_code=ExitCode.CANNOT_RUN_HERE,
        evidence=_last_log_lines(program.name, paths),
        remedy="See the end of its log.",
        owner=Owner.CLUSTER,
    )


def _last_log_lines(name: str, paths: LabPaths) -> tuple[str, ...]:
    return tuple(log_path(paths, name).read_text(errors="replace").splitlines()[-_EVIDENCE_LINES:])
