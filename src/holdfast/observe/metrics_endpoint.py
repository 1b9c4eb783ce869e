"""The endpoint that Prometheus scrapes: the metrics of one run or of several, from their event logs.

A log is read at a scrape, not before: a run that is not scraped costs nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from holdfast.observe.observed_log import ObservedLog


class MetricsEndpoint:
    """Answers a scrape; `logs` returns the paths of the event logs by run."""

    def __init__(self, logs: Callable[[], Mapping[str, Path]]) -> None:
        self._logs = logs
        self._observed: dict[str, ObservedLog] = {}
        self._reading = asyncio.Lock()

    async def answer(self, request: Request) -> Response:
        """The metrics in the format that the request prefers."""
        from holdfast.observe.exposition import format_metrics  # 30 ms, which a run that is not scraped need not spend

        async with self._reading:
            await self._read()
            known = {run: observed.known for run, observed in self._observed.items()}
            text, content_type = format_metrics(known, now=time.time(), accept=request.headers.get("accept", ""))
        return Response(text, media_type=content_type)

    async def _read(self) -> None:
        logs = self._logs()
        self._observed = {run: self._observed.get(run) or ObservedLog(path) for run, path in logs.items()}
        for observed in self._observed.values():
            for _ in observed.read():
                await asyncio.sleep(0)  # a long log is read in parts, between which others get the thread
