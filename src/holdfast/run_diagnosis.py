"""Diagnoses a run, or log files: gathers its logs, events and stacks, and has `diagnose` explain them.

`holdfast.diagnose` is imported on use: its rules are a fifth of all imports.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from msgspec.structs import replace

from holdfast.controller_client import STACK_DUMP, controller_dead, follow_request, is_finished
from holdfast.errors import ExitCode, HoldfastError, failure
from holdfast.events import AnyEvent, Outcome, RankExited, RunFinished, StackDumpRequested, StacksCompared, StacksDumped
from holdfast.events.log import line_of, read_events
from holdfast.fabric.catalog import CATALOG
from holdfast.fabric.fabric import Fabric
from holdfast.findings import Finding
from holdfast.job.run_spec import RunSpec
from holdfast.job.spec import Launch
from holdfast.job.yaml_source import printable
from holdfast.launch.target import is_alive
from holdfast.protocol.nccl_log_files import private_files
from holdfast.report.log_tail import last_lines
from holdfast.report.rank_logs import RankLog, find_rank_logs
from holdfast.report.rank_table import RankPhase
from holdfast.report.run_status import RunStatus
from holdfast.report.stall import DIAGNOSE_IDLE_S, STATUS_IDLE_S, Stall, find_stall, format_stacks
from holdfast.report.status_reducer import read_status, status_from_events
from holdfast.run_dir import RunDir

if TYPE_CHECKING:
    from holdfast.diagnose.diagnosis import Diagnosis, Evidence
    from holdfast.diagnose.failed_attempt import FailedAttempt

LAST_LINES = 10
"""Last lines shown of the rank that failed first, if the diagnosis finds nothing better."""
LAST_LINE_CHARS = 2000
NCCL_WARNING = " NCCL WARN "
"""What every warning of NCCL has before its text."""
STACK_DUMP_TIMEOUT_S = 20.0
"""Maximum seconds to wait for the stacks of a live run's ranks."""
NATIVE_TIMEOUT_S = 120.0
"""The same with native frames: four ranks of a node at a time, of which each takes up to 35 s."""
ROUNDS_TIMEOUT_S = 420.0
"""The same for several dumps, of which two are at most a minute apart."""


def diagnose(
    paths: Sequence[Path], *, stdin: BinaryIO | None = None, hide: Callable[[str], str] | None = None
) -> Diagnosis:
    """Diagnose log files and folders: what happened, where first, and what to do; `-` is standard input.

    `hide` replaces secrets in a line before it is cut.
    """
    from holdfast.diagnose.log_input import LogInput
    from holdfast.diagnose.pipeline import diagnose as diagnose_logs

    for path in paths:
        if str(path) != "-" and not os.path.exists(path):  # False also for a name that is too long
            name, remedy = printable(str(path)), "Give files or folders that are there, or the id of a run."
            raise failure(
                "no-such-file", f"there is no {name}", exit_code=ExitCode.NOT_FOUND, where=name, remedy=remedy
            )
    log_input = LogInput(tuple(paths), stdin=stdin)
    answer = diagnose_logs(log_input, hide=hide)
    if log_input.bytes == 0:
        remedy = "Give the files or the folder of the ranks' logs, `-` for standard input, or the id of a run."
        raise failure(
            "nothing-to-read",
            "no line could be read in what was given",
            exit_code=ExitCode.NOT_FOUND,
            evidence=tuple(log_input.notes),
            remedy=remedy,
        )
    return answer


def diagnose_run(
    run: RunDir,
    known: Sequence[AnyEvent] | None = None,
    *,
    taken: Sequence[StacksDumped] | None = None,
    hide: Callable[[str], str] | None = None,
) -> Diagnosis:
    """Diagnose a run's last failed attempt from its event log and its ranks' logs.

    `known` are the events to use; by default the whole log. `taken` are stacks of a live run's ranks; by default they
    are dumped if it makes no progress. `hide` replaces secrets in a line before it is cut.
    """
    from holdfast.diagnose.run_context import without_controller

    answer = _diagnose_events(run, read_events(run.events) if known is None else known, taken, hide)
    if is_finished(run) or is_alive(run):
        return answer
    return without_controller(answer, controller_dead(run).findings[0])


