"""One container: its process, its inputs, and its exit; the pod decides on restarts."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from holdfast.host import processes
from lab.kubelet import logs
from lab.kubelet.api import KubeletApi, KubeObject
from lab.kubelet.container_env import MissingReference, container_env, expand
from lab.kubelet.pod_sandbox import PodSandbox
from lab.kubelet.status import ContainerState, container_id, moment, running, terminated
from lab.kubelet.volumes import read_object

MARK = "HOLDFAST_LAB_CONTAINER"

_INHERITED_ENV = ("PATH", "HOME", "LANG", "HOLDFAST_LAB")
"""Variables of the kubelet's environment that a container inherits, since it runs on the same machine."""
_FS_SETUP = Path(__file__).with_name("container_fs.py")
_START_FAILED = 128
_ABOVE_DESCRIPTORS_OF_SHELLS = 100
_END_WITHIN_S = 10.0
_MESSAGE_BYTES = 4096


@dataclass(frozen=True, kw_only=True)
class PodContext:
    """State that all containers of a pod share."""

    api: KubeletApi
    pod: KubeObject
    folder: Path
    sandbox: PodSandbox
    volumes: Mapping[str, Path]
    addresses: Mapping[str, str]
    hostname: str


class Container:
    """A container, over all of its restarts."""

    def __init__(self, spec: KubeObject, pod: KubeObject, folder: Path) -> None:
        self.spec = spec
        self.name: str = spec["name"]
        self.state = ContainerState()
        self.environment: dict[str, str] = {}
        """Environment of the last start."""
        self.started = asyncio.Event()
        """Set once it has started, as its startup probe may decide."""
        self.exited = asyncio.Event()
        """Set while its first process does not run."""
        self._pod = pod
        self._folder = folder / "containers" / self.name
        self._process: asyncio.subprocess.Process | None = None
        self._log_task: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        """The pid of its first process, while it runs."""
        alive = self._process is not None and self._process.returncode is None
        return self._process.pid if alive and self._process else None

    @property
    def id(self) -> str:
        return container_id(self._pod, self.spec, self.state)

    def log(self, *, previous: bool = False) -> Path:
        """The log of this start, or of the previous one."""
        return self._folder / f"{self.state.restarts - previous}.log"

    def exec_argv(self, *words: str) -> list[str]:
        """The argv that runs a command inside the container."""
        return ["nsenter", f"--target={self.pid}", "--mount", "--uts", "--net", "--root", "--wd", "--", *words]

    async def start(self, context: PodContext) -> None:
        """Start the program; return when it runs or has failed to start.

        Raises `MissingReference` if an object it needs is missing.
        """
        own = await self._env(context)
        words = [*self.spec.get("command", ()), *self.spec.get("args", ())]
        if not words:
            raise MissingReference("no command specified, and an image is a name only here")
        machine = {name: os.environ[name] for name in _INHERITED_ENV if name in os.environ}
        machine["PATH"] = os.pathsep.join((os.path.dirname(sys.executable), machine.get("PATH", os.defpath)))
        cluster = {"KUBERNETES_SERVICE_HOST": "kubernetes.default.svc", "KUBERNETES_SERVICE_PORT": "443"}
        mark = {MARK: self._mark(), "HOSTNAME": context.hostname}
        self.environment = machine | cluster | own | mark
        self._folder.mkdir(parents=True, exist_ok=True)
        await self._run(context, [expand(word, own) for word in words])

    async def wait(self) -> int:
        """Wait until all its processes are gone; return its exit code."""
        assert self._process is not None
        assert self._log_task is not None
        code = await self._process.wait()
        self.exited.set()
        await asyncio.to_thread(self._kill_leftovers)
        await self._log_task
        code = code if code >= 0 else 128 - code
        started_at = self.state.now.get("running", {}).get("startedAt", moment())
        reason = "StartError" if code == _START_FAILED else ""
        self.state.now = terminated(code, started_at, reason=reason, container_id=self.id)
        if message := self._message():
            self.state.now["terminated"]["message"] = message
        self.state.ready = False
        return code

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to its first process, as a runtime does."""
        if pid := self.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    async def _run(self, context: PodContext, words: list[str]) -> None:
        spec = {
            "hostname": context.hostname,
            "root": str(self._root()),
            "folder": self.spec.get("workingDir", ""),
            "mounts": self._mounts(context),
        }
        # Not asyncio's own pipe: asyncio treats a process as running until all copies of its output are closed.
        output, output_writer = os.pipe()
        exec_reader, exec_writer = os.pipe()
        # The program's end closes at exec, or when the process dies.
        inherited = fcntl.fcntl(exec_writer, fcntl.F_DUPFD, _ABOVE_DESCRIPTORS_OF_SHELLS)
        os.close(exec_writer)
        try:
            self._process = await asyncio.create_subprocess_exec(
                *context.sandbox.exec_prefix,
                *(sys.executable, "-I", "-S", str(_FS_SETUP), str(inherited), json.dumps(spec)),
                *words,
                env=self.environment,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output_writer,
                stderr=asyncio.subprocess.STDOUT,
                pass_fds=(inherited,),
                start_new_session=True,
                preexec_fn=processes.die_with_parent,
            )
        finally:
            os.close(inherited)
            os.close(output_writer)
        self.exited.clear()
        self._log_task = asyncio.create_task(logs.write_log(output, self.log()))
        await asyncio.to_thread(_read_to_end, exec_reader)
        self.state.now = running()

    async def _env(self, context: PodContext) -> dict[str, str]:
        async def entries(kind: str, name: str, optional: bool) -> dict[str, str]:
            found = await read_object(context.api, context.pod["metadata"]["namespace"], kind, name, optional)
            return {key: value.decode(errors="replace") for key, value in found.items()}

        return await container_env(self.spec, context.pod, context.addresses, entries)

    def _mounts(self, context: PodContext) -> list[tuple[str, str, bool]]:
        message = self._folder / "message"
        message.write_bytes(b"")
        mounts = [
            (str(context.sandbox.hosts), "/etc/hosts", False),
            (str(message), self.spec.get("terminationMessagePath", "/dev/termination-log"), False),
        ]
        for mount in self.spec.get("volumeMounts", ()):
            part = expand(mount.get("subPathExpr", mount.get("subPath", "")), self.environment)
            source = context.volumes[mount["name"]] / part
            if not source.exists():
                source.mkdir(parents=True)
            mounts.append((str(source), mount["mountPath"], mount.get("readOnly", False)))
        # A mount inside another mount comes after it.
        return sorted(mounts, key=lambda mount: mount[1].count("/"))

    def _root(self) -> Path:
        root = self._folder / "root"
        root.mkdir(exist_ok=True)
        return root

    def _message(self) -> str:
        path = self._folder / "message"
        if path.exists() and (text := path.read_bytes()[-_MESSAGE_BYTES:].decode(errors="replace")):
            return text
        if self.state.now["terminated"]["reason"] == "StartError" and self.log().exists():
            return self.log().read_text(errors="replace").strip()
        return ""

    def _mark(self) -> str:
        return f"{self._pod['metadata']['uid']}/{self.name}"

    def _kill_leftovers(self) -> None:
        processes.kill_all(
            lambda: processes.by_env(processes.all_pids(), **{MARK: self._mark()}), within_s=_END_WITHIN_S
        )


def _read_to_end(descriptor: int) -> None:
    with open(descriptor, "rb") as pipe:
        pipe.read()
