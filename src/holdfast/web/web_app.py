"""The server of the live page: its files, the list of runs, each run's view as a stream, and the output of ranks.

The page itself has no secrets; all data needs the token, which the browser gets in the fragment of its address, so that
it is in no request's address and no log. That token only reads. Actions need a second one, which exists only if the
page was started with them.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import math
import re
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from http import HTTPStatus
from importlib.resources import files
from typing import Any, NamedTuple

import msgspec
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from holdfast.errors import HoldfastError
from holdfast.events.log import EventReader, UnsupportedFormat
from holdfast.findings import Finding
from holdfast.job.quarantine_text import describe
from holdfast.job.run_spec import RunSpec
from holdfast.job.target_files import LOCAL
from holdfast.launch.code.upload_progress import upload_progress
from holdfast.launch.target_machines import TargetMachines
from holdfast.observe.observed_log import ObservedLog
from holdfast.report.log_problems import UNREADABLE, incomplete_log, unreadable_log
from holdfast.report.log_tail import LogTail
from holdfast.report.rank_logs import RankLog, find_rank_logs
from holdfast.report.run_record import RunRecorder
from holdfast.report.run_row import read_run_row
from holdfast.run_dir import RunDir
from holdfast.web.run_action import RunAction
from holdfast.web.run_view import RunView, finding_view

log = logging.getLogger("holdfast.web")

PERIOD_S = 0.5
"""Seconds between two looks at a log."""
PROBLEMS_S = 2.0
"""Seconds between two looks at what is wrong with a run beyond its log."""
KEEP_ALIVE_S = 5.0
"""A run in which nothing happens is sent this often: its age grows."""
MAX_RUNS = 200
"""Runs in the list, the newest."""
MAX_LINES, MAX_TAIL_BYTES = 2000, 8 << 20
"""Lines of a rank's output in one answer, and the bytes at the end of its file that are searched."""

MAX_ARGUMENT_BYTES = 200
"""Longest text that an action takes."""

FILES: Mapping[str, str] = {
    "index.html": "text/html",
    "page.js": "text/javascript",
    "page.css": "text/css",
    "uplot.js": "text/javascript",
    "uplot.css": "text/css",
}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


def no_problems(_run: RunDir) -> tuple[Finding, ...]:
    """For a server that knows no more of a run than its log."""
    return ()


class _Outside(NamedTuple):
    """What is known of a run beyond its log."""

    problems: tuple[Finding, ...] = ()
    upload: str = ""
    """How far its code is uploaded, in words."""


class _Followed:
    """One run's log, read once for all its readers."""

    def __init__(self, run: RunDir) -> None:
        self.run = run
        self.recorder = RunRecorder(run.run_id)
        self._reader = EventReader(run.events)
        self._log = ObservedLog(self._reader, self.recorder.add)
        self._broken: Finding | None = None
        """Why reading further makes no sense."""

    async def read(self) -> Finding | None:
        """Read what is new; what is wrong with the log, if something is."""
        if self._broken is not None:
            return self._broken
        try:
            await self._log.read()
        except (UnsupportedFormat, LookupError) as error:
            self._broken = unreadable_log(error, self.run.events)
            return self._broken
        except OSError as error:
            return unreadable_log(error, self.run.events)
        lines = self._reader.corrupt_line_count or int(self._reader.has_read and not self.is_known)
        return incomplete_log(lines, self.run.events) if lines else None

    @property
    def is_known(self) -> bool:
        """Whether the log's first line has been read."""
        return self.recorder.record.status.created_at is not None