def _diagnose_events(
    run: RunDir,
    known: Sequence[AnyEvent],
    taken: Sequence[StacksDumped] | None,
    hide: Callable[[str], str] | None,
) -> Diagnosis:
    from holdfast.diagnose.failed_attempt import last_failure, quoted_warnings
    from holdfast.diagnose.log_input import LogInput
    from holdfast.diagnose.pipeline import diagnose as diagnose_logs
    from holdfast.diagnose.run_context import (
        RUN_LOGS_EVIDENCE,
        STACKS_EVIDENCE,
        caused_by_drill,
        is_inconclusive,
        nothing_failed,
        with_node,
        with_stacks,
        without_evidence,
    )

    failed = last_failure(known, str(run.events))
    fabric = CATALOG.get(RunSpec.read(run.job).fabric)
    if failed is None:
        outcome = next((event.outcome for event in reversed(known) if isinstance(event, RunFinished)), None)
        still = None if outcome else _standstill(run, status_from_events(known), DIAGNOSE_IDLE_S, known)
        if still is not None:
            return _diagnose_standstill(run, still, fabric, taken, hide)
        nccl_logs = (path for _, path in private_files(run.nodes))
        answer = diagnose_logs(LogInput((*find_rank_logs(run).values(), *nccl_logs)), fabric=fabric, hide=hide)
        return answer if outcome is Outcome.FAILED else nothing_failed(answer, outcome)
    job = RunSpec.read(run.job).job
    shared = job.launch is not Launch.PER_RANK
    logs = {
        log.rank: path
        for log, path in find_rank_logs(run).items()
        if (log.attempt, log.replica) == (failed.attempt, failed.replica)
    }
    stacks = tuple(path for path in map(Path, failed.stacks) if path.is_file())
    dumps = tuple(path for path in map(Path, failed.flight_dumps) if path.is_file())
    fact = replace(failed.fact, line=line_of(run.events, failed.event))
    evidence = run.evidence(failed.attempt, failed.replica, job.recovery.replicas)
    logs = _kept_output(evidence) | logs
    by_nccl = [*private_files(run.nodes, failed.replica, failed.attempt)]
    log_input = LogInput((*logs.values(), *(path for _, path in by_nccl), *stacks, *dumps), shared_logs=shared)
    # A launcher process has the number of its node's first rank, whichever of its ranks failed.
    first_rank = None if shared and failed.log_rank is None else failed.rank
    if first_rank is None:
        fact = replace(fact, process=replace(fact.process, rank=None))
    answer = diagnose_logs(
        log_input,
        known=(fact, *failed.exited_early),
        quoted=quoted_warnings(
            _exits_with_warnings(run, known, failed, {rank for rank, _ in by_nccl}), str(run.events)
        ),
        summaries=failed.summaries,
        first_rank=first_rank,
        fabric=fabric,
        hide=hide,
    )
    wrote = failed.rank if failed.log_rank is None else failed.log_rank
    if is_inconclusive(answer) and wrote in logs:
        answer = replace(answer, last_lines=_last_lines(logs[wrote], hide))
    ranks = range(job.local_world_size if shared else 1)
    answer = with_node(answer, {first + rank: node for first, node in failed.nodes.items() for rank in ranks})
    answer = replace(answer, notes=(*answer.notes, *(f"evidence of this failure: {each}" for each in evidence)))
    if failed.compared is not None:
        answer = with_stacks(answer, failed.compared, f"{run.events}:{line_of(run.events, failed.compared)}")
    if failed.drill is not None:
        return caused_by_drill(answer, failed.drill)
    answer = without_evidence(answer, STACKS_EVIDENCE) if stacks else answer
    whole = len(logs) * (job.local_world_size if shared else 1) >= failed.world_size
    return without_evidence(answer, RUN_LOGS_EVIDENCE) if whole else answer


def _kept_output(evidence: Sequence[Path]) -> dict[int, Path]:
    """The last lines of each rank's output, for those of which the whole is gone."""
    files = (path for folder in evidence for path in folder.glob("output/rank-*.log"))
    return {int(number): path for path in files if (number := path.stem.removeprefix("rank-")).isdecimal()}


