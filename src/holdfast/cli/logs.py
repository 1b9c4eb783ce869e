"""The verb `logs`: what the ranks wrote."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.cli.output import Output, say, say_json
from holdfast.cli.request import OutputOption, RunArgument
from holdfast.errors import ExitCode, failure

if TYPE_CHECKING:
    from holdfast.folder import RunFolder
    from holdfast.report.logs import LogLine, MergedLog, RankLog

READ_S = 0.1
"""How often the files are looked at while a run is followed."""


def logs(
    run: RunArgument = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the run ends.")] = False,
    rank: Annotated[int | None, typer.Option("--rank", metavar="RANK", help="Only this rank.")] = None,
    attempt: Annotated[
        int | None, typer.Option("--attempt", metavar="N", help="Of this attempt; the latest if not given.")
    ] = None,
    output: OutputOption = Output.TEXT,
) -> None:
    """Print what the ranks wrote.

    The rank that failed first comes first and is marked with `!`.
    """
    from holdfast import api
    from holdfast.report.logs import MergedLog, first_failures, rank_logs

    found = api.find_run(run)
    ranks = api.accepted(found).job.world_size
    if rank is not None and not 0 <= rank < ranks:
        what = f"{found.run} has no rank {rank}"
        raise failure("no-such-rank", what, exit_code=ExitCode.NOT_FOUND, remedy=f"It has ranks 0 to {ranks - 1}.")
    known = [source for source in rank_logs(found) if rank in (None, source.rank)]
    chosen = attempt if attempt is not None else max((source.attempt for source in known), default=0)
    if not follow and not any(source.attempt == chosen for source in known):
        what = f"no output of {'any rank' if rank is None else f'rank {rank}'} in attempt {chosen} of {found.run}"
        raise failure("no-output", what, exit_code=ExitCode.NOT_FOUND, where=str(found.path / "logs"))
    merged = MergedLog(found, rank=rank, from_attempt=chosen, to_attempt=None if follow else chosen)
    if follow:
        _follow(found, merged, output)
        return
    for line in merged.read(first_failures(api.events(found)), to_the_end=True):
        _print(line, output)


def _follow(run: RunFolder, merged: MergedLog, output: Output) -> None:
    """Print what is there and what comes, and say which rank has failed first as soon as that is known."""
    from holdfast import api
    from holdfast.cli.lines import line as told
    from holdfast.report.logs import first_failures

    failed: frozenset[RankLog] = frozenset()
    read_at = 0.0
    for event in api.follow(run):
        new = first_failures([event] if event else [])
        failed |= new
        if time.monotonic() - read_at >= READ_S or new:
            read_at = time.monotonic()
            for line in merged.read(failed):
                _print(line, output)
        if event and new and output is Output.TEXT:
            say(f"! {told(event)}")
    for line in merged.read(failed, to_the_end=True):
        _print(line, output)


def _print(line: LogLine, output: Output) -> None:
    source = line.source
    if output is Output.JSON:
        say_json({"attempt": source.attempt, "replica": source.replica, "rank": source.rank, "text": line.text})
        return
    replica = f"replica {source.replica} " if source.replica else ""
    say(f"{'!' if line.failed_first else ' '}[{replica}rank {source.rank}] {line.text}")
