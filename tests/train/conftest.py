"""The agent's end of a rank's socket."""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable, Generator
from importlib.metadata import version
from pathlib import Path
from typing import TypeVar

import pytest

from holdfast.protocol.rank_messages import (
    FindingReported,
    Hello,
    RankCheckpointCommitted,
    RankRequest,
    RankStep,
    RankToAgent,
    encode,
    rank_message_decoder,
)

TITAN_TESTS = ["test_titan.py", "test_titan_private.py"]
# TorchTitan has no release for the lowest torch. Where torch suffices, a missing TorchTitan fails these tests.
collect_ignore = TITAN_TESTS if tuple(map(int, version("torch").split(".")[:2])) < (2, 13) else []

DEADLINE_S = 200.0

M = TypeVar("M", Hello, RankStep, RankCheckpointCommitted, FindingReported)


class Line:
    """One rank's connection; reading waits, with a deadline."""

    def __init__(self, link: socket.socket) -> None:
        link.settimeout(DEADLINE_S)
        self.link = link
        self._lines = link.makefile("rb")

    def next(self) -> RankToAgent:
        line = self._lines.readline()
        if not line:
            raise EOFError
        return rank_message_decoder.decode(line)

    def await_(self, kind: type[M], holds: Callable[[M], bool] = lambda _: True) -> M:
        """The next message of a kind that meets a condition; others are skipped."""
        while True:
            message = self.next()
            if isinstance(message, kind) and holds(message):
                return message

    def rest(self) -> list[RankToAgent]:
        """Everything until the rank disconnects."""
        return [rank_message_decoder.decode(line) for line in self._lines]

    def ask(self, request: RankRequest) -> None:
        self.link.sendall(encode(request) + b"\n")

    def close(self) -> None:
        self._lines.close()
        self.link.close()


class Agent:
    """Listens where HOLDFAST_RANK_SOCKET points."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listening.bind(str(path))
        self._listening.listen()
        self._listening.settimeout(DEADLINE_S)

    def accept(self) -> Line:
        return Line(self._listening.accept()[0])

    def close(self) -> None:
        self._listening.close()


@pytest.fixture
def agent(tmp_path: Path) -> Generator[Agent]:
    agent = Agent(tmp_path / "rank.sock")
    yield agent
    agent.close()


@pytest.fixture(autouse=True)
def sigterm() -> Generator[None]:
    """A Session that exits during its steps lets SIGTERM wait for their end: pytest would not receive it."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)