class WebApp:
    """Answers a browser; `runs` returns the folders of runs, the newest first.

    `machines` returns those of a target, and may take seconds; `problems` returns what is wrong with a run beyond its
    log. `actions` need `action_token`; without one, the page changes nothing.
    """

    def __init__(
        self,
        runs: Callable[[], list[RunDir]],
        token: str,
        *,
        machines: Callable[[str], TargetMachines] | None = None,
        problems: Callable[[RunDir], Sequence[Finding]] = no_problems,
        actions: Sequence[RunAction] = (),
        action_token: str = "",
    ) -> None:
        self._runs = runs
        self._token = token
        self._machines = machines
        self._problems = problems
        self._actions = {each.name: each for each in actions}
        self._action_token = action_token
        self._followed: dict[str, _Followed] = {}
        self._targets: dict[str, str] = {}
        """By run, as far as they were asked for: a run keeps its target."""
        self.app = Starlette(
            routes=[
                Route("/", self._file),
                Route("/static/{name}", self._file),
                Route("/api/runs", self._guarded(self._list)),
                Route("/api/runs/{run}/stream", self._guarded(self._stream)),
                Route("/api/runs/{run}/output", self._guarded(self._output)),
                Route("/api/machines", self._guarded(self._list_machines)),
                Route("/api/actions", self._list_actions),
                Route("/api/runs/{run}/actions/{action}", self._act, methods=["POST"]),
            ]
        )

    def _guarded(self, answer: Callable[[Request], Response]) -> Callable[[Request], Response]:
        def guarded(request: Request) -> Response:
            if not _has_token(request, self._token):
                return _refusal("refused", HTTPStatus.UNAUTHORIZED)
            return answer(request)

        return guarded

    def _list_actions(self, request: Request) -> Response:
        if refusal := self._refused_action(request):
            return refusal
        shown = ("name", "label", "effect", "argument", "example")
        rows = [{name: getattr(each, name) for name in shown} for each in self._actions.values()]
        return JSONResponse(rows, headers=HEADERS)

    async def _act(self, request: Request) -> Response:
        """Perform an action; the answer tells what was done, or why it was not."""
        if refusal := self._refused_action(request):
            return refusal
        run, action = self._find(request), self._actions.get(request.path_params["action"])
        if run is None or action is None:
            return _refusal("there is no such run or action", HTTPStatus.NOT_FOUND)
        argument = await _text(request)
        if argument is None:
            return _refusal("the request must be a short text", HTTPStatus.BAD_REQUEST)
        try:
            done = await run_in_threadpool(action.perform, run, argument)
        except HoldfastError as error:
            finding = error.findings[0]
            remedy = f" {finding.remedy}" if finding.remedy else ""
            return _refusal(f"{finding.what}.{remedy}", HTTPStatus.CONFLICT)
        return JSONResponse({"done": done}, headers=HEADERS)

    def _refused_action(self, request: Request) -> Response | None:
        if not self._action_token:
            why = "this page only shows: `holdfast web --allow-actions` starts one that may also act"
            return _refusal(why, HTTPStatus.FORBIDDEN)
        # No form and no other site can send the header; the origin is checked as well.
        origin = request.headers.get("origin")
        same = origin is None or origin == f"{request.url.scheme}://{request.headers.get('host', '')}"
        if same and _has_token(request, self._action_token):
            return None
        return _refusal("this address of the page does not permit actions", HTTPStatus.FORBIDDEN)

    def _file(self, request: Request) -> Response:
        name: str = request.path_params.get("name", "index.html")
        if name not in FILES:
            return _refusal("there is no such file", HTTPStatus.NOT_FOUND)
        return Response(read_file(name), media_type=FILES[name], headers=HEADERS)

    def _list(self, _request: Request) -> Response:
        rows = [{"run": run.run_id, "target": self._target(run), **_row(run)} for run in self._runs()[:MAX_RUNS]]
        return Response(msgspec.json.encode(rows), media_type="application/json", headers=HEADERS)

    def _list_machines(self, request: Request) -> Response:
        """The machines of a target; Starlette runs this in a thread."""
        target = request.query_params.get("target", LOCAL)
        if self._machines is None or target not in {self._target(run) for run in self._runs()[:MAX_RUNS]}:
            return _refusal("no run has used this target", HTTPStatus.NOT_FOUND)
        try:
            found = self._machines(target)
        except HoldfastError as error:
            return _refusal(error.findings[0].what, HTTPStatus.BAD_GATEWAY)
        rows = [
            {
                "machine": each.name,
                "state": each.state.value,
                "runs": each.runs,
                "why": describe(each.quarantine) if each.quarantine else each.note,
                "evidence": each.quarantine.evidence if each.quarantine else (),
            }
            for each in found.machines
        ]
        return Response(msgspec.json.encode(rows), media_type="application/json", headers=HEADERS)

    def _target(self, run: RunDir) -> str:
        """The target of a run; empty if its folder does not tell."""
        if run.run_id not in self._targets:
            try:
                self._targets[run.run_id] = RunSpec.read(run.job).target
            except HoldfastError:
                self._targets[run.run_id] = ""
        return self._targets[run.run_id]

    def _find(self, request: Request) -> RunDir | None:
        return next((run for run in self._runs() if run.run_id == request.path_params["run"]), None)

    def _stream(self, request: Request) -> Response:
        run = self._find(request)
        if run is None:
            return _refusal("there is no such run", HTTPStatus.NOT_FOUND)
        followed = self._followed.setdefault(run.run_id, _Followed(run))
        return StreamingResponse(self._views(followed), media_type="text/event-stream", headers=HEADERS)

    async def _views(self, followed: _Followed) -> AsyncIterator[bytes]:
        """The changed parts of a run's view and what is wrong with it, as server-sent events, until it is over."""
        view, before, sent_at, looked_at = RunView(), None, -math.inf, -math.inf
        outside, told = _Outside(), None
        while True:
            of_log = await followed.read()
            if time.monotonic() - looked_at > PROBLEMS_S:
                outside, looked_at = await run_in_threadpool(self._look, followed.run), time.monotonic()
            record = followed.recorder.record
            changed: dict[str, Any] = {}
            if told != (of_log, outside):
                told = of_log, outside
                findings = dict.fromkeys((of_log, *outside.problems) if of_log else outside.problems)
                changed["problems"] = [{"severity": each.severity.value, **finding_view(each)} for each in findings]
                changed["upload"] = outside.upload
            is_due = record.status is not before or time.monotonic() - sent_at > KEEP_ALIVE_S
            if is_due and (followed.is_known or of_log is None):
                before, sent_at = record.status, time.monotonic()
                changed |= view.changed(record, record.status.now)
            if changed:
                yield b"data: " + msgspec.json.encode(changed) + b"\n\n"
            if record.status.finished_at is not None:
                yield b"event: over\ndata: {}\n\n"
                return
            await asyncio.sleep(PERIOD_S)

    def _look(self, run: RunDir) -> _Outside:
        try:
            upload = upload_progress(run)
            return _Outside(tuple(self._problems(run)), upload.text if upload else "")
        except (HoldfastError, OSError) as error:  # a file of the run is damaged: the command line names it
            log.warning("what is wrong with %s is not known: %s", run.run_id, error)
            return _Outside()

    def _output(self, request: Request) -> Response:
        run, given = self._find(request), request.query_params
        if run is None:
            return _refusal("there is no such run", HTTPStatus.NOT_FOUND)
        try:
            rank, replica = int(given.get("rank", "0")), int(given.get("replica", "0"))
        except ValueError:
            return _refusal("a rank is a number", HTTPStatus.BAD_REQUEST)
        logs = find_rank_logs(run)
        attempts = sorted({one.attempt for one in logs if (one.rank, one.replica) == (rank, replica)})
        wanted = given.get("attempt", "")
        attempt = int(wanted) if re.fullmatch(r"\d{1,9}", wanted) else (attempts[-1] if attempts else 0)
        path = logs.get(RankLog(attempt=attempt, replica=replica, rank=rank))
        lines = [] if path is None else _lines(LogTail(path, last_lines=10 * MAX_LINES), given.get("q", ""))
        answer = {"attempt": attempt, "attempts": attempts, "lines": lines}
        return Response(msgspec.json.encode(answer), media_type="application/json", headers=HEADERS)


