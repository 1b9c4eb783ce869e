"""Follows a run on the terminal as a live view, lines or JSON, and handles Ctrl-C.

The run does not depend on this process: if the terminal closes, the run continues.
"""

from __future__ import annotations

import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Self

from holdfast import api
from holdfast.cli.event_text import EventLineFilter
from holdfast.cli.output import Output, is_plain, print_json, print_stderr, print_text
from holdfast.cli.run import InterruptCounter
from holdfast.errors import HoldfastError
from holdfast.events import AnyEvent, Outcome, RecoveryDecided, RunFinished, ShutdownDecided
from holdfast.findings import replica_suffix
from holdfast.run_dir import RunDir

if TYPE_CHECKING:
    from rich.live import Live

OUTPUT_LINES_SHOWN = 4
"""Lines of a rank's latest output in the live view."""
REDRAW_INTERVAL_S = 0.125
"""Minimum time between two redraws."""

InterruptHandler = Callable[[int], str | None]
"""Handles the n-th Ctrl-C and returns a note to print; None detaches from the run."""


def follow_run(
    run: RunDir, output: Output, answer: InterruptHandler, presses: InterruptCounter, *, ranks: str | None = None
) -> int | None:
    """Follow a run until it ends, print its summary and, if it failed, the diagnosis; returns its exit code.

    `ranks` selects whose output is printed between the event lines if there is no live view: `0-7,12`, `all` or
    `none`. Returns None if the user detached.
    """
    with _screen(run, output, ranks) as screen:
        finished = _show(run, screen, presses, answer)
    if finished is None:
        print_stderr(f"detached from {run.run_id}; `holdfast attach {run.run_id}` shows it again")
        return None
    from holdfast.cli.diagnose import diagnose_failed_run, print_diagnosis
    from holdfast.cli.summary_text import print_summary  # needed only at the end; not imported at the start

    why = diagnose_failed_run(run, output) if finished.outcome is Outcome.FAILED else None
    if output is Output.TEXT:
        print_summary(run, output, advice=why is None or not why.remedy)
    if why is not None:
        print_diagnosis(run, why, output)
    return finished.exit_code


def _show(run: RunDir, screen: Screen, presses: InterruptCounter, answer: InterruptHandler) -> RunFinished | None:
    answered, told = 0, ""
    for event in api.follow(run):
        screen.on_event(event)
        if isinstance(event, RunFinished):
            return event
        if event is None and (reason := _waits_for(run)) not in {"", told}:
            told = reason
            screen.add_note(reason)
        while answered < presses.count:
            answered += 1
            note = answer(answered)
            if note is None:
                return None
            screen.add_note(note)
    return None


def _waits_for(run: RunDir) -> str:
    """Why a run has no controller that could report anything; a cluster's run has events that say it."""
    reason = None if run.remote.exists() else api.pending_reason(run)
    return reason.what if reason else ""


def cancel_on_interrupt(run: RunDir) -> InterruptHandler:
    """The first Ctrl-C stops the run, the second kills it, the third detaches."""

    def answer(pressed: int) -> str | None:
        if pressed > 2:
            return None
        try:
            api.cancel(run, force=pressed == 2)
        except HoldfastError as error:
            return f"cannot stop the run: {error}; press Ctrl-C to try again"
        return "killing the run" if pressed == 2 else "stopping the run; Ctrl-C again kills it"

    return answer


def detach_on_interrupt(pressed: int) -> None:
    """Ctrl-C detaches; the run continues."""


class Screen(ABC):
    """A way to show a run."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:  # noqa: B027 - most screens have nothing to clean up
        """Clean up."""

    @abstractmethod
    def on_event(self, event: AnyEvent | None) -> None:
        """Show an event; None after a while without events."""

    @abstractmethod
    def add_note(self, text: str) -> None:
        """Show a note that is not an event."""


def _screen(run: RunDir, output: Output, ranks: str | None) -> Screen:
    if output is Output.JSON:
        return JsonScreen()
    return LineScreen(run, ranks or "none") if is_plain(sys.stdout) else LiveScreen(run)


class JsonScreen(Screen):
    """Every event as one line of JSON."""

    def on_event(self, event: AnyEvent | None) -> None:
        if event is not None:
            print_json(event)

    def add_note(self, text: str) -> None:
        print_stderr(text)


class LineScreen(Screen):
    """Notable events and the output of selected ranks as lines; a single rank's output has no prefix."""

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
            # Rank output that precedes the event is printed before it.
            ended = isinstance(event, RecoveryDecided | ShutdownDecided | RunFinished)
            self._printer.print(self._merged.drain(now) if ended else self._merged.poll(now))
        if event is not None:
            for line in self._line_filter.lines_for(event):
                print_text(line)

    def add_note(self, text: str) -> None:
        print_text(text)


class LiveScreen(Screen):
    """A live view that is redrawn in place and removed at the end."""

    def __init__(self, run: RunDir) -> None:
        from holdfast.cli.live_view import LiveView
        from holdfast.report.rank_logs import LogPreview

        self._run = run
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

    def __exit__(self, *error: object) -> None:
        self._live.stop()

    def on_event(self, event: AnyEvent | None) -> None:
        if event is not None:
            self._view.on_event(event)
        now = time.monotonic()
        if now - self._drawn_at >= REDRAW_INTERVAL_S:
            self._drawn_at = now
            if latest := self._preview.poll(now):
                source, lines = latest
                self._view.show_output(f"rank {source.rank}{replica_suffix(source.replica)}", lines)
            upload = api.upload_progress(self._run)
            self._view.show_activity(upload.text if upload else "")
            self._live.refresh()

    def add_note(self, text: str) -> None:
        self._view.add_note(text)
