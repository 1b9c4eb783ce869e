"""The text that Prometheus reads of runs: OpenMetrics, or its older format where a scraper asks for that."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from functools import reduce
from pathlib import Path

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from holdfast.events.log import EventReader
from holdfast.observe.exported_metrics import EXPORTED, PREFIX, ExportedMetric, Kind
from holdfast.observe.run_observation import Histogram, RunObservation, observe_event


class _Runs(Collector):
    def __init__(self, runs: Mapping[str, RunObservation], now: float) -> None:
        self._runs = runs
        self._now = now

    def collect(self) -> Iterable[Metric]:
        """All metrics that any of the runs has."""
        for row in EXPORTED:
            family = _family(row)
            for run, known in self._runs.items():
                for labels, value in row.read(known, self._now):
                    _add(family, (run, *labels), value)
            if family.samples:
                yield family


def format_metrics(runs: Mapping[str, RunObservation], *, now: float, accept: str = "") -> tuple[bytes, str]:
    """The metrics of runs by id, and their content type, in the format that an `Accept` header prefers.

    `now` is in Unix seconds.
    """
    encode, content_type = choose_encoder(accept)
    return encode(_Runs(runs, now)), content_type


def format_log_metrics(run: str, log: Path) -> str:
    """The metrics of the run that has this event log, now."""
    known = reduce(observe_event, EventReader(log).read(), RunObservation())
    text, _ = format_metrics({run: known}, now=time.time())
    return text.decode()


def _family(row: ExportedMetric) -> Metric:
    name, labels = PREFIX + row.name, ("run", *row.labels)
    match row.kind:
        case Kind.COUNTER:
            return CounterMetricFamily(name, row.help, labels=labels)
        case Kind.GAUGE:
            return GaugeMetricFamily(name, row.help, labels=labels, unit=row.unit)
        case Kind.HISTOGRAM:
            return HistogramMetricFamily(name, row.help, labels=labels, unit=row.unit)
        case Kind.INFO:
            return InfoMetricFamily(name, row.help, labels=labels)


def _add(family: Metric, labels: tuple[str, ...], value: float | Histogram) -> None:
    match family:
        case HistogramMetricFamily() if isinstance(value, Histogram):
            family.add_metric(labels, buckets=value.buckets(), sum_value=value.total)
        case InfoMetricFamily():
            family.add_metric(labels, {})
        case CounterMetricFamily() | GaugeMetricFamily() if not isinstance(value, Histogram):
            family.add_metric(labels, value)
        case _:
            raise TypeError(family)
