"""Ten thousand inputs against a real controller with honest agents: it stays up, serves them, and tells nothing."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from bench.simulated_run import SimulatedRun
from msgspec import structs
from tests.message_fuzzer import Mutator, Tokens

from holdfast.events import (
    AgentConnected,
    AgentDisconnected,
    AttemptStarted,
    CheckpointCommitted,
    ControllerStarted,
    ExitReason,
    FaultInjected,
    FindingRaised,
    RankExited,
    RankHung,
    RanksStarted,
    RanksStopped,
    RankState,
    StepCommitted,
)
from holdfast.events.log import EventReader
from holdfast.findings import Finding
from holdfast.protocol.orders import AgentMessage, NodeStep, Progress, encode
from holdfast.security.tokens import TokenIssuer

SEED = int(os.environ.get("HOLDFAST_FUZZ_SEED", "4"))
ROUNDS = 2
STRANGERS, OPERATORS, FRAMES, JOINS, WORDS = 2250, 250, 1250, 500, 750
"""In each round."""
AT_ONCE = 24
ANSWER_S = 0.03
"""How long to listen for an answer; there need not be one."""
DEADLINE_S = 200.0
GROWTH_BYTES = 64 * 2**20
"""Of the controller in the second round: 13 kB for each input. In the first one it takes the buffers that it keeps."""
FIRST_SEQ = 2**40
"""Beyond any number that a message gets by chance: numbers up to the last one count as resent."""
NONSENSE = b"{"
"""What an agent is cut off for."""
CLOSE = b"\x88"
"""A closing frame's first byte; all other controller output is plain ASCII, except lengths."""
NODES = 4
HOSTILE = NODES - 1
"""The node whose token is stolen."""
LATER = 7
"""An attempt that the run does not have: what is said of it is to change nothing."""


def words(joined: AgentConnected) -> list[AgentMessage]:
    """One of each that an agent may say, as the hostile node; none is about the attempt in hand."""
    at, node = time.time(), joined.node
    ranks = (RankState(rank=node, pid=1),)
    steps = (NodeStep(step=2**40, started=at, ended=at, metrics={"loss": 1.0}),)
    said: list[AgentMessage] = [
        RanksStarted(at=at, node=node, replica=0, attempt=LATER, ranks=ranks),
        RankExited(at=at, node=node, replica=0, attempt=LATER, rank=node, reason=ExitReason.CODE, code=1, error="E"),
        RanksStopped(at=at, node=node, replica=0, attempt=LATER, port=4000),
        RankHung(at=at, node=node, replica=0, attempt=LATER, rank=0, last_step=1, last_step_at=at, waited_s=1.0),
        CheckpointCommitted(at=at, node=node, replica=0, attempt=LATER, step=9, path="/checkpoints/9"),
        FaultInjected(at=at, node=node, requested_at=at, target="node", action="kill"),
        FindingRaised(at=at, finding=Finding(code="said", what="something", evidence=("line",))),
        Progress(node=node, replica=0, attempt=LATER, steps=steps),
    ]
    return [joined, *(structs.replace(word, source=joined.source) for word in said)]


