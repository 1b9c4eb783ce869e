"""What the step clock's folder adds to torch's rendezvous: a rank waits until the store of rank 0 listens."""

from __future__ import annotations

import runpy
import socket
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.agent.rendezvous_port import ReservedPort
from holdfast.agent.step_clock import STEP_CLOCK_DIR

MODULE: dict[str, Any] = runpy.run_path(str(STEP_CLOCK_DIR / "holdfast_rendezvous.py"))


class Waits:
    """Takes the place of sleeping; after some waits, the store listens."""

    def __init__(self, port: ReservedPort, after: int) -> None:
        self.delays: list[float] = []
        self.store: socket.socket | None = None
        self._port, self._after = port, after

    def __call__(self, delay_s: float) -> None:
        self.delays.append(delay_s)
        if len(self.delays) == self._after:
            self.store = socket.create_server(("127.0.0.1", self._port.number))


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Iterator[Waits]:
    port = ReservedPort("127.0.0.1")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port.number))
    monkeypatch.setenv("RANK", "1")
    found = Waits(port, after=3)
    monkeypatch.setattr(time, "sleep", found)
    yield found
    if found.store is not None:
        found.store.close()


def connect(url: str) -> list[object]:
    """What the handler of torch receives, once the rank has waited."""
    rendezvous = SimpleNamespace(_rendezvous_handlers={"env": lambda *args, **kwargs: [*args, kwargs]})
    MODULE["start"](rendezvous)
    return rendezvous._rendezvous_handlers["env"](url, "timeout", more=1)


@pytest.mark.parametrize("url", ["env://", "env://?rank=3&world_size=4"])
def test_rank_asks_every_few_milliseconds_until_the_store_listens(waits: Waits, url: str) -> None:
    assert connect(url) == [url, "timeout", {"more": 1}]
    assert len(waits.delays) == 3
    assert sum(waits.delays) < 0.05


@pytest.mark.parametrize(("url", "rank"), [("env://", "0"), ("env://?world_size=4&rank=0", "1")])
def test_rank_that_serves_the_store_does_not_wait(
    waits: Waits, url: str, rank: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", rank)
    assert connect(url)[0] == url
    assert waits.delays == []


def test_rank_leaves_a_store_that_never_listens_to_torch(waits: Waits, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(1000))
    monkeypatch.setattr(time, "monotonic", lambda: float(next(clock)))
    waits._after = -1
    assert connect("env://")[0] == "env://"
    assert 0 < len(waits.delays) <= MODULE["MAX_WAIT_S"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MASTER_PORT", None),
        ("MASTER_PORT", "any"),
        ("MASTER_PORT", f"{2**70}"),
        ("MASTER_ADDR", "a..b"),
        ("RANK", None),
    ],
)
def test_what_is_wrong_with_the_address_is_torchs_to_say(
    waits: Waits, name: str, value: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if value is None:
        monkeypatch.delenv(name)
    else:
        monkeypatch.setenv(name, value)
    assert connect("env://")[0] == "env://"
    assert waits.delays == []
