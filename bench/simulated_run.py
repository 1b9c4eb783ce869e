"""A run of simulated nodes: the real controller in a separate process, and a few processes full of agents.

The bench starts the controller on sockets made for it, as a supervisor does, with a backend whose nodes the fleet
makes (simulated_agents.py). Used by scale.py and by tests.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from bench.null_backend import NullBackend
from bench.simulated_agents import NodeRemoved, OrdersReceived, RemoveNode, Request, StartAgents, Step, encode, replies
from holdfast import controller_main
from holdfast.events import AnyEvent
from holdfast.events.log import EventReader
from holdfast.job.backend import BackendNodeState, NodeId, NodeObservation
from holdfast.job.run_spec import RunSpec
from holdfast.job.spec import Checks, Job, Nodes
from holdfast.run_dir import RunDir
from holdfast.security.tls import is_remote

ROOT = Path(__file__).parents[1]
END_S = 30.0


class SimulatedBackend(NullBackend):
    """Requests nodes over a stream socket: lines of `StartAgents` out, lines of `NodeRemoved` in."""

    def __init__(self, *, fleet: socket.socket) -> None:
        self._fleet = fleet
        self._seen: asyncio.Queue[NodeObservation] = asyncio.Queue()

    async def submit(self, node_ids: tuple[NodeId, ...]) -> None:
        words = encode(StartAgents(nodes=tuple((place.node, place.generation) for place in node_ids))) + b"\n"
        await asyncio.get_running_loop().sock_sendall(self._fleet, words)
        for place in node_ids:
            self._seen.put_nowait(NodeObservation(node_id=place, state=BackendNodeState.CREATED))

    async def observe(self) -> AsyncIterator[NodeObservation]:
        listening = asyncio.ensure_future(self._listen())
        while not listening.done():
            yield await self._seen.get()

    async def _listen(self) -> None:
        reader, _ = await asyncio.open_connection(sock=self._fleet.dup())
        while line := await reader.readline():
            gone = replies.decode(line)
            assert isinstance(gone, NodeRemoved)
            place = NodeId(node=gone.node, generation=gone.generation)
            reason = "its machine lost its power"
            self._seen.put_nowait(NodeObservation(node_id=place, state=BackendNodeState.TERMINATED, reason=reason))

    async def replace_node(self, node_id: NodeId, reason: str) -> None:
        await self.submit((node_id,))


def _control() -> None:
    """The controller's process: `holdfast.controller_main` with nodes from the fleet."""
    folder, agents, clients, supervisor, fleet = sys.argv[1], *map(int, sys.argv[2:])
    backend = SimulatedBackend(fleet=socket.socket(fileno=fleet))
    backend._fleet.setblocking(False)
    asyncio.run(
        controller_main.serve(
            RunDir(Path(folder)),
            socket.socket(fileno=agents),
            socket.socket(fileno=clients),
            supervisor,
            make_backend=lambda **_: backend,
        )
    )


class Timeout(Exception):
    """Something did not happen before the timeout."""


