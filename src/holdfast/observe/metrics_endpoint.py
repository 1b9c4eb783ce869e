"""The endpoint that Prometheus scrapes: the metrics of one run or of several, from their event logs.

A log is read at a scrape, not before: a run that is not scraped costs nothing.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response

from holdfast.events import AnyEvent
from holdfast.events.log import EventReader, UnsupportedFormat
from holdfast.observe.live_readings import LiveReadings
from holdfast.observe.observed_log import ObservedLog
from holdfast.observe.run_observation import RunObservation, observe_event

log = logging.getLogger("holdfast.metrics")


class _Run:
    """What is exported of one run, kept up to date from its log."""

    def __init__(self, path: Path) -> None:
        self.known = RunObservation()
        self._log = ObservedLog(EventReader(path), self._add)
        self._is_reported = False

    def _add(self, event: AnyEvent) -> None:
        self.known = observe_event(self.known, event)

    async def read(self, run: str) -> bool:
        """Whether its log can be read; if not, the other runs are still exported."""
        try:
            await self._log.read()
        except (UnsupportedFormat, OSError) as error:
            if not self._is_reported:
                log.warning("the metrics of %s are left out: %s", run, error)
            self._is_reported = True
            return False
        return True


class MetricsEndpoint:
    """Answers a scrape; `logs` returns the paths of the event logs by run.

    `live` returns what the controller of the only run knows besides.
    """

    def __init__(self, logs: Callable[[], Mapping[str, Path]], live: Callable[[], LiveReadings] | None = None) -> None:
        self._logs = logs
        self._live = live
        self._runs: dict[str, _Run] = {}

    async def answer(self, request: Request) -> Response:
        """The metrics in the format that the request prefers."""
        from holdfast.observe.exposition import format_metrics  # 30 ms, which a run that is not scraped need not spend

        self._runs = {run: self._runs.get(run) or _Run(path) for run, path in self._logs().items()}
        known = {run: each.known for run, each in self._runs.items() if await each.read(run)}
        if self._live is not None:
            live = self._live()
            known = {run: replace(each, live=live) for run, each in known.items()}
        text, content_type = format_metrics(known, now=time.time(), accept=request.headers.get("accept", ""))
        return Response(text, media_type=content_type)
