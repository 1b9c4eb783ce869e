"""Owns the loop that follows a run on the terminal: events in, a live view, lines or JSON out, Ctrl-C understood.

The run does not depend on it: when the terminal closes, this process ends and the run goes on.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self

from holdfast import api
from holdfast.cli.event_text import EventLineFilter
from holdfast.cli.interrupts import InterruptCounter
from holdfast.cli.output import Output, is_plain, print_json, print_stderr, print_text
from holdfast.errors import HoldfastError
from holdfast.events import AnyEvent, Outcome, RecoveryDecided, RunFinished, ShutdownDecided
from holdfast.findings import replica_suffix
from holdfast.run_dir import RunDir

if TYPE_CHECKING:
    from rich.live import Live

OUTPUT_LINES_SHOWN = 4
"""Lines of what a rank wrote last."""
REDRAW_INTERVAL_S = 0.125
"""Least time between two pictures; faster than that, nobody reads them."""

InterruptHandler = Callable[[int], str | None]
"""Given how often Ctrl-C was pressed, does something about it and says what; None leaves the run to itself."""


def follow_run(
    run: RunDir, output: Output, answer: InterruptHandler, presses: InterruptCounter, *, ranks: str | None = None
) -> int | None:
    """Show a run until it ends, then how it went, and why where it failed; returns its exit code.

    `ranks` are those whose output goes between the lines where the terminal shows no live view: `0-7,12`, `all` or
    `none`. None is returned when the run was left to itself.
    """
    with _screen(run, output, ranks) as screen:
        finished = _show(run, screen, presses, answer)
    if finished is None:
        print_stderr(f"left {run.run_id} to itself; `holdfast attach {run.run_id}` shows it again")
        return None
    from holdfast.cli.final_diagnosis import diagnose_failed_run, print_diagnosis
    from holdfast.cli.summary_text import print_summary  # what only an end needs is not loaded while a run begins

    why = diagnose_failed_run(run, output) if finished.outcome is Outcome.FAILED else None
    if output is Output.TEXT:
        print_summary(run, output, advice=why is None or not why.remedy)
    if why is not None:
        print_diagnosis(run, why, output)
    return finished.exit_code


def _show(run: RunDir, screen: Screen, presses: InterruptCounter, answer: InterruptHandler) -> RunFinished | None:
    answered = 0
    for event in api.follow(run):
        screen.on_event(event)
        if isinstance(event, RunFinished):
            return event
        while answered < presses.count:
            answered += 1
            words = answer(answered)
            if words is None:
                return None
            screen.add_note(words)
    return None


def cancel_on_interrupt(run: RunDir) -> InterruptHandler:
    """Ctrl-C ends the run: gently, then at once; the third time it only leaves."""

    def answer(pressed: int) -> str | None:
        if pressed > 2:
            return None
        try:
            api.cancel(run, force=pressed == 2)
        except HoldfastError as error:
            return f"the run could not be told to end: {error}; Ctrl-C again to try once more"
        return "ending the run at once" if pressed == 2 else "ending the run; Ctrl-C again ends it at once"

    return answer


def detach_on_interrupt(pressed: int) -> None:
    """Ctrl-C leaves the run alone."""


class Screen(Protocol):
    """A way to show a run; `take` gets None where nothing has happened for a while."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None: ...

    def on_event(self, event: AnyEvent | None) -> None: ...

    def add_note(self, text: str) -> None: ...


def _screen(run: RunDir, output: Output, ranks: str | None) -> Screen:
    if output is Output.JSON:
        return JsonScreen()
    return LineScreen(run, ranks or "none") if is_plain(sys.stdout) else LiveScreen(run)


class _StatelessScreen:
    """A screen that needs no cleaning up."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        return


class JsonScreen(_StatelessScreen):
    """Every event as one line of JSON."""

    def on_event(self, event: AnyEvent | None) -> None:
        if event is not None:
            print_json(event)

    def add_note(self, text: str) -> None:
        print_stderr(text)


class LineScreen(_StatelessScreen):
    """Notable events as plain lines, and between them what these ranks write; a single rank's stay as they are."""

    def __init__(self, run: RunDir, ranks: str) -> None:
        from holdfast.cli.logs import Printer, parse_ranks
        from holdfast.report.rank_logs import MergedLog

        self._line_filter = EventLineFilter()
        self._printer = Printer(Output.TEXT, colours=False, bare=ranks.isdecimal())
        self._merged: MergedLog | None = None
        if ranks != "none":
            wanted = parse_ranks(None if ranks == "all" else ranks, api.accepted(run).job, run.run_id)
            self._merged = MergedLog(run, ranks=wanted)

    def on_event(self, event: AnyEvent | None) -> None:
        now = time.monotonic()
        if self._merged is not None:
            ended = isinstance(
                event, RecoveryDecided | ShutdownDecided | RunFinished
            )  # what ranks wrote comes before it
            self._printer.print(self._merged.drain(now) if ended else self._merged.poll(now))
        if event is not None:
            for line in self._line_filter.lines_for(event):
                print_text(line)

    def add_note(self, text: str) -> None:
        print_text(text)


class LiveScreen:
    """A picture that is drawn again and again, and gone at the end."""

    def __init__(self, run: RunDir) -> None:
        from holdfast.cli.live_view import LiveView
        from holdfast.report.rank_logs import LogPreview

        self._preview = LogPreview(run, OUTPUT_LINES_SHOWN)
        self._view = LiveView()
        self._drawn_at = 0.0

    def __enter__(self) -> Self:
        from rich.console import Console
        from rich.live import Live

        screen = Console(markup=False, highlight=False, emoji=False)
        self._live: Live = Live(self._view, console=screen, auto_refresh=False, transient=True)
        self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._live.stop()

    def on_event(self, event: AnyEvent | None) -> None:
        if event is not None:
            self._view.on_event(event)
        now = time.monotonic()
        if now - self._drawn_at >= REDRAW_INTERVAL_S:
            self._drawn_at = now
            if heard := self._preview.poll(now):
                source, lines = heard
                self._view.show_output(f"rank {source.rank}{replica_suffix(source.replica)}", lines)
            self._live.refresh()

    def add_note(self, text: str) -> None:
        self._view.add_note(text)