@dataclass
class SimulatedRun:
    """A started run; use it as a context manager."""

    path: Path
    nodes: int
    ranks_per_node: int = 8
    processes: int = 2
    """Number of processes full of agents; another has those of replaced nodes, whose machines run nothing else."""
    host: str = "127.0.0.1"
    """Address of the controller; beyond loopback it uses TLS."""
    env: dict[str, str] = field(default_factory=dict[str, str])
    """The job's environment for every rank."""
    checks: Checks = field(default_factory=Checks)
    """Whether nodes are checked before they get ranks; the checks are real ones of this machine."""
    events: list[AnyEvent] = field(default_factory=list[AnyEvent])
    replies: list[NodeRemoved | OrdersReceived] = field(default_factory=list[NodeRemoved | OrdersReceived])
    _homes: dict[int, int] = field(default_factory=dict[int, int])
    """The process that has a node's agent."""

    def __enter__(self) -> SimulatedRun:
        self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.folder = RunDir(self.path)
        job = Job(
            name="fleet",
            command=("python", "train.py", "--config", "configs/large.yaml"),
            nodes=Nodes(min=self.nodes, max=self.nodes),
            ranks_per_node=self.ranks_per_node,
            env=self.env,
            checks=self.checks,
        )
        accepted = RunSpec(job=job, base=str(self.path), created_at=time.time(), fabric="tcp")
        self.folder.job.write_text(accepted.model_dump_json(exclude_defaults=True))
        self.folder.token.write_text(secrets.token_urlsafe(32))
        self.folder.secrets.write_text('{"environ": {}, "secrets": {}}')
        self._agents = socket.create_server((self.host, 0), backlog=4096)
        where = dict(zip(("host", "port"), self._agents.getsockname(), strict=False))
        self.folder.controller_record.write_text(json.dumps(where))
        self._clients = socket.socket(socket.AF_UNIX)
        self._clients.bind(str(self.folder.control_socket))
        self._clients.listen(16)
        self._here, self._there = socket.socketpair()
        self._heard = threading.Condition()
        scheme = "wss" if is_remote(self.host) else "ws"
        host, port = self._agents.getsockname()[:2]
        self.folder.controller_record.write_text(
            json.dumps({"host": host, "port": port, "supervisor_pid": os.getpid()})
        )
        url = f"{scheme}://{host}:{port}/v1/agent"
        argv = [sys.executable, "-m", "bench.simulated_agents", url, str(self.folder.token), str(self.folder.ca)]
        pipe = subprocess.PIPE
        self._fleets = [subprocess.Popen(argv, stdin=pipe, stdout=pipe, cwd=ROOT) for _ in range(self.processes + 1)]
        for fleet in self._fleets:
            threading.Thread(target=self._listen, args=(fleet,), daemon=True).start()
        threading.Thread(target=self._make, daemon=True).start()
        self._reader = EventReader(self.folder.events)
        self._beat, self._supervisor = os.pipe()
        self.began, self.started_at = time.monotonic(), time.time()
        self.controller = self._start_controller()
        return self

    def __exit__(self, *_: object) -> None:
        for process in (*self._fleets, self.controller):
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    with contextlib.suppress(OSError):
                        stream.close()
        for end in (self._here, self._there, self._agents, self._clients):
            end.close()
        os.close(self._beat)
        os.close(self._supervisor)

    def _start_controller(self) -> subprocess.Popen[bytes]:
        handed_down = (self._agents.fileno(), self._clients.fileno(), self._supervisor, self._there.fileno())
        with self.folder.controller_log.open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "bench.simulated_run", str(self.path), *map(str, handed_down)],
                pass_fds=handed_down,
                stdout=log,
                stderr=log,
                cwd=ROOT,
            )

    def replace_controller(self) -> None:
        """Kill the controller and start another one, as a supervisor does."""
        self.controller.kill()
        self.controller.wait()
        self.controller = self._start_controller()
        for words in self.replies:
            if isinstance(words, NodeRemoved):  # a backend reports every gone node to a new observer
                self._here.sendall(encode(words) + b"\n")

    # Requests of the backend, and reports of the agents

    def _make(self) -> None:
        with self._here.makefile("rb") as lines, contextlib.suppress(OSError, ValueError):
            for line in lines:
                made = msgspec.json.decode(line, type=StartAgents)
                for node, generation in made.nodes:
                    self._homes[node] = node % self.processes if generation == 0 else self.processes
                for index, _ in enumerate(self._fleets):
                    self._send(
                        index, StartAgents(tuple(place for place in made.nodes if self._homes[place[0]] == index))
                    )

    def _listen(self, fleet: subprocess.Popen[bytes]) -> None:
        assert fleet.stdout is not None
        for line in fleet.stdout:
            words = replies.decode(line)
            if isinstance(words, NodeRemoved):
                self._here.sendall(line)
            with self._heard:
                self.replies.append(words)
                self._heard.notify_all()

    def _send(self, index: int, request: Request) -> None:
        stdin = self._fleets[index].stdin
        assert stdin is not None
        stdin.write(encode(request) + b"\n")
        stdin.flush()

    # Actions of a test or a bench

    def remove_node(self, node: int) -> float:
        """Remove a node; return when it was gone (monotonic seconds)."""
        before = sum(isinstance(words, NodeRemoved) for words in self.replies)
        self._send(self._homes[node], RemoveNode(node))
        with self._heard:
            self._heard.wait_for(lambda: sum(isinstance(words, NodeRemoved) for words in self.replies) > before, END_S)
            gone = [words for words in self.replies if isinstance(words, NodeRemoved)]
        return gone[before].at

    def step(self, step: int, took_s: float) -> None:
        """Let every rank pass a step."""
        for index, _ in enumerate(self._fleets):
            self._send(index, Step(step, took_s))

    def orders(self, order: str, attempt: int, within_s: float) -> list[float]:
        """When each agent received its order (`start`, or `stop` after a loss) of an attempt, in monotonic seconds."""
        expected = self.nodes - (order == "stop")

        def those() -> list[float]:
            ordered = [words for words in self.replies if isinstance(words, OrdersReceived)]
            return [at for words in ordered if (words.order, words.attempt) == (order, attempt) for at in words.at]

        with self._heard:
            if not self._heard.wait_for(lambda: len(those()) >= expected, within_s):
                raise Timeout(f"not every agent received the order to {order} attempt {attempt} within {within_s:g} s")
            return sorted(those())

    def wait_until(self, holds: Callable[[list[AnyEvent]], bool], within_s: float) -> None:
        """Read the log until a condition holds for all events so far."""
        deadline = time.monotonic() + within_s
        while True:
            self.events.extend(self._reader.read())
            if holds(self.events):
                return
            if self.controller.poll() is not None or time.monotonic() > deadline:
                words = self.folder.controller_log.read_text(errors="replace")[-3000:]
                raise Timeout(f"within {within_s:g} s; the controller's last output: {words}")
            time.sleep(0.02)

    def resident_bytes(self, field: str = "VmRSS") -> int:
        """The controller's memory; `VmHWM` is its peak."""
        lines = Path(f"/proc/{self.controller.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


if __name__ == "__main__":
    _control()
