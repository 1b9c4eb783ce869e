"""Owns how one program of a lab is started and waited for; refuses to know which programs there are."""

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
from holdfast.findings import Fault
from holdfast.host import processes
from holdfast.host.processes import ProcessId
from lab import state
from lab.programs import Place, Program

MARK = "HOLDFAST_LAB"
"""The variable by which everything that belongs to a lab is found; its value is the lab's folder."""

_READY_WITHIN_S = 300
_LOOK_S = 0.05
_EVIDENCE_LINES = 15
_ROOT = Path(__file__).resolve().parents[1]


def run(program: Program, place: Place, *, tied: bool, keep: tuple[int, ...] = ()) -> ProcessId:
    """Start a program that outlives this process unless it is `tied`; it inherits the descriptors to `keep`."""
    if program.configuration is not None:
        place.configuration(program.name).write_bytes(msgspec.json.encode(program.configuration, enc_hook=os.fspath))
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH")))),
        "KUBECONFIG": str(place.kubeconfig),
        **program.environment,
        MARK: str(place.folder),
    }
    with log(place, program.name).open("ab") as output:
        process = subprocess.Popen(
            [os.fspath(word) for word in program.argv],
            env=environment,
            cwd=place.folder,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            pass_fds=keep,
            start_new_session=True,
            preexec_fn=processes.die_with_parent if tied else None,  # noqa: PLW1509 it makes one system call
        )
    identity = processes.identify(process.pid)
    return identity or ProcessId(process.pid, 0)  # as one that has ended


def await_ready(started: Iterable[Program], place: Place, hopeless: Callable[[str], bool]) -> None:
    """Return when every program says that it is ready; a hopeless one, by its name, is an error with its last words."""
    deadline = time.monotonic() + _READY_WITHIN_S
    trust = ssl.create_default_context(cafile=place.pki / "ca.crt")
    token = (place.pki / "token").read_text()
    with httpx.Client(verify=trust, headers={"Authorization": f"Bearer {token}"}, timeout=5) as client:
        for program in started:
            while program.ready and not _answers(client, program.ready):
                if hopeless(program.name):
                    raise died(program.name, place)
                if time.monotonic() > deadline:
                    raise _late(program, place)
                time.sleep(_LOOK_S)


def log(place: Place, name: str) -> Path:
    """Where what a program says is kept."""
    return place.folder / "log" / f"{name}.log"


def _answers(client: httpx.Client, url: str) -> bool:
    try:
        return client.get(url).is_success
    except httpx.HTTPError:
        return False


def died(name: str, place: Place) -> Exception:
    """What is said of a program that does not go on."""
    known = state.load(place.folder)
    times = known.ended(name).times if known else 0
    return failure(
        "lab-program-died",
        f"{name} has ended by itself" + (f", {times} times" if times > 1 else ""),
        exit_code=ExitCode.IMPOSSIBLE,
        evidence=_last_words(name, place),
        remedy="See its last words; with too little memory or disk, end other labs (python -m lab down).",
        fault=Fault.CLUSTER,
    )


def _late(program: Program, place: Place) -> Exception:
    return failure(
        "lab-not-ready",
        f"{program.name} was not ready within {_READY_WITHIN_S} s",
        exit_code=ExitCode.IMPOSSIBLE,
        evidence=_last_words(program.name, place),
        remedy="See its last words.",
        fault=Fault.CLUSTER,
    )


def _last_words(name: str, place: Place) -> tuple[str, ...]:
    return tuple(log(place, name).read_text(errors="replace").splitlines()[-_EVIDENCE_LINES:])