def _exits_with_warnings(
    run: RunDir, known: Sequence[AnyEvent], failed: FailedAttempt, have: Collection[int]
) -> Iterator[tuple[int, RankExited]]:
    """The ends of the attempt's ranks that quote a warning of NCCL, where its files are on nodes that are elsewhere."""
    exits = (event for event in known if isinstance(event, RankExited) and NCCL_WARNING in event.evidence)
    for event in exits:
        if (event.replica, event.attempt) == (failed.replica, failed.attempt) and event.rank not in have:
            yield line_of(run.events, event), event


def _last_lines(path: Path, hide: Callable[[str], str] | None) -> tuple[Evidence, ...]:
    """The last lines that a rank wrote."""
    from holdfast.diagnose.diagnosis import Evidence

    lines = (line for line in last_lines(path, 2 * LAST_LINES) if line.strip())
    texts = [(hide(line) if hide else line)[:LAST_LINE_CHARS] for line in lines]
    return tuple(Evidence(where=str(path), text=text, code="") for text in texts[-LAST_LINES:])


def _standstill(
    run: RunDir, status: RunStatus, least_s: float, known: Sequence[AnyEvent] | None = None
) -> Stall | None:
    """Since when a live run shows no progress; reads its log only if nothing else shows progress."""
    written_s: dict[RankLog, float] = {}
    for log, path in find_rank_logs(run).items():
        with contextlib.suppress(OSError):
            written_s[log] = max(0.0, time.time() - path.stat().st_mtime)
    now = status.now
    stepped_s = (now - replica.recent_steps[-1].ended for replica in status.replicas.values() if replica.recent_steps)
    if min((*written_s.values(), *stepped_s), default=least_s) < least_s:
        return None
    return find_stall(known or read_events(run.events), now=now, written_s=written_s, least_s=least_s)


def standstill_finding(run: RunDir, status: RunStatus | None = None) -> Finding | None:
    """The finding for an unfinished run without progress for minutes."""
    still = None if is_finished(run) else _standstill(run, status or read_status(run), STATUS_IDLE_S)
    return still and still.finding(run.run_id)


def dump_stacks(run: RunDir, of: Collection[RankLog], *, timeout_s: float) -> list[StacksDumped]:
    """Have the agents dump the stacks of ranks; returns the dumps that arrived within `timeout_s` seconds."""
    taken: list[StacksDumped] = []
    waiting = set(of)
    with contextlib.suppress(HoldfastError):  # the run restarts or ends meanwhile, or its controller does not answer
        for _, event in follow_request(run, StackDumpRequested(at=time.time()), STACK_DUMP, timeout_s):
            if isinstance(event, StacksDumped):
                taken.append(event)
                waiting.discard(RankLog(attempt=event.attempt, replica=event.replica, rank=event.rank))
            if not waiting:
                break
    return taken


def compare_running_ranks(run: RunDir, *, timeout_s: float = ROUNDS_TIMEOUT_S) -> list[StacksCompared]:
    """Have the stacks of a live run's ranks dumped several times; what they show together, for each replica.

    Raises HoldfastError if the run does not run, restarts, or does not answer in time.
    """
    from holdfast.diagnose.stack_rounds import ROUNDS

    compared: dict[int, StacksCompared] = {}
    request = StackDumpRequested(at=time.time(), rounds=ROUNDS)
    for known, event in follow_request(run, request, STACK_DUMP, timeout_s):
        if isinstance(event, StacksCompared) and event.rounds > 1:
            compared[event.replica] = event
            if compared.keys() >= known.replicas.keys():
                break
    return [compared[replica] for replica in sorted(compared)]


def diagnose_running_ranks(run: RunDir, *, hide: Callable[[str], str] | None = None) -> Diagnosis:
    """Diagnose a live run that is slow: with what several dumps of its ranks' stacks show."""
    from holdfast.diagnose.run_context import with_stacks

    compared = compare_running_ranks(run)
    answer = diagnose_run(run, hide=hide)
    for each in compared:
        answer = with_stacks(answer, each, f"{run.events}:{line_of(run.events, each)}")
    return answer


