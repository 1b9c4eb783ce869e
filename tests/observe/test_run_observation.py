"""What is exported of a run follows from its events, whatever they are."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from functools import reduce
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from starlette.requests import Request
from tests.observe.test_alerts import SCENARIOS

from holdfast.events import (
    AnyEvent,
    AttemptStarted,
    CheckpointCommitted,
    NodeChecked,
    NodeRequested,
    RunCreated,
    StepCommitted,
)
from holdfast.events.log import EventReader, encode_line
from holdfast.findings import CheckResult, Finding
from holdfast.observe.exposition import format_metrics
from holdfast.observe.live_readings import LiveReadings, LogLag
from holdfast.observe.metrics_endpoint import MetricsEndpoint
from holdfast.observe.observed_log import MAX_EVENTS_AT_ONCE, ObservedLog
from holdfast.observe.run_observation import Histogram, RunObservation, observe_event
from holdfast.report.run_record import record_run

RUN = (("run", "r-1"),)
OPENMETRICS = "application/openmetrics-text; version=1.0.0"


def scrapes(events: list[AnyEvent]) -> Iterator[dict[tuple[str, tuple[tuple[str, str], ...]], float]]:
    """The samples after each event, parsed by the library's own strict parser."""
    known = RunObservation()
    for event in events:
        known = observe_event(known, event)
        text, _ = format_metrics({"r-1": known}, now=event.at, accept=OPENMETRICS)
        yield {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in text_string_to_metric_families(text.decode())
            for sample in family.samples
        }


@pytest.mark.parametrize("name", ["HoldfastRestartsLooping", "HoldfastGpuFault", "HoldfastDegraded"])
def test_counters_never_fall_and_time_adds_up(name: str) -> None:
    before: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
    for samples in scrapes(SCENARIOS[name].events):
        for key, value in before.items():
            if key[0].endswith(("_total", "_bucket", "_count")):
                assert samples[key] >= value, key
        first, last = (samples[f"holdfast_run_{name}_timestamp_seconds", RUN] for name in ("created", "last_event"))
        spent = sum(value for (metric, _), value in samples.items() if metric == "holdfast_run_time_seconds")
        assert spent == pytest.approx(last - first, abs=1e-3)
        before = samples


def test_steps_that_share_a_line_count_each() -> None:
    event = StepCommitted(
        at=9, replica=0, attempt=0, step=10, steps=10, started=0.0, ended=4.0, metrics={"tokens": 100.0}
    )
    known = observe_event(RunObservation(), event)
    assert (sum(known.step_times[0].counts), known.step_times[0].total, known.tokens[0]) == (10, 4.0, 1000.0)


def test_wait_for_the_first_nodes_grows_until_they_have_joined_and_stays() -> None:
    def started(at: float, attempt: int) -> AttemptStarted:
        return AttemptStarted(
            at=at, replica=0, attempt=attempt, world_size=1, master_addr="a", master_port=1, nodes=(0,)
        )

    events: list[AnyEvent] = [
        RunCreated(at=100.0, run="r-1", job={}),
        NodeRequested(at=130.0, node=0, generation=0),
        started(400.0, 0),
        started(900.0, 1),
    ]
    waited = [samples["holdfast_run_wait_seconds", RUN] for samples in scrapes(events)]
    assert waited == [0.0, 30.0, 300.0, 300.0]


def test_last_verdict_on_each_node_counts() -> None:
    failed = CheckResult(check="disk", findings=(Finding(code="disk-full", what="no room"),))
    events: list[AnyEvent] = [
        RunCreated(at=1.0, run="r-1", job={}),
        NodeChecked(at=2.0, node=0, generation=0),
        NodeChecked(at=2.0, node=1, generation=0, results=(failed,)),
        NodeChecked(at=9.0, node=1, generation=1),
    ]
    key = [("holdfast_run_checked_nodes", (*RUN, ("verdict", verdict))) for verdict in ("passed", "failed")]
    found = [tuple(samples[each] for each in key) for samples in scrapes(events)]
    assert found == [(0, 0), (1, 0), (1, 1), (2, 0)]


def test_size_of_the_last_checkpoint_is_exported_if_its_event_has_it() -> None:
    events: list[AnyEvent] = [
        CheckpointCommitted(at=at, node=0, replica=0, attempt=0, step=1, path="c", size_bytes=size_bytes)
        for at, size_bytes in ((2.0, 0), (3.0, 7_000_000_000_000))
    ]
    found = [samples.get(("holdfast_run_checkpoint_size_bytes", RUN)) for samples in scrapes(events)]
    assert found == [None, 7e12]


def test_bounds_of_a_class_are_inclusive() -> None:
    found = Histogram.empty((1.0, 2.0)).plus(1.0).plus(1.5).plus(7.0)
    assert found.buckets() == [("1.0", 1), ("2.0", 2), ("+Inf", 3)]


def test_log_is_read_in_parts_and_only_once(tmp_path: Path) -> None:
    log, seen = tmp_path / "events.jsonl", list[AnyEvent]()
    events = SCENARIOS["HoldfastCheckpointOld"].events * 5
    log.write_bytes(b"".join(map(encode_line, events)))
    observed = ObservedLog(EventReader(log), seen.append)

    async def read_beside() -> list[int]:
        """How far it was whenever another task got the thread."""
        found: list[int] = []
        reading = asyncio.ensure_future(observed.read())
        while not reading.done():
            await asyncio.sleep(0)
            found.append(len(seen))
        return found

    assert MAX_EVENTS_AT_ONCE in asyncio.run(read_beside())
    assert len(seen) == len(events)
    asyncio.run(observed.read())
    assert len(seen) == len(events)


def test_log_that_begins_again_counts_once() -> None:
    events = SCENARIOS["HoldfastRestartsLooping"].events
    assert reduce(observe_event, events * 2, RunObservation()) == reduce(observe_event, events, RunObservation())
    once, twice = record_run(events, "r-1"), record_run(events * 2, "r-1")
    assert [len(curve) for curve in twice.curves.values()] == [len(curve) for curve in once.curves.values()]
    assert twice.marks == once.marks


def test_only_a_controller_exports_the_lag_of_its_log(tmp_path: Path) -> None:
    log = tmp_path / "events.jsonl"
    log.write_bytes(b"".join(map(encode_line, SCENARIOS["HoldfastDegraded"].events)))
    lag = LogLag(unwritten_s=2.5, unreplicated_s=None)
    for live, shown in ((None, []), (lambda: LiveReadings(log_lag=lag), [b"2.5"])):
        endpoint = MetricsEndpoint(lambda: {"r-1": log}, live)
        answer = asyncio.run(endpoint.answer(Request({"type": "http", "headers": []})))
        assert re.findall(rb"^holdfast_run_log_un\w+\{.*\} (.*)$", bytes(answer.body), re.MULTILINE) == shown


def test_run_that_cannot_be_read_leaves_the_others(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.jsonl", tmp_path / "bad.jsonl"
    good.write_bytes(b"".join(map(encode_line, SCENARIOS["HoldfastRunFailed"].events)))
    bad.mkdir()
    endpoint = MetricsEndpoint(lambda: {"r-1": good, "r-2": bad})
    answer = asyncio.run(endpoint.answer(Request({"type": "http", "headers": []})))
    assert b'holdfast_run_phase{phase="failed",run="r-1"} 1.0' in bytes(answer.body)
    assert b"r-2" not in bytes(answer.body)
