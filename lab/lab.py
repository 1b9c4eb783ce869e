"""Lab lifecycle: starts the programs in order, finds them again, and removes them completely.

FOLDER/
    lab.json          the lab's state (state.py)
    kubeconfig        for kubectl, and for any client
    pki/              keys and certificates (pki.py)
    log/NAME.log      output of each program
    configuration/    configuration of the programs

Every process has the lab's folder in its environment; by that mark the lab finds processes that were never recorded.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from holdfast.errors import ExitCode, failure
from holdfast.host import processes
from holdfast.launch.local import netns
from lab import etcd_seed, manifests, pki, ports, programs, runner, state, toolchain
from lab.cache import locked
from lab.client import LabClient
from lab.install import install_for_lab
from lab.kubelet.nodes import STATE, NodeSpec, NodeState
from lab.programs import LabPaths, LabProgram
from lab.state import LabState
from lab.supervision import LabSupervisor


def nodes(count: int, *, gpus: int = 8, cpus: int = 192, memory: str = "2Ti") -> tuple[NodeSpec, ...]:
    """Equal nodes, two per rack and four per block."""
    capacity = {"cpu": str(cpus), "memory": memory, "pods": "110", "ephemeral-storage": "1Ti"}
    if gpus:
        capacity["nvidia.com/gpu"] = str(gpus)
    topology = "cloud.provider.com/topology"
    return tuple(
        NodeSpec(
            name=f"node-{number}",
            capacity=capacity,
            labels={f"{topology}-block": f"b{number // 4}", f"{topology}-rack": f"b{number // 4}-r{number // 2 % 2}"},
        )
        for number in range(count)
    )


FOUR_NODES = nodes(4)

_MEMORY = Path("/dev/shm")
_MEMORY_NEEDED_BYTES = 512 * 1024**2
_END_WITHIN_S = 30.0
_EVIDENCE_LINES = 15
_BRIEF = {"GOGC": "off", "GOMAXPROCS": "1"}
"""Variables for a program in Go that ends soon: without garbage collection, kubectl takes a third less CPU time."""


def build_all() -> tuple[Path, Path, Path, Path]:
    """The control plane's programs, the operators, their manifests, and etcd's seed; built if necessary."""
    return (
        toolchain.program_folder(toolchain.CONTROLPLANE),
        toolchain.program_folder(toolchain.OPERATORS),
        manifests.collected_manifests(),
        etcd_seed.build_seed(),
    )


class Lab:
    """The lab in a folder, running or not."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()
        self.kubeconfig = self.folder / "kubeconfig"

    def up(
        self,
        *,
        nodes: tuple[NodeSpec, ...] = FOUR_NODES,
        interfaces: tuple[netns.NetnsInterface, ...] = (netns.NetnsInterface(),),
        node_lost_after_s: int = state.NODE_LOST_AFTER_S,
        kubelet_python: tuple[str, ...] = (sys.executable,),
        dies_with_parent: bool = False,
        log: Callable[[str], None] = print,
    ) -> None:
        """Start the lab and return when every program is ready; keep running programs, and restart those that are down.

        With `dies_with_parent` the lab ends with the process that started it. On an error, everything that this call
        has started is removed.
        """
        build_all()
        with locked(self._lock()):
            if self._is_running():
                return
            started = time.monotonic()
            if self._can_resume():
                self._resume()
            else:
                self._end()
                try:
                    self._start(
                        LabState(
                            ports={},
                            data=str(self._data()),
                            nodes=nodes,
                            interfaces=interfaces,
                            node_lost_after_s=node_lost_after_s,
                            kubelet_python=kubelet_python,
                            dies_with_parent=dies_with_parent,
                        )
                    )
                except BaseException:
                    self._end()
                    raise
        log(f"ready after {time.monotonic() - started:.1f} s")

    def down(self) -> None:
        """Stop the lab and remove all of it; do nothing if there is none."""
        with locked(self._lock()):
            self._end()

    def status(self) -> dict[str, bool]:
        """Whether each program is running; empty if there is no lab."""
        known = state.load(self.folder)
        return {name: process.alive for name, process in known.processes.items()} if known else {}

    def crashes(self) -> dict[str, int]:
        """How often each program has crashed and was restarted."""
        known = state.load(self.folder)
        return {name: ended.total for name, ended in known.crashes.items() if ended.total} if known else {}

    def check(self) -> None:
        """Raise an error for a program that crash-loops."""
        known = self._state()
        for name, process in known.processes.items():
            if (not process.alive and name not in known.stopped) or known.is_crash_looping(name):
                raise runner.crash_error(name, self._paths())

    def supervise(self) -> None:
        """Restart programs that exit, until the lab is removed."""
        paths = self._paths()
        made = (make(paths) for make in programs.ALL)
        LabSupervisor(paths, {program.name: program for program in made}).run()

    def client(self) -> LabClient:
        """A client of its API server, as administrator."""
        return LabClient(self._paths().server, self.folder / "pki")

    def kubectl(self, *words: str | Path, input: str | None = None) -> str:
        """Run the lab's own version of kubectl; return its output."""
        command, environ = self.kubectl_command(*words), os.environ | _BRIEF
        done = subprocess.run(command, env=environ, input=input, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise failure(
                "lab-kubectl-failed",
                f"kubectl {' '.join(map(str, words))} ended with {done.returncode}: {done.stderr.strip()}",
                exit_code=ExitCode.CANNOT_RUN_HERE,
                remedy="fix what it names; `python -m lab status` says whether the lab is there",
            )
        return done.stdout

    def kubectl_command(self, *words: str | Path) -> list[str]:
        """The kubectl command line for this lab."""
        program = toolchain.program_folder(toolchain.CONTROLPLANE) / "kubectl"
        return [os.fspath(word) for word in (program, f"--kubeconfig={self.kubeconfig}", *words)]

    def set_state(self, node: str, state: NodeState) -> None:
        """Have a node imitate a fault, or end that; one whose object was deleted registers again, as at a boot."""
        known = any(spec.name == node for spec in self._state().nodes)
        if known and not self.kubectl("get", "node", node, "--ignore-not-found", "-o", "name"):
            self.kubectl(
                "create", "-f", "-", input=json.dumps({"apiVersion": "v1", "kind": "Node", "metadata": {"name": node}})
            )
        self.kubectl("annotate", "node", node, "--overwrite", f"{STATE}={state}")

    def kill(self, name: str) -> None:
        """Kill one program, as a crash would; it stays down until `start`."""
        process = state.update(self.folder, lambda known: known.with_stopped(name)).processes[name]
        if process.alive:
            os.kill(process.pid, signal.SIGKILL)
            processes.wait_for_end([process.pid], time.monotonic() + _END_WITHIN_S)

    def start(self, name: str) -> None:
        """Start one program that is down, on its previous port, and return when it is ready.

        In a lab that dies with its parent, the program dies with the calling thread: that is its parent for the kernel.
        """
        paths = self._paths()
        made = (make(paths) for make in programs.ALL)
        self._run(next(program for program in made if program.name == name))

    def _start(self, wanted: LabState) -> None:
        self.folder.mkdir(mode=0o700)
        for name in ("log", "configuration", "kubelet", "tmp/k8s-webhook-server"):
            (self.folder / name).mkdir(parents=True)
        block, chosen = ports.claim_ports()
        try:
            state.save(self.folder, msgspec.structs.replace(wanted, ports=chosen))
            pki.make_pki(self.folder / "pki")
            (self.folder / "tmp/k8s-webhook-server/serving-certs").symlink_to(self.folder / "pki")
            paths = self._paths()
            self._write_kubeconfig(paths)
            etcd_seed.copy_seed(paths.data)
            self._run(programs.supervisor(paths), programs.etcd(paths), programs.apiserver(paths), keep=block)
            install_for_lab(self.client(), paths, manifests.published_objects(paths.operator_manifests))
            rest = [make for make in programs.ALL if make not in (programs.etcd, programs.apiserver)]
            self._run(*(make(paths) for make in rest), keep=block)
        finally:
            os.close(block)
        state.update(self.folder, lambda known: msgspec.structs.replace(known, ready=True))

    def _can_resume(self) -> bool:
        """Whether the lab was complete and still has its data and its ports, which any running program keeps."""
        known = state.load(self.folder)
        alive = known is not None and any(process.alive for process in known.processes.values())
        return known is not None and known.ready and alive and Path(known.data).exists()

    def _resume(self) -> None:
        """Start the programs that are down."""
        known, paths = self._state(), self._paths()
        made = (make(paths) for make in (programs.supervisor, *programs.ALL))
        self._run(*(program for program in made if not known.is_alive(program.name)))

    def _run(self, *started: LabProgram, keep: int | None = None) -> None:
        """Start programs concurrently unless they run, record them, and return when they are ready."""
        paths = self._paths()

        def running(known: LabState, program: LabProgram) -> LabState:
            if known.is_alive(program.name):
                return known
            kept = () if keep is None else (keep,)
            return known.with_process(
                program.name, runner.start(program, paths, dies_with_parent=known.dies_with_parent, keep=kept)
            )

        for program in started:
            state.update(self.folder, lambda known, program=program: running(known, program))
        runner.wait_ready(started, paths, lambda name: self._state().is_crash_looping(name))

    def _end(self) -> None:
        """Kill all processes with the lab's mark, recorded or not, and remove its folders."""
        processes.kill_all(self._lab_processes, within_s=_END_WITHIN_S)
        netns.remove(programs.lab_tag(self.folder))
        shutil.rmtree(self._data_in_memory(), ignore_errors=True)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _lock(self) -> Path:
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        return self.folder.with_name(f"{self.folder.name}.lock")

    def _lab_processes(self) -> Iterable[int]:
        others = (pid for pid in processes.all_pids() if pid != os.getpid())
        return processes.by_env(others, **{runner.MARK: str(self.folder)})

    def _is_running(self) -> bool:
        known = state.load(self.folder)
        return known is not None and known.ready and all(process.alive for process in known.processes.values())

    def _state(self) -> LabState:
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

    def _paths(self) -> LabPaths:
        known = self._state()
        controlplane, operators, published, _ = build_all()
        return LabPaths(
            folder=self.folder,
            data=Path(known.data),
            controlplane=controlplane,
            operators=operators,
            operator_manifests=published,
            ports=known.ports,
            nodes=known.nodes,
            interfaces=known.interfaces,
            node_lost_after_s=known.node_lost_after_s,
            kubelet_python=known.kubelet_python,
        )

    def _data(self) -> Path:
        """Folder of etcd's files: in memory, unless little is free, as in most containers."""
        try:
            room = shutil.disk_usage(_MEMORY).free
        except OSError:
            room = 0
        return self._data_in_memory() if room >= _MEMORY_NEEDED_BYTES else self.folder / "etcd"

    def _data_in_memory(self) -> Path:
        return _MEMORY / f"holdfast-{programs.lab_tag(self.folder)}"

    def _write_kubeconfig(self, paths: LabPaths) -> None:
        cluster = {"server": paths.server, "certificate-authority": str(paths.pki / "ca.crt")}
        user = {"token": (paths.pki / "token").read_text()}
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
