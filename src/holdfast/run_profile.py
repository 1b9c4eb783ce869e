"""Profiles the steps of a live run, and keeps and summarises the traces of some ranks."""

from __future__ import annotations

import gzip
import shutil
import time
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import IO

from msgspec import Struct
from msgspec.structs import replace

from holdfast.controller_client import STEP_PROFILE, follow_request
from holdfast.errors import ExitCode, failure
from holdfast.events import ProfileRequested, StepCommitted, TraceKept
from holdfast.events.requests import MAX_TRACED_RANKS
from holdfast.findings import Finding, Owner, Severity
from holdfast.host.files import atomic_write, open_regular, private_opener
from holdfast.job.run_spec import LOCAL, RunSpec
from holdfast.launch import nsys
from holdfast.launch.nsys import NsysCommand
from holdfast.metrics.metric_catalog import has_requested
from holdfast.metrics.profiler_events import step_trace
from holdfast.metrics.rank_trace import RankTrace, UnreadableTrace, read_rank_trace
from holdfast.metrics.step_breakdown import step_breakdown
from holdfast.metrics.trace_merge import ClockOffset, clock_offsets, merged_trace
from holdfast.metrics.trace_summary import summary_lines
from holdfast.run_dir import TRACE_NAME, RunDir

MERGED_NAME = "merged.json.gz"
MAX_SNAPSHOT_BYTES = 1 << 30
"""Most bytes of an uncompressed snapshot of GPU memory."""


class StepProfile(Struct, frozen=True, kw_only=True):
    """The profile of a run's steps."""

    step: int
    """The last one of the profile."""
    breakdown: Mapping[str, float]
    """Mean seconds of each part of a step: of all ranks, or without a Session of those that kept a trace."""
    trace: Path | None = None
    """The merged trace; None if no rank kept one."""
    offsets: dict[int, ClockOffset]
    """Clock offsets of the ranks whose traces it holds."""
    summary: tuple[str, ...] = ()
    failures: tuple[str, ...] = ()
    """Why traces are missing."""
    memory: tuple[Path, ...] = ()
    """Snapshots of GPU memory, one for each rank that kept one."""
    memory_failures: tuple[str, ...] = ()
    """Why requested ones are missing."""

    @property
    def memory_finding(self) -> Finding | None:
        """That requested snapshots are missing; None if none is."""
        if not self.memory_failures:
            return None
        return Finding(
            code="memory-snapshot-unavailable",
            severity=Severity.WARNING,
            what="no rank kept a snapshot of its memory" if not self.memory else "some ranks kept no snapshot",
            evidence=self.memory_failures,
            remedy="On CPUs, `holdfast status` and `holdfast logs` show what a rank's memory does; "
            "request a snapshot of ranks that use a GPU.",
            owner=Owner.USER,
        )


def profile_steps(run: RunDir, *, ranks: Sequence[int] = (), memory: bool = False, timeout_s: float) -> StepProfile:
    """Have a run's ranks profile their next steps, and some of them keep a trace, and a snapshot of their GPU `memory`.

    Without `ranks` these are rank 0, the slowest and the fastest rank. Raises HoldfastError if no rank can profile, and
    if the profile or its traces are not there after `timeout_s` seconds.
    """
    _check_ranks(run, ranks)
    request = ProfileRequested(at=time.time(), ranks=tuple(sorted(set(ranks))), memory=memory)
    step: StepCommitted | None = None
    kept: list[TraceKept] = []
    for _, event in follow_request(run, request, STEP_PROFILE, timeout_s):
        if isinstance(event, StepCommitted) and has_requested(event.metrics):
            step = step or event
        elif isinstance(event, TraceKept):
            kept.append(event)
        if _is_complete(kept) and (step is not None or kept[0].step_clock):
            break
    snapshots, failures = _unpack_snapshots(run, kept)
    return replace(_merge(run, step, kept), memory=snapshots, memory_failures=failures)


def _unpack_snapshots(run: RunDir, kept: Iterable[TraceKept]) -> tuple[tuple[Path, ...], tuple[str, ...]]:
    """The snapshots of GPU memory without compression, as their viewer reads them, and why others are missing."""
    snapshots: list[Path] = []
    failures: list[str] = []
    for event in kept:
        problem = event.memory_failure
        if event.memory_file:
            try:
                snapshots.append(_unpack(run, event.memory_file))
            except (OSError, EOFError, zlib.error, ValueError) as error:
                problem = str(error)
        if problem:
            failures.append(f"rank {event.rank}: {problem}")
    return tuple(snapshots), tuple(failures)


