"""Under more strangers than a controller may have descriptors, what it needs itself stays free."""

from __future__ import annotations

import asyncio
import json
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from tests.runs.conftest import Runs

from holdfast import api
from holdfast.events import (
    AttemptStarted,
    ControllerStarted,
    DrillAction,
    DrillTarget,
    NodeRequested,
    Outcome,
    StepCommitted,
)

CROWD = 400
LIMIT = 112
"""Descriptors of a controller; a job of two nodes is refused below 104."""


async def crowd(host: str, port: int, over: asyncio.Event) -> None:
    """Strangers that say nothing; each that is cut off comes again."""

    async def stranger() -> None:
        while True:
            reader, writer = await asyncio.open_connection(host, port)
            try:
                await reader.read()
            except ConnectionError:
                pass
            finally:
                writer.close()

    strangers = [asyncio.ensure_future(stranger()) for _ in range(CROWD)]
    await over.wait()
    for one in strangers:
        one.cancel()
    await asyncio.gather(*strangers, return_exceptions=True)


@contextmanager
def flooded(host: str, port: int) -> Iterator[None]:
    loop, over = asyncio.new_event_loop(), asyncio.Event()
    thread = threading.Thread(target=loop.run_until_complete, args=(crowd(host, port, over),))
    thread.start()
    try:
        yield
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join()
        loop.close()


def test_flooded_controller_with_few_descriptors_recovers_and_obeys(runs: Runs) -> None:
    watched = runs.steps(100_000, 0.02)
    watched.until(StepCommitted)
    where = json.loads(watched.folder.controller.read_text())
    resource.prlimit(where["keeper"], resource.RLIMIT_NOFILE, (LIMIT, LIMIT))
    watched.drill(DrillTarget.CONTROLLER, 0, DrillAction.KILL)
    watched.until(ControllerStarted)
    with flooded(where["host"], where["port"]):
        watched.drill(DrillTarget.NODE, 1, DrillAction.KILL)
        watched.until(AttemptStarted, lambda event: event.attempt == 1)
        watched.until(StepCommitted, lambda event: event.attempt == 1)
        api.cancel(watched.folder, force=True)
        assert watched.end().outcome is Outcome.CANCELLED
    assert len(watched.all(NodeRequested)) == 3
    assert "are cut off" in watched.folder.controller_log.read_text()
