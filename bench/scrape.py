"""What it costs to scrape a run of 16,384 ranks: time, size, series, and the first scrape of a month's log.

.venv/bin/python -m bench.scrape [--quick | --nodes N --days D]

The log is that of bench.event_log, up to where the run still trains: the real controller has written it, agents are
simulated. A scrape is answered by the endpoint that a controller has, in this process, without the network.
"""

from __future__ import annotations

import asyncio
import re
import statistics
import tempfile
import time
from pathlib import Path

from starlette.requests import Request

from bench import result_file
from bench.event_log import RANKS, long_run_options, make_log
from bench.paired_stats import headline, say, table
from holdfast.events import CancelRequested
from holdfast.events.log import encode_line, read_events
from holdfast.observe.metrics_endpoint import MetricsEndpoint
from holdfast.run_dir import RunDir

SCRAPES = 30
PERIOD_S = 15.0
GOAL_S, GOAL_BYTES, GOAL_SERIES, GOAL_SHARE = 0.050, 2 << 20, 5000, 0.01
ACCEPT = b"application/openmetrics-text;version=1.0.0"
TIMEOUT_S = 10.0
"""After which Prometheus gives up a scrape, by default."""
NEW_EVENTS = 2
"""Events between two scrapes: a long run logs a step at most every 30 s."""


async def _scrape(endpoint: MetricsEndpoint) -> tuple[float, float, bytes]:
    request = Request({"type": "http", "headers": [(b"accept", ACCEPT)]})
    began, used = time.perf_counter(), time.process_time()
    answer = await endpoint.answer(request)
    return time.perf_counter() - began, time.process_time() - used, bytes(answer.body)


async def _measure(log: Path) -> tuple[float, list[tuple[float, float, bytes]]]:
    """The seconds of the first scrape, and later ones, each after a few new events."""
    events = read_events(log)
    end = next((at for at, event in enumerate(events) if isinstance(event, CancelRequested)), len(events))
    later = SCRAPES * NEW_EVENTS
    live = log.with_name("live.jsonl")
    live.write_bytes(b"".join(map(encode_line, events[: end - later])))
    endpoint = MetricsEndpoint(lambda: {"month-abc234": live})
    first_s, _, _ = await _scrape(endpoint)
    found: list[tuple[float, float, bytes]] = []
    for at in range(end - later, end, NEW_EVENTS):
        with live.open("ab") as file:
            file.writelines(map(encode_line, events[at : at + NEW_EVENTS]))
        found.append(await _scrape(endpoint))
    return first_s, found


def main() -> None:
    """Make the log, scrape it, and print what that took."""
    nodes, days, json_file = long_run_options("bench.scrape", __doc__)
    headline(f"scraping a run of {nodes * RANKS:,} ranks, {days:g} days old")
    with tempfile.TemporaryDirectory(prefix="scrape") as home:
        folder = RunDir(Path(home) / "runs" / "month-abc234")
        make_log(folder, nodes, days)
        first_s, scrapes = asyncio.run(_measure(folder.events))
    text = scrapes[-1][2]
    wall_s, cpu_s = statistics.median(one[0] for one in scrapes), statistics.median(one[1] for one in scrapes)
    series = len(re.findall(rb"^[^#]", text, re.MULTILINE))
    ranks = f"{nodes * RANKS:,} ranks"
    found = [
        result_file.absolute(f"scrape of {ranks}", 1e3 * wall_s, "ms", goal=1e3 * GOAL_S, decimals=1),
        result_file.absolute(f"its size, {ranks}", len(text) / 2**20, "MiB", goal=GOAL_BYTES / 2**20, decimals=2),
        result_file.absolute(f"its series, {ranks}", series, "series", goal=GOAL_SERIES),
        result_file.absolute(
            f"share of a core at {PERIOD_S:g} s, {ranks}",
            100 * cpu_s / PERIOD_S,
            "%",
            goal=100 * GOAL_SHARE,
            decimals=2,
        ),
        result_file.absolute(f"first scrape after {days:g} days, {ranks}", first_s, "s", goal=TIMEOUT_S),
    ]
    result_file.save(json_file, "Metrics for Prometheus", found)
    say(table(("what", "measured", "goal", "met"), [(one.claim, str(one.figure), one.goal, one.met) for one in found]))


if __name__ == "__main__":
    main()
