"""Owns a lab's life: its programs are started in order, found again, and ended so that nothing of it is left.

FOLDER/
    lab.json          what it is made of (state.py)
    kubeconfig        for kubectl, and for any client
    pki/              keys and certificates (pki.py)
    log/NAME.log      what each program says
    configuration/    what programs are configured by

Every process carries the lab's folder in its environment, and by that mark it is found although nobody wrote it down.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from holdfast.errors import ExitCode, failure
from holdfast.host import processes
from lab import manifests, pki, ports, programs, runner, state, toolchain
from lab.cache import locked
from lab.client import Client
from lab.install import install
from lab.programs import Place, Program
from lab.state import State

_MEMORY = Path("/dev/shm")
_MEMORY_NEEDED_BYTES = 512 * 1024**2
_END_WITHIN_S = 30.0
_EVIDENCE_LINES = 15


def build() -> tuple[Path, Path, Path]:
    """The folders of the control plane's programs, of the operators', and of what these publish; built if need be."""
    return (
        toolchain.program_folder(toolchain.CONTROLPLANE),
        toolchain.program_folder(toolchain.OPERATORS),
        manifests.collected(),
    )


class Lab:
    """The lab in a folder, whether it is there or not."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()
        self.kubeconfig = self.folder / "kubeconfig"

    def up(self, *, tied: bool = False, say: Callable[[str], None] = print) -> None:
        """Start it, and return when every program is ready; what is there and whole already stays.

        A `tied` one dies with the process that started it. After an error nothing is left.
        """
        build()
        with locked(self._lock()):
            if self._is_whole():
                return
            self._end()
            started = time.monotonic()
            try:
                self._start(tied=tied)
            except BaseException:
                self._end()
                raise
        say(f"ready after {time.monotonic() - started:.1f} s")

    def down(self) -> None:
        """End it and remove all of it; where there is none, nothing is done."""
        with locked(self._lock()):
            self._end()

    def status(self) -> dict[str, bool]:
        """Every program of it, and whether it lives; empty where there is no lab."""
        known = state.load(self.folder)
        return {name: process.alive for name, process in known.processes.items()} if known else {}

    def client(self) -> Client:
        """Its API server, as its administrator."""
        return Client(self._place().server, self.folder / "pki")

    def kubectl(self, *words: str | Path, input: str | None = None) -> str:
        """What kubectl, of the lab's own version, answers."""
        done = subprocess.run(self.kubectl_command(*words), input=input, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise failure(
                "lab-kubectl-failed",
                f"kubectl {' '.join(map(str, words))} ended with {done.returncode}",
                exit_code=ExitCode.IMPOSSIBLE,
                evidence=tuple((done.stdout + done.stderr).splitlines()[-_EVIDENCE_LINES:]),
            )
        return done.stdout

    def kubectl_command(self, *words: str | Path) -> list[str]:
        """How kubectl is called for this lab."""
        program = toolchain.program_folder(toolchain.CONTROLPLANE) / "kubectl"
        return [os.fspath(word) for word in (program, f"--kubeconfig={self.kubeconfig}", *words)]

    def kill(self, name: str) -> None:
        """Kill one program at once, as a crash would."""
        process = self._known().processes[name]
        if process.alive:
            os.kill(process.pid, signal.SIGKILL)
            processes.wait_for_end([process.pid], time.monotonic() + _END_WITHIN_S)

    def start(self, name: str) -> None:
        """Start one program again, at the port it had, and return when it is ready."""
        place = self._place()
        made = (make(place) for make in (*programs.CONTROLPLANE, *programs.OPERATORS))
        self._run(next(program for program in made if program.name == name))

    def _start(self, *, tied: bool) -> None:
        self.folder.mkdir(mode=0o700)
        for name in ("log", "configuration", "tmp/k8s-webhook-server"):
            (self.folder / name).mkdir(parents=True)
        block, chosen = ports.claim()
        try:
            state.save(self.folder, State(ports=chosen, data=str(self._data()), tied=tied))
            pki.make(self.folder / "pki")
            (self.folder / "tmp/k8s-webhook-server/serving-certs").symlink_to(self.folder / "pki")
            place = self._place()
            self._write_kubeconfig(place)
            self._run(programs.etcd(place), keep=block)
            self._run(programs.apiserver(place), keep=block)
            install(self.client(), place, manifests.published(manifests.collected()))
            rest = (programs.controller_manager, programs.scheduler, *programs.OPERATORS)
            self._run(*(make(place) for make in rest), keep=block)
        finally:
            os.close(block)
        state.save(self.folder, msgspec.structs.replace(self._known(), ready=True))

    def _run(self, *started: Program, keep: int | None = None) -> None:
        """Start programs at once, write them down, and return when they are ready."""
        place = self._place()
        for program in started:
            process = runner.run(program, place, tied=self._known().tied, keep=() if keep is None else (keep,))
            state.save(self.folder, self._known().with_process(program.name, process))
        found = self._known().processes
        runner.await_ready([(program, found[program.name]) for program in started], place)

    def _end(self) -> None:
        """Kill all that bears its mark, whether or not it was written down, and remove its folders."""
        processes.end_all(self._inhabitants, within_s=_END_WITHIN_S)
        shutil.rmtree(self._data_in_memory(), ignore_errors=True)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _lock(self) -> Path:
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        return self.folder.with_name(f"{self.folder.name}.lock")

    def _inhabitants(self) -> Iterable[int]:
        others = (pid for pid in processes.all_pids() if pid != os.getpid())
        return processes.marked(others, **{runner.MARK: str(self.folder)})

    def _is_whole(self) -> bool:
        known = state.load(self.folder)
        return known is not None and known.ready and all(process.alive for process in known.processes.values())

    def _known(self) -> State:
        known = state.load(self.folder)
        if known is None:
            raise failure(
                "lab-not-found",
                "there is no such lab",
                exit_code=ExitCode.NOT_FOUND,
                where=str(self.folder),
                remedy="python -m lab up",
            )
        return known

    def _place(self) -> Place:
        known = self._known()
        controlplane, operators, published = build()
        return Place(
            folder=self.folder,
            data=Path(known.data),
            controlplane=controlplane,
            operators=operators,
            stages=published / "stages.yaml",
            ports=known.ports,
        )

    def _data(self) -> Path:
        """Where etcd keeps its files: in memory, unless there is little, as in most containers."""
        try:
            room = shutil.disk_usage(_MEMORY).free
        except OSError:
            room = 0
        return self._data_in_memory() if room >= _MEMORY_NEEDED_BYTES else self.folder / "etcd"

    def _data_in_memory(self) -> Path:
        return _MEMORY / f"holdfast-lab-{hashlib.sha256(str(self.folder).encode()).hexdigest()[:16]}"

    def _write_kubeconfig(self, place: Place) -> None:
        cluster = {"server": place.server, "certificate-authority": str(place.pki / "ca.crt")}
        user = {"token": (place.pki / "token").read_text()}
        context = {"cluster": "lab", "user": "admin", "namespace": "default"}
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "lab", "cluster": cluster}],
            "users": [{"name": "admin", "user": user}],
            "contexts": [{"name": "lab", "context": context}],
            "current-context": "lab",
        }
        self.kubeconfig.touch(mode=0o600)
        self.kubeconfig.write_text(json.dumps(document))
