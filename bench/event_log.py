"""The event log of a month: a real controller receives the messages of thousands of agents; its log, and reading it.

.venv/bin/python -m bench.event_log [--quick | --nodes N --days D]

The controller, its machine, its goodput ledger and its log are real; the clock is simulated, and agents are function
calls. A run of 16,384 ranks over 30 days: failures as often as Llama 3's training reported (419 in 54 days on 16,384
GPUs), of which most lose a node, some only end a rank, and some hang; connections that break and return, controllers
that are replaced, a checkpoint every ten minutes, a step every ten seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import msgspec

from bench import result_file
from bench.null_backend import NullBackend
from bench.paired_stats import headline, say, table
from holdfast import api, controller_main
from holdfast.clock import Clock
from holdfast.control.agent_connections import AgentConnection
from holdfast.control.commands import StartAttempt
from holdfast.control.controller import Controller
from holdfast.control.event_batching import MAX_BATCH_DELAY_S
from holdfast.control.machine import Machine
from holdfast.events import (
    AgentConnected,
    AgentEvent,
    CancelRequested,
    CheckpointCommitted,
    ControllerStarted,
    ExitReason,
    NodeTerminated,
    RankExited,
    RankHung,
    RanksStarted,
    RanksStopped,
    RankState,
    RunCreated,
    StepCommitted,
)
from holdfast.events.log import EventReader, is_intact, read_events
from holdfast.events.log_writer import EventWriter
from holdfast.job.run_spec import RunSpec
from holdfast.job.spec import Job, Nodes
from holdfast.protocol.orders import PROTOCOL, Order, StartRanks
from holdfast.report.run_summary import summarise
from holdfast.report.status_reducer import status_from_events
from holdfast.run_dir import RunDir

NODES, DAYS = 2048, 30.0
QUICK_NODES, QUICK_DAYS = 256, 3.0
RANKS = 8
FAILURES_PER_NODE_DAY = 419 / 54 / 2048
BREAKS_PER_NODE_DAY = 0.01
"""Connections that close and come back."""
TAKEOVERS_PER_DAY = 1 / 3
STEP_S, CHECKPOINT_S, CHECKPOINT_TAKES_S = 10.0, 600.0, 8.0
RESTART_S = 90.0
"""From a restart's start to the end of its first step."""
SIZE_GOAL_MIB, FOLD_GOAL_S = 100, 5.0
BEGAN = 1.8e9


@dataclass
class Agent:
    """A node's agent that sends its messages immediately."""

    run: Run
    node: int
    generation: int = 0
    seq: int = 0
    attempt: int = -1
    link: AgentConnection | None = None

    @property
    def source(self) -> str:
        return f"node{self.node}.{self.generation}/0123abcd"

    @property
    def ranks(self) -> range:
        return range(self.node * RANKS, (self.node + 1) * RANKS)

    def send(self, order: Order) -> None:
        if isinstance(order, StartRanks):
            self.attempt = order.attempt

    def after_sent(self, act: Callable[[], None]) -> None:
        act()

    def close(self) -> None: ...

    def join(self) -> None:
        joined = AgentConnected(
            at=self.run.now,
            source=self.source,
            node=self.node,
            generation=self.generation,
            incarnation="0123abcd",
            hostname=f"gpu-node-{self.node:04}",
            address=f"10.1.{self.node >> 8}.{self.node & 255}",
            port=30_000 + self.node,
            pid=4242,
            attempt=self.attempt,
            running=tuple(RankState(rank=rank, pid=10_000 + rank) for rank in self.ranks) if self.attempt >= 0 else (),
            protocol=PROTOCOL,
        )
        self.link = self.run.controller.agent_connected(self, joined)
        assert self.link is not None

    def say(self, *words: AgentEvent) -> None:
        if self.link is None:
            return
        numbered = [
            msgspec.structs.replace(word, source=self.source, seq=seq) for seq, word in enumerate(words, self.seq + 1)
        ]
        self.seq += len(words)
        self.run.controller.agent_messages(self.link, list(numbered))

    def starts(self) -> None:
        states = tuple(RankState(rank=rank, pid=10_000 + rank) for rank in self.ranks)
        self.say(RanksStarted(at=self.run.now, node=self.node, replica=0, attempt=self.attempt, ranks=states))

    def exited(self, rank: int, **how: object) -> RankExited:
        fields = {"reason": ExitReason.SIGNAL, "code": 9, "stopped": True, "has_session": True, **how}
        return RankExited(at=self.run.now, node=self.node, replica=0, attempt=self.attempt, rank=rank, **fields)

    def stops(self) -> None:
        port = 20_000 + random.randrange(40_000)
        stopped = RanksStopped(at=self.run.now, node=self.node, replica=0, attempt=self.attempt, port=port)
        self.say(*map(self.exited, self.ranks), stopped)


