"""Simulated agents, many per process: real connections, the real protocol, ranks that exist only in messages.

simulated_run.py starts it as `python -m bench.simulated_agents URL TOKEN_FILE`. Standard input takes one JSON object
per line (`StartAgents`, `RemoveNode`, `Shutdown`), standard output writes one (`NodeRemoved`, `OrdersReceived`). Times
are CLOCK_MONOTONIC, which all processes share.
"""

from __future__ import annotations

import asyncio
import os
import resource
import sys
import time
from pathlib import Path
from typing import TextIO

import msgspec

from holdfast.agent.controller_connection import ControllerConnection
from holdfast.agent.node_check import NodeCheck
from holdfast.clock import Clock
from holdfast.events import AgentConnected, ExitReason, RankExited, RanksStarted, RanksStopped, RankState
from holdfast.job.heartbeat_timeouts import HeartbeatTimeouts
from holdfast.protocol.orders import PROTOCOL, AnyOrder, CheckNode, NodeStep, Progress, Shutdown, StartRanks, StopRanks
from holdfast.security.tokens import TokenIssuer

FIRST_PORT = 20000


class StartAgents(msgspec.Struct, frozen=True, tag="start-agents"):
    """Start the agents of these nodes, given as node and generation; running ones are left alone."""

    nodes: tuple[tuple[int, int], ...]


class RemoveNode(msgspec.Struct, frozen=True, tag="remove-node"):
    """A node ceases to exist, and its backend reports it."""

    node: int


class Step(msgspec.Struct, frozen=True, tag="step"):
    """Every running rank passes this step simultaneously, as ranks that train together do."""

    step: int
    took_s: float


class NodeRemoved(msgspec.Struct, frozen=True, tag="node-removed"):
    """A node ceased to exist, at `at`."""

    node: int
    generation: int
    at: float


class OrdersReceived(msgspec.Struct, frozen=True, tag="orders-received"):
    """All live agents of this process have received an order of an attempt (`stop` or `start`), each at its time."""

    order: str
    attempt: int
    at: tuple[float, ...]


Request = StartAgents | RemoveNode | Step
Reply = NodeRemoved | OrdersReceived

requests = msgspec.json.Decoder(Request)
replies = msgspec.json.Decoder(Reply)
encode = msgspec.json.Encoder().encode