def _unpack(run: RunDir, name: str) -> Path:
    """Unpack a file of the run's traces; its name comes from an agent."""
    if not TRACE_NAME.fullmatch(name.removeprefix("traces/")):
        raise ValueError(f"{name!r} is no name of a snapshot")
    packed_path = run.path / name
    with open_regular(packed_path) as packed, gzip.open(packed) as source:
        unpacked = source.read(MAX_SNAPSHOT_BYTES + 1)
    if len(unpacked) > MAX_SNAPSHOT_BYTES:
        raise ValueError(f"it has more than {MAX_SNAPSHOT_BYTES:,} bytes")
    plain = packed_path.with_name(f"memory-{packed_path.name.removesuffix('-memory.pickle.gz')}.pickle")
    atomic_write(plain, unpacked)
    return plain


def nsys_command_of(run: RunDir) -> NsysCommand:
    """The command by which ranks like those of a run are started under Nsight Systems.

    Raises HoldfastError if this machine would start them and has no `nsys`. Of an image that is not known.
    """
    accepted = RunSpec.read(run.job)
    is_here = accepted.target_kind == LOCAL
    if is_here and shutil.which(nsys.PROGRAM) is None:
        raise failure(
            "nsys-missing",
            f"there is no `{nsys.PROGRAM}` on this machine, where the ranks of {run.run_id} run",
            exit_code=ExitCode.CANNOT_RUN_HERE,
            where=run.run_id,
            remedy="Install Nsight Systems' command line, such as NVIDIA's package `nsight-systems-cli`.",
        )
    return nsys.nsys_command(accepted.job, accepted.base if is_here else "/tmp")


def _is_complete(kept: Sequence[TraceKept]) -> bool:
    """Whether the traces of every replica that keeps some have arrived."""
    expected = {event.replica: event.kept for event in kept}
    return bool(kept) and len(kept) >= sum(expected.values())


def _check_ranks(run: RunDir, ranks: Sequence[int]) -> None:
    world_size = RunSpec.read(run.job).job.world_size
    if len(ranks) > MAX_TRACED_RANKS:
        what = f"{len(ranks)} ranks were chosen, and at most {MAX_TRACED_RANKS} keep a trace"
    elif (wrong := next((rank for rank in ranks if not 0 <= rank < world_size), None)) is not None:
        what = f"{run.run_id} has the ranks 0 to {world_size - 1}, and not {wrong}"
    else:
        return
    raise failure("bad-ranks", what, exit_code=ExitCode.USAGE, where="--ranks", remedy="Choose other ranks.")


def _merge(run: RunDir, step: StepCommitted | None, kept: Sequence[TraceKept]) -> StepProfile:
    job = RunSpec.read(run.job).job
    traces: list[RankTrace] = []
    failures = [f"rank {event.rank}: {event.failure}" for event in kept if event.failure]
    written = sorted((event for event in kept if not event.failure), key=lambda event: (event.replica, event.rank))
    for event in written:
        rank = event.replica * job.replica_world_size + event.rank
        if event.step != written[0].step:  # without a Session the nodes agree on the steps only as a rule
            failures.append(f"rank {rank}: it profiled the steps to {event.step}, not to {written[0].step}; try again")
            continue
        try:
            traces.append(read_rank_trace(run.path / event.file, rank=rank, node=f"node{event.node}"))
        except (UnreadableTrace, OSError) as error:
            failures.append(f"rank {rank}: {error}")
    if not traces:
        if step is None:
            raise failure(
                "step-profile-unavailable",
                "no rank could profile its steps",
                exit_code=ExitCode.UNAVAILABLE,
                where=run.run_id,
                evidence=tuple(failures),
                remedy="Ask again while no other profiler is running in the ranks.",
            )
        return StepProfile(step=step.step, breakdown=step.metrics, offsets={}, failures=tuple(failures))
    path = (run.path / written[0].file).with_name(MERGED_NAME)
    offsets = clock_offsets(traces)
    part = path.with_suffix(".part")
    with open(part, "wb", opener=private_opener) as file:
        _write(file, traces, offsets)
    part.rename(path)
    summary: list[str] = []
    try:
        summary = summary_lines(traces)
    except ValueError as error:
        failures.append(str(error))
    return StepProfile(
        step=step.step if step else written[0].step,
        breakdown=step.metrics if step else _mean_breakdown(traces),
        trace=path,
        offsets=offsets,
        summary=tuple(summary),
        failures=tuple(failures),
    )


def _mean_breakdown(traces: Sequence[RankTrace]) -> dict[str, float]:
    """The mean of the traces' breakdowns; empty if one has no step."""
    try:
        found = [step_breakdown(step_trace(trace.events())) for trace in traces]
    except ValueError:  # the summary fails for the same reason
        return {}
    return {name: fmean(each[name] for each in found) for name in found[0]}


def _write(file: IO[bytes], traces: Sequence[RankTrace], offsets: dict[int, ClockOffset]) -> None:
    with gzip.GzipFile(fileobj=file, mode="wb", compresslevel=3, filename="", mtime=0) as compressed:
        for line in merged_trace(traces, offsets):
            compressed.write(line)