@dataclass
class Run:
    """A month of a run."""

    path: Path
    nodes: int
    now: float = BEGAN
    step: int = 0
    checkpointed: int = 0
    committed: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    """Attempt and number of every step, in order."""
    unwritten: list[StepCommitted] = field(default_factory=list[StepCommitted])
    happened: Counter[str] = field(default_factory=Counter[str])
    chance: random.Random = field(default_factory=lambda: random.Random(0))

    def __post_init__(self) -> None:
        self.machine = Machine(_job(self.nodes))
        self.agents = [Agent(self, node) for node in range(self.nodes)]
        self.controller = self.control(first=True)

    def control(self, *, first: bool = False) -> Controller:
        """A controller that resumes from the log."""
        self.writer = EventWriter(self.path)
        controller = Controller(
            machine=self.machine,
            writer=self.writer,
            history=EventReader(self.path).read(),
            backend=NullBackend(),  # type: ignore[arg-type]
            start_orders=lambda start, _members: lambda _node: _order(start),
            inject_fault=lambda _: asyncio.sleep(0),
            incarnation="c",
            clock=partial(Clock, wall=lambda: self.now, monotonic=lambda: self.now),
        )
        if first:
            controller.handle(RunCreated(at=self.now, run="month-abc234", job={"name": "month"}))
        controller.handle(ControllerStarted(at=self.now, pid=1, incarnation="c"))
        return controller

    def spread(self, act: Callable[[Agent], None], agents: list[Agent], *, over_s: float) -> None:
        """Let each agent act at its moment; the controller writes pending events in time."""
        agents = self.chance.sample(agents, len(agents))
        parts = max(1, round(over_s / MAX_BATCH_DELAY_S))
        for part in range(parts):
            for agent in agents[part::parts]:
                act(agent)
            self.now += over_s / parts
            self.controller.handle()

    def train(self, until: float) -> None:
        """Steps and checkpoints, as the ledger passes them on."""
        first = True
        while self.now < until:
            self.step += 1
            due = self.now - self.last_checkpoint >= CHECKPOINT_S
            took = STEP_S + CHECKPOINT_TAKES_S * due + (RESTART_S if first else self.chance.uniform(-0.2, 0.2))
            self.now += took
            first = False
            committed = StepCommitted(
                at=self.now,
                replica=0,
                attempt=self.agents[0].attempt,
                step=self.step,
                started=self.now - took,
                ended=self.now,
                checkpoint_s=CHECKPOINT_TAKES_S * due,
                metrics={"loss": 2.0 + self.chance.random(), "tokens": 16_777_216.0, "total_steps": 300_000.0},
            )
            self.committed.append((committed.attempt, committed.step))
            self.commit_step(committed)
            if due:
                self.checkpointed, self.last_checkpoint = self.step, self.now
                path = f"/shared/checkpoints/month-abc234/step-{self.step:08}"
                self.agents[0].say(
                    CheckpointCommitted(
                        at=self.now, node=0, replica=0, attempt=self.agents[0].attempt, step=self.step, path=path,
                        took_s=CHECKPOINT_TAKES_S,
                    )
                )  # fmt: skip

    def commit_step(self, step: StepCommitted) -> None:
        """A step is complete; until it is written, agents would resend it to another controller."""
        self.unwritten.append(step)
        self.controller._enqueue(self.controller._sampled(step))
        if self.controller._step_samplers[0].pending is None:
            self.unwritten.clear()

    def simulate(self, days: float) -> Counter[str]:
        """Simulate everything; return how often each thing happened."""
        begin, end = self.now, self.now + days * 86400
        self.last_checkpoint = self.now
        self.spread(Agent.join, self.agents, over_s=30)
        self.spread(Agent.starts, self.agents, over_s=2)
        rates = {
            self.lose_node: FAILURES_PER_NODE_DAY * self.nodes * 0.6,
            self.crash: FAILURES_PER_NODE_DAY * self.nodes * 0.3,
            self.hang: FAILURES_PER_NODE_DAY * self.nodes * 0.1,
            self.disconnect: BREAKS_PER_NODE_DAY * self.nodes,
            self.take_over: TAKEOVERS_PER_DAY,
        }
        happened: Counter[str] = Counter()
        while True:
            next_at = self.now + self.chance.expovariate(sum(rates.values()) / 86400)
            self.train(min(next_at, end))
            if next_at >= end:
                break
            (what,) = self.chance.choices(list(rates), list(rates.values()))
            happened[what.__name__] += 1
            what()
        self.controller.handle(CancelRequested(at=self.now, requested_by="bench"))
        self.kill_controller()
        say(f"{(self.now - begin) / 86400:.1f} days, {self.step:,} steps; {dict(happened)}")
        return happened

    def kill_controller(self) -> None:
        """The pending work of a controller ends with its process."""
        if self.controller._flush_timer is not None:
            self.controller._flush_timer.cancel()
        for task in self.controller._tasks:
            task.cancel()
        self.writer.close()

    # What happens

    def restart(self) -> None:
        """Stop every rank, and start from the last checkpoint."""
        self.spread(Agent.stops, [agent for agent in self.agents if agent.link is not None], over_s=1)
        for agent in self.agents:
            if agent.link is None:
                agent.join()
        self.spread(Agent.starts, self.agents, over_s=2)
        self.step = self.checkpointed

    def lose_node(self) -> None:
        agent = self.chance.choice(self.agents)
        assert agent.link is not None
        self.controller.agent_disconnected(agent.link)
        reason = "its machine lost its power"
        self.controller.handle(NodeTerminated(at=self.now, node=agent.node, generation=agent.generation, reason=reason))
        agent.generation, agent.seq, agent.attempt, agent.link = agent.generation + 1, 0, -1, None
        self.restart()

    def crash(self) -> None:
        """A rank fails, and its peers exit before they can be stopped."""
        words = {
            "reason": ExitReason.CODE,
            "code": 1,
            "stopped": False,
            "error_location": "/runs/month/logs/attempt-1/rank-1.log:99",
        }
        first, *peers = self.chance.sample(self.agents, min(200, self.nodes))
        error = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB"
        first.say(first.exited(first.ranks[0], error=error, **words))
        for peer in peers:
            self.now += 0.001
            peer.say(peer.exited(peer.ranks[3], error="RuntimeError: Connection closed by peer [10.1.2.3]", **words))
        self.restart()

    def hang(self) -> None:
        """Every rank waits for one of them."""

        def hangs(agent: Agent) -> None:
            agent.say(
                *(
                    RankHung(
                        at=self.now, node=agent.node, replica=0, attempt=agent.attempt, rank=rank, last_step=self.step,
                        last_step_at=self.now - 600, waited_s=600, process_state="S",
                        stacks=f"/runs/month/nodes/node{agent.node}.0/stacks-replica-0-attempt-1-rank-{rank}.txt",
                        top_frame="all_reduce (distributed_c10d.py:2841)",
                    )
                    for rank in agent.ranks
                )
            )  # fmt: skip

        self.now += 600
        self.spread(hangs, self.agents, over_s=5)
        self.restart()

    def disconnect(self) -> None:
        agent = self.chance.choice(self.agents)
        assert agent.link is not None
        self.controller.agent_disconnected(agent.link)
        self.now += 2
        agent.join()

    def take_over(self) -> None:
        """The controller dies; its successor replays the log, and every agent joins it."""
        self.kill_controller()
        self.now += 3
        self.controller = self.control()
        self.spread(Agent.join, self.agents, over_s=4)
        unwritten, self.unwritten = self.unwritten, []
        for step in unwritten:
            self.commit_step(step)