class SimulatedAgent:
    """One node's agent, without a node."""

    def __init__(self, fleet: Fleet, node: int, generation: int) -> None:
        self.node = node
        self.generation = generation
        self._fleet = fleet
        self._incarnation = f"{os.getpid():x}-{time.monotonic_ns():x}"
        source = f"node{node}.{generation}/{self._incarnation}"
        self._link = ControllerConnection(
            lambda: fleet.url,
            fleet.keys.node_token(node, generation),
            source,
            hello=self._hello,
            handle_order=self._handle,
            ca=fleet.ca,
            heartbeat_timeouts=HeartbeatTimeouts(node_grace_s=45.0),
        )
        self._check = NodeCheck(
            node=node, generation=generation, address=_address(node), clock=fleet.clock, send=self._link.send
        )
        self._attempt = -1
        self._replica = 0
        self._ranks: tuple[int, ...] = ()
        """Those alive."""
        self._port = FIRST_PORT + node % 20000
        self._connection = asyncio.ensure_future(self._link.run())

    def step(self, step: int, started: float, ended: float) -> None:
        if self._ranks:
            metrics = {"loss": 2.5, "tokens": 4e6} if self._ranks[0] == 0 else {}
            passed = NodeStep(step=step, started=started, ended=ended, metrics=metrics)
            self._link.send(Progress(node=self.node, replica=self._replica, attempt=self._attempt, steps=(passed,)))

    def vanish(self) -> None:
        """Vanish like a machine that loses power: without a message."""
        self._connection.cancel()

    def _hello(self) -> AgentConnected:
        return AgentConnected(
            at=self._fleet.clock(),
            node=self.node,
            source=f"node{self.node}.{self.generation}/{self._incarnation}",
            generation=self.generation,
            incarnation=self._incarnation,
            hostname=f"host-{self.node}",
            address=_address(self.node),
            port=self._port,
            pid=os.getpid(),
            attempt=self._attempt,
            running=tuple(map(self._state, self._ranks)),
            clock=self._fleet.clock.sample,
            protocol=PROTOCOL,
        )

    def _state(self, rank: int) -> RankState:
        return RankState(rank=rank, pid=1_000_000 + rank)

    def _handle(self, order: AnyOrder) -> None:
        match order:
            case StartRanks() if order.attempt > self._attempt:
                self._fleet.ordered("start", order.attempt)
                self._attempt, self._replica = order.attempt, order.replica
                self._ranks = tuple(launch.rank for launch in order.ranks)
                self._link.send(
                    RanksStarted(
                        at=self._fleet.clock(),
                        node=self.node,
                        replica=order.replica,
                        attempt=order.attempt,
                        ranks=tuple(map(self._state, self._ranks)),
                    )
                )
            case CheckNode():
                self._check.request(order)  # the real checks, of this machine
            case StopRanks():
                self._fleet.ordered("stop", order.attempt)
                self._stop(order)
            case Shutdown():
                self._fleet.agents.pop(self.node, None)
                self.vanish()
            case _:
                pass

    def _stop(self, order: StopRanks) -> None:
        if not self._ranks and order.attempt <= self._attempt:
            return
        ended, self._ranks = self._ranks, ()
        self._attempt = max(self._attempt, order.attempt)
        self._port += 1
        at = self._fleet.clock()
        for rank in ended:
            self._link.send(
                RankExited(
                    at=at,
                    node=self.node,
                    replica=order.replica,
                    attempt=order.attempt,
                    rank=rank,
                    reason=ExitReason.SIGNAL,
                    code=9,
                    stopped=True,
                    has_session=True,
                )
            )
        self._link.send(
            RanksStopped(at=at, node=self.node, replica=order.replica, attempt=order.attempt, port=self._port)
        )


def _address(node: int) -> str:
    return f"10.{node >> 16 & 255}.{node >> 8 & 255}.{node & 255}"


class Fleet:
    """The agents of this process."""

    def __init__(self, url: str, keys: TokenIssuer, ca: Path, out: TextIO) -> None:
        self.url = url
        self.ca = ca if url.startswith("wss:") else None
        self.keys = keys
        self.clock = Clock()
        self.agents: dict[int, SimulatedAgent] = {}
        self._out = out
        self._orders: dict[tuple[str, int], list[float]] = {}

    def handle(self, request: Request) -> None:
        match request:
            case StartAgents(nodes=places):
                for node, generation in places:
                    known = self.agents.get(node)
                    if known is None or known.generation < generation:
                        self.agents[node] = SimulatedAgent(self, node, generation)
            case RemoveNode(node=node):
                agent = self.agents.pop(node)
                agent.vanish()
                self._send(NodeRemoved(node=node, generation=agent.generation, at=time.monotonic()))
            case Step(step=step, took_s=took_s):
                now = self.clock()
                for agent in self.agents.values():
                    agent.step(step, now - took_s, now)

    def ordered(self, order: str, attempt: int) -> None:
        had = self._orders.setdefault((order, attempt), [])
        had.append(time.monotonic())
        if len(had) == len(self.agents):
            self._send(OrdersReceived(order=order, attempt=attempt, at=tuple(had)))

    def _send(self, words: Reply) -> None:
        self._out.write(encode(words).decode() + "\n")
        self._out.flush()


async def _serve(url: str, token: str, ca: Path) -> None:
    fleet = Fleet(url, TokenIssuer(token), ca, sys.stdout)
    lines = asyncio.StreamReader(limit=64 * 1024 * 1024)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    while line := await lines.readline():
        fleet.handle(requests.decode(line))


def main() -> None:
    """Run the agents until standard input ends."""
    url, token_file, ca = sys.argv[1:]
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    asyncio.run(_serve(url, Path(token_file).read_text().strip(), Path(ca)))


if __name__ == "__main__":
    main()