def _has_token(request: Request, token: str) -> bool:
    given = request.headers.get("authorization", "")
    return hmac.compare_digest(given.encode(), f"Bearer {token}".encode())


def _refusal(why: str, status: HTTPStatus) -> JSONResponse:
    return JSONResponse({"error": why}, status_code=status, headers=HEADERS)


async def _text(request: Request) -> str | None:
    """The request's text; None if it is long, or none."""
    read = b""
    async for part in request.stream():
        read += part
        if len(read) > MAX_ARGUMENT_BYTES:
            return None
    try:
        return read.decode()
    except UnicodeDecodeError:
        return None


def read_file(name: str) -> bytes:
    """One of the page's files."""
    return files(__package__ or "").joinpath("static", name).read_bytes()


_ROW = ("job", "phase", "created_at", "took_s", "step", "nodes", "restarts", "waiting_for")


def _row(run: RunDir) -> dict[str, object]:
    try:
        row = read_run_row(run)
    except UNREADABLE as error:
        why = unreadable_log(error, run.events).what
        return {**dict.fromkeys(_ROW), "phase": "unreadable", "waiting_for": why}
    return {name: getattr(row, name) for name in _ROW}


def _lines(tail: LogTail, searched: str) -> list[str]:
    """The last lines that contain some text, whatever its case."""
    found: list[str] = []
    while (chunk := tail.read(time.monotonic())) is not None:
        found += [line for line in chunk.lines if searched.lower() in line.lower()]
        found = found[-MAX_LINES:]
    return found