def _job(nodes: int) -> Job:
    return Job(name="month", command=("train",), nodes=Nodes(min=nodes, max=nodes), ranks_per_node=RANKS)


def _order(start: StartAttempt) -> StartRanks:
    return StartRanks(replica=start.replica, attempt=start.attempt, ranks=())


def make_log(folder: RunDir, nodes: int, days: float) -> Run:
    """A run directory with such a log, and the other files that `holdfast status` needs; return the simulated run."""
    folder.path.mkdir(parents=True, mode=0o700)
    accepted = RunSpec(job=_job(nodes), base="/", created_at=BEGAN, fabric="tcp")
    folder.job.write_text(accepted.model_dump_json(exclude_defaults=True))

    async def live() -> Run:
        run = Run(folder.events, nodes)
        run.happened = run.simulate(days)
        return run

    return asyncio.run(live())


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Times of a piece of work: the fastest of three."""

    wall_s: float
    cpu_s: float
    """CPU time of this process and its children: independent of other load on the machine."""


def best_of_three(work: Callable[[], object]) -> Timing:
    """Run it three times."""
    times: list[Timing] = []
    for _ in range(3):
        began, used = time.perf_counter(), sum(os.times()[:4])
        work()
        times.append(Timing(wall_s=time.perf_counter() - began, cpu_s=sum(os.times()[:4]) - used))
    return min(times, key=lambda one: one.wall_s)


def long_run_options(prog: str, description: str | None) -> tuple[int, float, Path | None]:
    """Nodes and days of the run whose log a bench makes, and the file for its results."""
    parser = argparse.ArgumentParser(prog=prog, description=description)
    parser.add_argument("--nodes", type=int)
    parser.add_argument("--days", type=float)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_NODES} nodes, {QUICK_DAYS:g} days")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    given = parser.parse_args()
    nodes = given.nodes or (QUICK_NODES if given.quick else NODES)
    return nodes, given.days or (QUICK_DAYS if given.quick else DAYS), given.json


def main() -> None:
    """Make the log, and measure its readers."""
    nodes, days, json_file = long_run_options("bench.event_log", __doc__)
    headline(f"event log: {nodes:,} nodes of {RANKS} ranks for {days:g} days")
    with tempfile.TemporaryDirectory(prefix="eventlog") as home:
        folder = RunDir(Path(home) / "runs" / "month-abc234")
        make_log(folder, nodes, days)
        size_mib = folder.events.stat().st_size / 2**20
        lines, sizes = Counter[str](), Counter[str]()
        for line in folder.events.open("rb"):
            kind = json.loads(line)["type"]
            lines[kind] += 1
            sizes[kind] += len(line)
        rows = [(kind, f"{lines[kind]:,}", f"{size / 2**20:.2f} MiB") for kind, size in sizes.most_common()]
        say(table(("event", "lines", "size"), rows))

        def taken_over() -> None:
            gc.set_threshold(controller_main.GC_THRESHOLD)
            assert is_intact(folder.events)
            Controller(
                machine=Machine(_job(nodes)),
                writer=None,  # type: ignore[arg-type]
                history=EventReader(folder.events).read(),
                backend=NullBackend(),  # type: ignore[arg-type]
                start_orders=lambda start, _members: lambda _node: _order(start),
                inject_fault=lambda _: asyncio.sleep(0),
                incarnation="c",
            )

        def verb(*words: str) -> None:
            argv = [sys.executable, "-m", "holdfast", *words]
            subprocess.run(argv, env={"HOLDFAST_HOME": home, "PATH": "/usr/bin:/bin"}, check=True, capture_output=True)

        events = read_events(folder.events)
        times = {
            "read": best_of_three(lambda: read_events(folder.events)),
            "a new controller checks and replays that log": best_of_three(taken_over),
            "status from that log": best_of_three(lambda: api.status(folder)),
            "summary": best_of_three(lambda: summarise(status_from_events(events), logs="", now=events[-1].at)),
            "`holdfast status` from that log": best_of_three(lambda: verb("status")),
            "`holdfast status -o json`": best_of_three(lambda: verb("status", "-o", "json")),
            "`holdfast ps`": best_of_three(lambda: verb("ps")),
        }
        found = [
            result_file.absolute(
                f"event log of {nodes * RANKS:,} ranks for {days:g} days",
                size_mib,
                "MiB",
                goal=SIZE_GOAL_MIB,
                decimals=1,
            )
        ]
        found += [result_file.absolute(what, one.wall_s, "s", goal=FOLD_GOAL_S) for what, one in times.items()]
        result_file.save(json_file, "The event log of a long run", found)
        say("")
        met = "yes" if size_mib <= SIZE_GOAL_MIB else "no"
        rows = [(f"size of {sum(lines.values()):,} lines", f"<= {SIZE_GOAL_MIB} MiB", f"{size_mib:.1f} MiB", "", met)]
        rows += [
            (
                what,
                f"<= {FOLD_GOAL_S:g} s",
                f"{one.wall_s:.2f} s",
                f"{one.cpu_s:.2f} s",
                "yes" if one.wall_s <= FOLD_GOAL_S else "no",
            )
            for what, one in times.items()
        ]
        say(table(("what", "goal", "measured", "CPU", "met"), rows))


if __name__ == "__main__":
    main()
