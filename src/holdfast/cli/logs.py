"""The commands that print a run's records: logs has the output of the ranks, events the event log."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.cli.common_options import LOCAL, OutputOption, RunArgument, RunTargetOption
from holdfast.cli.output import Output, is_plain, print_json, print_stderr, print_text
from holdfast.errors import ExitCode, HoldfastError, failure

if TYPE_CHECKING:
    from pathlib import Path

    from holdfast.job.spec import Job
    from holdfast.report.rank_logs import MergedLog, RankChunk, RankLog
    from holdfast.run_dir import RunDir

POLL_INTERVAL_S = 0.025
"""Interval between two polls of the log files while following a run."""
MAX_POLL_SHARE = 0.1
"""Maximum share of a core that idle polling uses; with thousands of files the interval grows."""
BURST_S = 0.25
"""Longest time that rank output delays the run's events."""

DIM, RED, PLAIN = "\x1b[2m", "\x1b[1;31m", "\x1b[0m"


def logs(
    run: RunArgument = None,
    on: RunTargetOption = LOCAL,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Follow until the run ends.")] = False,
    rank: Annotated[
        str | None,
        typer.Option(
            "--rank", metavar="RANKS", help="Only these ranks, e.g. 3 or 0-7,12; numbered across all replicas."
        ),
    ] = None,
    attempt: Annotated[
        int | None, typer.Option("--attempt", metavar="N", help="Show this attempt (default: the latest).")
    ] = None,
    tail: Annotated[
        int | None, typer.Option("--tail", metavar="N", min=0, help="Show only the last N lines of each rank.")
    ] = None,
    output: OutputOption = Output.TEXT,
) -> None:
    """Print the output of the ranks.

    The rank that failed first comes first, marked with `!`. Very long lines are truncated, and progress bars are
    printed every few seconds. The files in the run's folder hold every byte.
    """
    from holdfast import api
    from holdfast.report.rank_logs import MergedLog, find_rank_logs, first_failures

    found = api.find_run(run, on)
    wanted = parse_ranks(rank, api.accepted(found).job, found.run_id)
    known = {
        one: path for one, path in find_rank_logs(found).items() if wanted is None or (one.replica, one.rank) in wanted
    }
    if not follow and not any(attempt in (None, source.attempt) for source in known):
        which = f" in attempt {attempt}" if attempt is not None else ""
        what = f"no output of {'any rank' if rank is None else f'rank {rank}'}{which} of {found.run_id}"
        remedy = f"See with `holdfast status {found.run_id}` whether it has started; `-f` waits for it."
        raise failure("no-output", what, exit_code=ExitCode.NOT_FOUND, where=str(found.logs), remedy=remedy)
    colours = output is Output.TEXT and not is_plain(sys.stdout)
    merged = MergedLog(
        found,
        ranks=wanted,
        from_attempt=attempt,
        to_attempt=None if follow else attempt,
        last_lines=tail,
        colours=colours,
    )
    printer = Printer(output, colours=colours)
    if follow:
        _follow(found, merged, printer)
    elif not printer.print(merged.drain(time.monotonic(), first_failures(api.events(found)))):
        _hint_at_attempts(known)


def _hint_at_attempts(logs: Mapping[RankLog, Path]) -> None:
    """Print which attempt has output, since the selected one has none."""
    wrote = sorted({source.attempt for source, path in logs.items() if path.lstat().st_size})
    hint = f"; there is output of attempt {wrote[-1]}: `--attempt {wrote[-1]}`" if wrote else " or any other"
    print_stderr(f"nothing was written in this attempt{hint}")


def parse_ranks(text: str | None, job: Job, run: str, flag: str = "--rank") -> frozenset[tuple[int, int]] | None:
    """Parse `0-7,12`, numbered across all replicas, to (replica, rank) pairs; None selects all."""
    if text is None:
        return None
    world_size = job.world_size
    ranks: set[int] = set()
    for part in text.split(","):
        span = re.fullmatch(r"\s*(\d{1,9})(?:-(\d{1,9}))?\s*", part)
        if span is None:
            raise failure(
                "bad-ranks", f"`{flag} {text}` names no ranks", exit_code=ExitCode.USAGE, remedy="Write 3, or 0-7,12."
            )
        first, last = int(span[1]), int(span[2] or span[1])
        if last >= world_size or first > last:
            what = f"{run} has no rank {part.strip()}"
            remedy = f"It has ranks 0 to {world_size - 1}."
            raise failure("no-such-rank", what, exit_code=ExitCode.NOT_FOUND, remedy=remedy)
        ranks.update(range(first, last + 1))
    return frozenset(divmod(rank, job.replica_world_size) for rank in ranks)


