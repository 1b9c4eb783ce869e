"""The live page of a run of 16,384 ranks: first paint, work of the browser's main thread, size of its files.

.venv/bin/python -m bench.web_page [--seconds S]

Real Chromium on a page of a log that grows by a step each second and by a changed rank; needs `chromium`.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import shutil
import tempfile
import threading
import time
from importlib.resources import files
from pathlib import Path
from typing import Any

import uvicorn
from playwright.sync_api import sync_playwright

from bench import result_file
from bench.paired_stats import headline, say, table
from holdfast.events import (
    AnyEvent,
    AttemptStarted,
    NodeRequested,
    NodesStarted,
    RankHung,
    RankStepTime,
    RunCreated,
    StepCommitted,
    StepTimesCompared,
)
from holdfast.events.log import encode_line
from holdfast.observe.metrics_server import listen
from holdfast.run_dir import RunDir
from holdfast.web.web_app import FILES, WebApp

RUN, TOKEN = "demo-k3m9tz", "t0ken"
NODES, RANKS = 2048, 16_384
GOAL_PAINT_S, GOAL_BUSY_MS, GOAL_KIB = 1.0, 100.0, 200.0


def main() -> None:
    """Open the page, let the run continue, and print what the browser did."""
    parser = argparse.ArgumentParser(prog="bench.web_page", description=__doc__)
    parser.add_argument("--seconds", type=int, default=20)
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args()
    headline(f"the live page of {RANKS:,} ranks")
    with tempfile.TemporaryDirectory(prefix="page") as folder:
        made = RunDir(Path(folder) / RUN)
        made.path.mkdir()
        made.events.write_bytes(b"".join(map(encode_line, large_run(800))))
        with listen("127.0.0.1", 0) as listener:
            app = WebApp(lambda: [made], TOKEN).app
            server = uvicorn.Server(uvicorn.Config(app, lifespan="off", log_config=None, timeout_graceful_shutdown=0))
            thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])))
            thread.start()
            try:
                paint_s, busy_ms = _measure(made, listener.getsockname()[1], options.seconds)
            finally:
                server.should_exit = True
                thread.join()
    static = files("holdfast.web").joinpath("static")
    size = sum(len(gzip.compress(static.joinpath(name).read_bytes())) for name in FILES)
    found = [
        result_file.absolute("first view of a run of 16,384 ranks", paint_s, "s", goal=GOAL_PAINT_S),
        result_file.absolute("main thread of the live page, each second", busy_ms, "ms", goal=GOAL_BUSY_MS, decimals=1),
        result_file.absolute("files of the live page, compressed", size / 1024, "KiB", goal=GOAL_KIB, decimals=1),
    ]
    result_file.save(options.json, "Live page", found)
    say(table(("what", "measured", "goal", "met"), [(one.claim, str(one.figure), one.goal, one.met) for one in found]))


def _measure(made: RunDir, port: int, seconds: int) -> tuple[float, float]:
    """Seconds until the ranks are drawn, and milliseconds of the main thread in each second after that."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page()
        session = page.context.new_cdp_session(page)
        session.send("Performance.enable")
        began = time.perf_counter()
        page.goto(f"http://127.0.0.1:{port}/#token={TOKEN}&run={RUN}")
        page.locator("#grid-key li").first.wait_for()
        paint_s = time.perf_counter() - began
        before = _busy_s(session.send("Performance.getMetrics"))
        with made.events.open("ab") as log:
            for second in range(seconds):
                now = time.time()
                step = StepCommitted(
                    at=now, replica=0, attempt=0, step=800 + second, started=now - 1, ended=now, metrics={"loss": 2.0}
                )
                log.write(encode_line(step) + encode_line(_hung(second, now)))
                log.flush()
                page.wait_for_timeout(1000)
        busy_s = _busy_s(session.send("Performance.getMetrics")) - before
        browser.close()
    return paint_s, 1e3 * busy_s / seconds


def _busy_s(answer: Any) -> float:
    return next(each["value"] for each in answer["metrics"] if each["name"] == "TaskDuration")


def _hung(rank: int, now: float) -> RankHung:
    return RankHung(
        at=now, node=rank // 8, replica=0, attempt=0, rank=rank, last_step=79, last_step_at=now, waited_s=100.0
    )


def large_run(steps: int = 80) -> list[AnyEvent]:
    """The events of a live run of 16,384 ranks of which one hangs."""
    now = time.time()
    first = now - steps
    made = [
        StepCommitted(
            at=now, replica=0, attempt=0, step=step, started=first + step, ended=first + step + 1, metrics={"loss": 2.0}
        )
        for step in range(steps)
    ]
    return [
        RunCreated(at=now - steps - 9, run=RUN, job={"name": "demo"}),
        *(NodeRequested(at=now - steps - 8, node=node, generation=0) for node in range(NODES)),
        AttemptStarted(
            at=now - steps - 2, replica=0, attempt=0, world_size=RANKS, master_addr="a", master_port=1, nodes=(0,)
        ),
        NodesStarted(at=now - steps - 1, replica=0, attempt=0, nodes=((0, NODES - 1),), ranks=((0, RANKS - 1),)),
        *made,
        _hung(8, now),
        _compared(now),
    ]


def _compared(now: float) -> StepTimesCompared:
    """Rank 9 loads its data slowly; 32 of the ranks are named."""
    slow = RankStepTime(9, 0.9, "data", 0.35)
    others = (RankStepTime(100 + place, 0.6 - 0.003 * place, "backward", 0.05 - 0.001 * place) for place in range(31))
    return StepTimesCompared(
        at=now,
        replica=0,
        attempt=0,
        first_step=70,
        last_step=74,
        ranks=RANKS,
        step_p50_s=0.95,
        step_p99_s=0.96,
        own_p50_s=0.5,
        own_p99_s=0.57,
        phases_s={"data": 0.05, "forward": 0.15, "backward": 0.3, "communication": 0.4},
        slowest=(slow, *others),
    )


if __name__ == "__main__":
    main()
