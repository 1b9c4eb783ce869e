"""Runs one diagnosis: reads the input once, finds facts, and derives the diagnosis from them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import chain

from msgspec.structs import replace

from holdfast.diagnose.diagnosis import Diagnosis, OtherRun
from holdfast.diagnose.diagnosis_text import as_evidence
from holdfast.diagnose.fact import Fact
from holdfast.diagnose.flight_facts import flight_facts
from holdfast.diagnose.gc_tuning import infrequent_gc
from holdfast.diagnose.log_chunk import LogChunk
from holdfast.diagnose.log_input import LogInput
from holdfast.diagnose.nccl_transport import SetupLogReader, is_fabric_ok
from holdfast.diagnose.nccl_transport import to_facts as transport_facts
from holdfast.diagnose.root_cause_analysis import diagnose_facts
from holdfast.diagnose.run_boundaries import is_failure, split_into_runs
from holdfast.diagnose.scanner import Scanner
from holdfast.diagnose.structured import json_lines
from holdfast.diagnose.structured.flight_recorder import FlightDump
from holdfast.diagnose.timestamps import infer_years
from holdfast.fabric.fabric import Fabric

MAX_OTHER_RUNS = 6
"""The most other runs of an input that a diagnosis lists."""


@infrequent_gc()
def diagnose(
    logs: LogInput,
    *,
    known: Sequence[Fact] = (),
    quoted: Iterable[LogChunk] = (),
    summaries: Sequence[FlightDump] = (),
    first_rank: int | None = None,
    fabric: Fabric | None = None,
    hide: Callable[[str], str] | None = None,
) -> Diagnosis:
    """Diagnoses the run whose logs are the input.

    `known` is what the run's own event log shows, with the rank that failed first, `quoted` the lines of ranks in it,
    and `summaries` what it shows of flight recorders; `fabric` is the job's intended fabric, where known; `hide`
    replaces secrets in a line before it is cut.
    """
    scanner, reading = Scanner(logs.budget, hide, is_large=logs.is_large()), SetupLogReader()
    facts: list[Fact] = [*known]
    ranks: set[int] = set()
    for block in chain.from_iterable(map(json_lines.to_plain_lines, chain(logs.chunks(), quoted))):
        if block.source.rank is not None:
            ranks.add(block.source.rank)
        facts += scanner.feed(block)
        if scanner.has_nccl_setup:
            reading.feed(block)
    # What an event says of a rank's recorders is a part of their dumps.
    dumps = [*logs.dumps.dumps]
    dumps += [dump for dump in summaries if dump.rank not in {each.rank for each in logs.dumps.dumps}]
    facts += flight_facts(dumps)
    ranks.update(dump.rank for dump in dumps)
    transport = reading.result(fabric) if reading.info_lines else None
    if transport is not None:
        facts += transport_facts(transport, expected_known=fabric is not None)
    facts = infer_years(facts)
    sound, ranks_with_logs = transport is not None and is_fabric_ok(transport), frozenset(ranks)
    notes = (*logs.notes, *_left_out(scanner, reading))
    # The event log's entries on one attempt belong to one run, whatever its clocks say.
    runs = [facts] if known else split_into_runs(facts)
    found = _diagnose_last_run(
        runs,
        scanner.counts,
        lambda facts, counts: diagnose_facts(
            facts,
            counts=counts,
            ranks_with_logs=ranks_with_logs,
            first_rank=first_rank,
            fabric_verified=sound,
            has_nccl_setup=transport is not None,
            notes=notes,
        ),
    )
    return replace(found, transport=transport)


def _left_out(scanner: Scanner, reading: SetupLogReader) -> Iterator[str]:
    """Notes on what exceeded the limits."""
    for count, kind in ((scanner.left_out, "matched lines"), (reading.left_out, "lines of NCCL's set-up")):
        if count:
            yield f"left out: {count:,} {kind}, over the limit; diagnose fewer files together"


def diagnose_chunks(chunks: Iterable[LogChunk]) -> Diagnosis:
    """The facts of single lines, for chunks already in memory."""
    scanner, set_up = Scanner(), False
    facts: list[Fact] = []
    for block in chain.from_iterable(map(json_lines.to_plain_lines, chunks)):
        facts += scanner.feed(block)
        set_up |= scanner.has_nccl_setup
    return _diagnose_last_run(
        split_into_runs(infer_years(facts)),
        scanner.counts,
        lambda facts, counts: diagnose_facts(facts, counts=counts, has_nccl_setup=set_up),
    )


def _diagnose_last_run(
    runs: Sequence[Sequence[Fact]],
    counts: Mapping[str, int],
    diagnose_run: Callable[[Sequence[Fact], Mapping[str, int]], Diagnosis],
) -> Diagnosis:
    """The diagnosis of the last failed run, with one line for each other run."""
    failed = [run for run in runs if any(map(is_failure, run))] or runs[-1:]
    found = diagnose_run(failed[-1], counts if len(runs) == 1 else Counter(fact.rule.code for fact in failed[-1]))
    others = tuple(_other_run(run, diagnose_run(run, counts)) for run in failed[:-1][-MAX_OTHER_RUNS:])
    notes = found.notes
    if others:
        notes = (
            f"by clocks and launchers the input has {len(failed)} runs that failed; this is about the last",
            *notes,
        )
    if runs[-1] is not failed[-1]:
        first = as_evidence(runs[-1][0])
        notes = (f"a run that began after it, at {first.where}, shows no failure so far", *notes)
    return replace(found, other_runs=others, notes=notes)


def _other_run(facts: Sequence[Fact], found: Diagnosis) -> OtherRun:
    """How another run ended."""
    first = found.evidence[0] if found.evidence else as_evidence(facts[0])
    at = next((fact.at or fact.at_of_previous_line for fact in facts if as_evidence(fact) == first), None)
    ended_at = f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M:%S}" if at is not None else ""
    return OtherRun(
        what=found.what, failure_class=found.failure_class, confidence=found.confidence, ended_at=ended_at, first=first
    )