def _follow(run: RunDir, merged: MergedLog, printer: Printer) -> None:
    """Print existing and new output; report the first failed rank as soon as it is known."""
    from holdfast import api
    from holdfast.cli.event_text import event_line
    from holdfast.report.rank_logs import first_failures

    failed: frozenset[RankLog] = frozenset()
    look_at = 0.0
    try:
        for event in api.follow(run, poll_s=POLL_INTERVAL_S):
            new = first_failures([event] if event else [])
            failed |= new
            if new or time.monotonic() >= look_at:
                idle_s = _catch_up(merged, failed, printer)
                look_at = time.monotonic() + max(POLL_INTERVAL_S, idle_s / MAX_POLL_SHARE)
            if event and new and printer.output is Output.TEXT:
                print_text(f"! {event_line(event)}")
    except HoldfastError:  # the run has no controller any more; its log files remain readable
        printer.print(merged.drain(time.monotonic(), failed))
        raise
    printer.print(merged.drain(time.monotonic(), failed))


def _catch_up(merged: MergedLog, failed: frozenset[RankLog], printer: Printer) -> float:
    """Print until no output is pending or time is up; returns the duration of an empty poll in seconds."""
    began = now = time.monotonic()
    while printer.print(merged.poll(now, failed)):
        if time.monotonic() - began > BURST_S:
            return 0.0
        now = time.monotonic()
    return time.monotonic() - now


class Printer:
    """Prints rank output; each line has a rank prefix unless `bare`."""

    def __init__(self, output: Output, *, colours: bool, bare: bool = False) -> None:
        self.output = output
        self._colours = colours
        self._bare = bare
        self._unfinished: dict[RankLog, str] = {}
        """How each rank's last line was printed before it was complete."""

    def print(self, chunks: Iterable[RankChunk]) -> bool:
        """Print the chunks; returns whether there were any."""
        any_came = False
        for chunk in chunks:
            any_came = True
            if self.output is Output.JSON:
                _print_json(chunk)
            else:
                self._print_text(chunk)
        return any_came

    def _print_text(self, chunk: RankChunk) -> None:
        source, piece = chunk.source, chunk.chunk
        replica = f"replica {source.replica} " if source.replica else ""
        mark = f"{'!' if chunk.failed_first else ' '}[{replica}rank {source.rank}] "
        if self._colours:
            mark = f"{RED if chunk.failed_first else DIM}{mark[:-1]}{PLAIN} "
        if self._bare:
            mark = ""
        if piece.dropped_bytes:
            print_text(f"{mark}({piece.dropped_bytes:,} bytes that came before are dropped, by logs.max_bytes)")
        lines = piece.lines
        if lines and self._unfinished.pop(source, None) == lines[0]:
            lines = lines[1:]  # it was printed already; only its newline is new
        if piece.partial:
            self._unfinished[source] = piece.lines[0]
        if lines:
            print_text(mark + f"\n{mark}".join(lines))


def _print_json(chunk: RankChunk) -> None:
    source, piece = chunk.source, chunk.chunk
    who: dict[str, object] = {"attempt": source.attempt, "replica": source.replica, "rank": source.rank}
    if piece.dropped_bytes:
        print_json(who | {"dropped_bytes": piece.dropped_bytes})
    kind = {"partial": True} if piece.partial else {}
    print_json(*(who | {"text": text} | kind for text in piece.lines))


def events(
    run: RunArgument = None,
    on: RunTargetOption = LOCAL,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Follow until the run ends.")] = False,
    output: OutputOption = Output.TEXT,
) -> None:
    """Print every event of a run, one per line."""
    from holdfast import api
    from holdfast.cli.event_text import event_line

    found = api.find_run(run, on)
    for event in api.follow(found) if follow else api.events(found):
        if event is None:
            continue
        if output is Output.JSON:
            print_json(event)
        else:
            print_text(event_line(event))