class Site:
    """The controller under fire."""

    def __init__(self, run: SimulatedRun) -> None:
        self.run = run
        self.port: int = run._agents.getsockname()[1]
        self.token = run.folder.token.read_text()
        self.keys = TokenIssuer(self.token)
        stale = self.keys.node_token(0, 9)
        wrong = ("", "wrong", self.token[:-1], self.token + "x", stale[:-1] + "g", "é", "x" * 9000)
        self.mutator = Mutator(SEED, Tokens(wrong=wrong, stale=stale))
        self.answers: set[bytes] = set()
        self._numbers = itertools.count(FIRST_SEQ)

    async def say(self, *parts: bytes, agent: bool = False) -> None:
        """Open a connection, say all this, listen a moment, go.

        An agent is told what its node is to run, and listens until it is cut off for its last word.
        """
        answers, patience_s = (set[bytes](), DEADLINE_S) if agent else (self.answers, ANSWER_S)
        async with self._gate:
            try:
                reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
            except ConnectionError:
                pytest.fail("the controller does not take connections")
            with contextlib.suppress(ConnectionError):
                for part in parts:
                    writer.write(part)
                    await writer.drain()
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(patience_s):
                            while answer := await reader.read(65_536):
                                answers.add(answer)
                                if part is not parts[-1] or CLOSE in answer:
                                    break
            writer.transport.abort()

    async def fire(self) -> None:
        """Say a round of it all."""
        self._gate = asyncio.Semaphore(AT_ONCE)
        draw, mutator, stale = self.mutator.random, self.mutator, self.mutator.tokens.stale
        joined = next(event for event in self.run.events if isinstance(event, AgentConnected) and event.node == HOSTILE)
        said = words(joined)
        async with asyncio.TaskGroup() as group:
            for _ in range(STRANGERS):
                group.create_task(self.say(mutator.stranger()))
            for _ in range(OPERATORS):
                group.create_task(self.say(mutator.operator_request(self.token)))
            for _ in range(FRAMES):
                group.create_task(self.say(mutator.handshake(stale), mutator.bad_frame()))
            for _ in range(JOINS):
                live = draw.random() < 0.5
                token = self.keys.node_token(HOSTILE, 0) if live else stale
                spoken = (mutator.mutated(draw.choice(said)), NONSENSE)
                frames = b"".join(map(mutator.frame, spoken))
                group.create_task(self.say(mutator.handshake(token), frames, agent=live))
        for first in range(0, WORDS, 5):
            right = structs.replace(said[1 + first // 5 % (len(said) - 1)], seq=next(self._numbers))
            chosen = [structs.replace(draw.choice(said), seq=next(self._numbers)) for _ in range(5)]
            spoken = [encode(joined), encode(right), *(mutator.mutated(word) for word in chosen), NONSENSE]
            frames = b"".join(map(mutator.frame, spoken))
            await self.say(mutator.handshake(self.keys.node_token(HOSTILE, 0)), frames, agent=True)


@contextlib.contextmanager
def training(run: SimulatedRun) -> Iterator[Callable[[], int]]:
    """Have the honest agents pass steps all the while; the step they are at."""
    at, over = 0, threading.Event()

    def train() -> None:
        nonlocal at
        while not over.wait(0.1):
            at += 1
            run.step(at, 0.1)

    trainer = threading.Thread(target=train)
    trainer.start()
    try:
        yield lambda: at
    finally:
        over.set()
        trainer.join()


def committed(run: SimulatedRun) -> int:
    return max((event.step for event in run.events if isinstance(event, StepCommitted)), default=0)


def descriptors(run: SimulatedRun) -> int:
    return len(os.listdir(f"/proc/{run.controller.pid}/fd"))


@pytest.mark.slow
def test_ten_thousand_inputs_leave_the_controller_as_it_was(tmp_path: Path) -> None:
    with SimulatedRun(tmp_path / "run", nodes=NODES, ranks_per_node=1, processes=1) as run, training(run) as step:
        run.wait_until(lambda events: any(isinstance(event, StepCommitted) for event in events), DEADLINE_S)
        site, before, open_before = Site(run), len(run.events), descriptors(run)
        for _ in range(ROUNDS):
            memory = run.resident_bytes()
            asyncio.run(site.fire())

        fired_at = step()
        run.wait_until(lambda _: committed(run) > fired_at, DEADLINE_S)
        deadline = time.monotonic() + DEADLINE_S
        while descriptors(run) > open_before:
            assert time.monotonic() < deadline, f"{descriptors(run)} descriptors are open, {open_before} were before"
            time.sleep(0.05)
        assert run.resident_bytes() - memory < GROWTH_BYTES
        assert run.controller.poll() is None

        said = run.folder.controller_log.read_text(errors="replace")
        assert "Traceback" not in said, said[said.index("Traceback") - 500 :][:5000]
        secrets = (site.token, *(site.keys.node_token(node, 0) for node in range(NODES)))
        assert not any(secret in said for secret in secrets)
        for answer in site.answers:
            told = answer.decode("latin-1")
            assert not any(word in told for word in (*secrets, "Traceback", str(tmp_path), "site-packages", "PATH="))
            if told.startswith("HTTP/1.1 "):
                assert told[9:12] in {"100", "101", "400", "401", "403", "404", "405", "413"}, told

        after = run.events[before:]
        spoken_of = {event.node for event in after if isinstance(event, AgentConnected | AgentDisconnected)}
        assert spoken_of <= {HOSTILE}
        assert not any(isinstance(event, ControllerStarted | AttemptStarted) for event in after)
        assert {type(event) for event in after} >= {FindingRaised, CheckpointCommitted, RankHung}, "nothing got through"
        whole = EventReader(run.folder.events)
        assert list(whole.read())[: len(run.events)] == run.events
        assert whole.corrupt_line_count == 0
