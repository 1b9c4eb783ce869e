"""Rank output from pods whose logs are refused, rotated, broken off, or too many to follow together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.waiting import until_async

from holdfast.launch.kubernetes.client.api_errors import ApiError, ApiUnavailable
from holdfast.launch.kubernetes.sync import pod_log_reader
from holdfast.launch.kubernetes.sync.pod_log_reader import MAX_FOLLOWED, PodLogReader
from holdfast.run_dir import RunDir

WITHIN_S = 60.0
BEGIN = datetime(2026, 11, 23, tzinfo=UTC)


class FakeCluster:
    """A cluster whose pods write logs, which kubelets rotate."""

    def __init__(self, *names: str) -> None:
        self.phases = dict.fromkeys(names, "Running")
        self.logs: dict[str, list[tuple[datetime, bytes]]] = {name: [] for name in names}
        self.errors: dict[str, Exception] = {}
        """What comes at the end of a log, where that is not silence."""
        self.asked: list[str] = []
        self.open: set[str] = set()
        self.most = 0
        self.looks = 0

    async def get(self, path: str, **_: str) -> dict[str, Any]:
        self.looks += 1
        pods = [
            {"metadata": {"name": name}, "status": {"phase": phase}, "spec": {"containers": [{"name": "node"}]}}
            for name, phase in self.phases.items()
        ]
        return {"items": pods}

    async def pod_logs(
        self, pod: str, container: str | None = None, *, timestamps: bool, since: str | None = None
    ) -> AsyncIterator[bytes]:
        assert timestamps
        self.asked.append(pod)
        self.open.add(pod)
        self.most = max(self.most, len(self.open))
        try:
            begin = datetime.fromisoformat(since) if since else BEGIN
            for at, text in self.logs[pod]:
                if at >= begin:
                    yield b"%s %s\n" % (at.isoformat(timespec="microseconds").replace("+00:00", "123Z").encode(), text)
            while self.phases[pod] == "Running" and pod not in self.errors:  # noqa: ASYNC110 - a pod tells nobody
                await asyncio.sleep(0.005)
            if pod in self.errors:
                raise self.errors[pod]
        finally:
            self.open.remove(pod)


def line(number: int) -> tuple[datetime, bytes]:
    """Several lines come in the same second, and two at the same time."""
    return BEGIN + timedelta(microseconds=number // 2 * 200_001), b"[rank 0, attempt 0] line %d" % number


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Play a scene while pods are heard, and hear the rest."""
    monkeypatch.setattr(pod_log_reader, "POLL_S", 0.01)

    async def whole(pods: FakeCluster, scene: Callable[[RunDir], Awaitable[None]]) -> None:
        folder = RunDir(tmp_path / "run")
        mirror = PodLogReader(folder, pods)  # pyright: ignore[reportArgumentType] - as much of a cluster as it asks
        running = asyncio.ensure_future(mirror.run())
        await scene(folder)
        assert not running.done()
        running.cancel()
        await mirror.finish(WITHIN_S)

    def played(pods: FakeCluster, scene: Callable[[RunDir], Awaitable[None]]) -> None:
        asyncio.run(whole(pods, scene))

    return played


def test_log_that_was_rotated_before_it_is_read_again_is_not_doubled(play: Callable[..., None], tmp_path: Path) -> None:
    pods = FakeCluster("a")
    log = tmp_path / "run" / "logs" / "attempt-0" / "rank-0.log"

    def written() -> list[str]:
        return log.read_text().splitlines() if log.exists() else []

    async def scene(_: RunDir) -> None:
        pods.logs["a"] = [line(number) for number in range(25)]
        pods.errors["a"] = ApiUnavailable("cut")
        await until_async(lambda: len(written()) == 25)
        pods.logs["a"] = [line(number) for number in range(15, 40)]
        await until_async(lambda: len(written()) > 25)
        del pods.errors["a"]
        pods.phases["a"] = "Succeeded"

    play(pods, scene)
    assert written() == [f"line {number}" for number in range(40)]
    # Another mirror hears all of it again.
    pods.logs["a"] = [line(number) for number in range(42)]

    async def again(_: RunDir) -> None:
        await until_async(lambda: len(written()) == 42)

    play(pods, again)
    assert written() == [f"line {number}" for number in range(42)]


def test_pod_that_cannot_be_heard_is_asked_ever_later_and_holds_up_no_other(
    play: Callable[..., None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pod_log_reader, "MAX_RETRY_S", 3600.0)
    pods = FakeCluster("refused", "broken", "fine")
    pods.errors = {"refused": ApiError(403, "may not get pods/log"), "broken": ValueError("what nobody expects")}

    async def scene(run: RunDir) -> None:
        await until_async(lambda: pods.asked.count("refused") > 3 and pods.asked.count("broken") > 3)
        before, looks = list(pods.asked), pods.looks
        await until_async(lambda: pods.looks >= looks + 8)  # it would have been asked eight times
        assert pods.asked.count("refused") - before.count("refused") < 4
        pods.logs["fine"] = [line(0)]
        pods.phases = dict.fromkeys(pods.phases, "Succeeded")

    play(pods, scene)
    warned = [record.getMessage().split(": ")[0] for record in caplog.records if record.name == pod_log_reader.log.name]
    assert sorted(warned) == ["the log of pod broken cannot be read", "the log of pod refused cannot be read"]


def test_so_many_pods_are_followed_that_other_requests_get_through(play: Callable[..., None], tmp_path: Path) -> None:
    names = [f"pod-{number}" for number in range(MAX_FOLLOWED + 30)]
    pods = FakeCluster(*names)
    for number, name in enumerate(names):
        pods.logs[name] = [(BEGIN, b"[rank %d, attempt 0] hello" % number)]

    async def scene(_: RunDir) -> None:
        await until_async(lambda: len(pods.open) == MAX_FOLLOWED)
        looks = pods.looks
        await until_async(lambda: pods.looks > looks + 3)
        assert pods.most == MAX_FOLLOWED
        pods.phases[next(iter(pods.open))] = "Succeeded"
        await until_async(lambda: len(set(pods.asked)) == MAX_FOLLOWED + 1)
        pods.phases = dict.fromkeys(names, "Succeeded")

    play(pods, scene)
    assert pods.most == MAX_FOLLOWED
    logs = tmp_path / "run" / "logs" / "attempt-0"
    assert sorted(path.name for path in logs.iterdir()) == sorted(f"rank-{number}.log" for number in range(len(names)))