def dump_native_stacks(run: RunDir, *, timeout_s: float = NATIVE_TIMEOUT_S) -> list[StacksDumped]:
    """Have the stacks of a live run's ranks dumped once, with frames of C and C++.

    Returns what arrived within `timeout_s` seconds. Raises HoldfastError if that is nothing.
    """
    taken: dict[RankLog, StacksDumped] = {}
    request = StackDumpRequested(at=time.time(), native=True)
    try:
        for known, event in follow_request(run, request, STACK_DUMP, timeout_s):
            if isinstance(event, StacksDumped):
                taken[RankLog(attempt=event.attempt, replica=event.replica, rank=event.rank)] = event
            if taken.keys() >= _running_ranks(known):
                break
    except HoldfastError:  # the run restarts or ends meanwhile, or an agent does not answer
        if not taken:
            raise
    return list(taken.values())


def _running_ranks(known: RunStatus) -> set[RankLog]:
    return {
        RankLog(attempt=replica.attempt, replica=replica.replica, rank=rank)
        for replica in known.replicas.values()
        for rank, each in replica.ranks.items()
        if each.phase in (RankPhase.RUNNING, RankPhase.HUNG)
    }


def diagnose_native_stacks(run: RunDir, *, hide: Callable[[str], str] | None = None) -> Diagnosis:
    """Diagnose a live run with what its ranks do in C and C++ at this moment."""
    from holdfast.diagnose.run_context import with_native_stacks

    taken = dump_native_stacks(run)
    return with_native_stacks(diagnose_run(run, taken=taken, hide=hide), taken, str(run.nodes))


def _compare(run: RunDir, dumped: Sequence[StacksDumped]) -> StacksCompared | None:
    """What the stacks of a replica's ranks show together; None if they do not differ."""
    from holdfast.diagnose.stack_groups import group_stacks, to_event
    from holdfast.job.parallel_layout import ParallelLayout

    job = RunSpec.read(run.job).job
    layout = ParallelLayout.of(job.parallel, len(dumped)) if job.parallel and dumped else None
    verdict = group_stacks({each.rank: each.frames for each in dumped}, layout)
    if len(verdict.groups) < 2:
        return None
    nodes = {each.node for each in dumped if each.rank in verdict.suspects}
    return to_event(verdict, at=time.time(), replica=dumped[0].replica, attempt=dumped[0].attempt, nodes=nodes)


def _diagnose_standstill(
    run: RunDir,
    still: Stall,
    fabric: Fabric | None,
    taken: Sequence[StacksDumped] | None,
    hide: Callable[[str], str] | None,
) -> Diagnosis:
    """Diagnose a live run without progress: its logs, and its ranks' current stacks."""
    from holdfast.diagnose.failed_attempt import early_exit_fact
    from holdfast.diagnose.log_input import LogInput
    from holdfast.diagnose.pipeline import diagnose as diagnose_logs
    from holdfast.diagnose.run_context import STACKS_EVIDENCE, with_stacks, with_standstill, without_evidence
    from holdfast.diagnose.structured.flight_summary import from_summary

    if taken is None:
        taken = dump_stacks(run, still.running, timeout_s=STACK_DUMP_TIMEOUT_S)
    files = tuple(path for path in (Path(each.stacks) for each in taken if each.stacks) if path.is_file())
    latest = {(log.attempt, log.replica) for log in still.running}
    logs = [path for log, path in find_rank_logs(run).items() if (log.attempt, log.replica) in latest]
    logs += [path for attempt, replica in latest for _, path in private_files(run.nodes, replica, attempt)]
    early = tuple(early_exit_fact(exited, str(run.events)) for exited, _ in still.ended)
    # Each replica counts its ranks from 0, so that dumps of several cannot be compared.
    dumped = taken if len({each.replica for each in taken}) == 1 else []
    dumps = tuple(path for each in dumped for path in map(Path, each.flight_dumps) if path.is_file())
    summaries = [from_summary(each.rank, each.collectives) for each in dumped if each.collectives]
    answer = diagnose_logs(
        LogInput((*logs, *files, *dumps)), known=early, summaries=summaries, fabric=fabric, hide=hide
    )
    answer = with_standstill(answer, "; ".join(filter(None, (still.what, format_stacks(taken)))))
    if (compared := _compare(run, dumped)) is not None:
        answer = with_stacks(answer, compared, str(run.nodes))
    return without_evidence(answer, STACKS_EVIDENCE) if files else answer
