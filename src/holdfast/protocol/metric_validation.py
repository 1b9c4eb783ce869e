"""Checks a step's metrics one by one: in a session before it sends them, and in the agent that receives them.

One metric that no event can hold is dropped alone, and never costs the step or the other metrics.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from holdfast.events.encoding import escape_surrogates
from holdfast.findings import Finding, Severity
from holdfast.protocol.validation import MAX_METRIC_NAME, MAX_METRICS

MAX_REPORTED_NAMES = 16
"""Number of dropped metric names reported per rank; a program may make up a new name in every step."""
SHOWN_NAME_CHARACTERS = 48


def split_valid_metrics(metrics: Mapping[Any, Any]) -> tuple[dict[str, float], dict[str, str]]:
    """The metrics that an event can hold, and by name why each other one is dropped."""
    valid: dict[str, float] = {}
    dropped: dict[str, str] = {}
    for name, value in metrics.items():
        if reason := invalid_name_reason(name) or _invalid_value_reason(value):
            dropped[str(name)] = reason
        else:
            valid[name] = float(value)
    kept, excess = limit_metric_count(valid)
    return kept, dropped | excess


def limit_metric_count(metrics: dict[str, float]) -> tuple[dict[str, float], dict[str, str]]:
    """As many metrics as a step can have, and by name why the others are dropped."""
    if len(metrics) <= MAX_METRICS:
        return metrics, {}
    left = iter(metrics.items())
    return dict(islice(left, MAX_METRICS)), {name: f"a step can have {MAX_METRICS} metrics" for name, _ in left}


def invalid_name_reason(name: object) -> str:
    """Why a metric cannot have this name; empty when it can."""
    if not isinstance(name, str):
        return f"its name is of type {type(name).__name__}, not str"
    if len(name) > MAX_METRIC_NAME:
        return f"its name has {len(name):,} characters, of {MAX_METRIC_NAME} allowed"
    if name != escape_surrogates(name):
        return "its name is not valid Unicode"
    return ""


def _invalid_value_reason(value: object) -> str:
    if isinstance(value, float):
        return "" if math.isfinite(value) else f"its value is {value}"
    if isinstance(value, int):
        return "" if abs(value) < 2**1023 else "its value is too large for a float"
    return f"its value is of type {type(value).__name__}, not a number"


class DroppedMetrics:
    """Reports the metrics of one rank that were dropped: each name once, and only the first names of many."""

    def __init__(self, who: str) -> None:
        self._who = who
        self._named: set[str] = set()

    @property
    def limit_reached(self) -> bool:
        """Whether no further name is reported."""
        return len(self._named) > MAX_REPORTED_NAMES

    def report(self, step: int, dropped: Mapping[str, str]) -> Iterator[Finding]:
        """The findings for a step's dropped metrics."""
        for name, reason in dropped.items():
            if self.limit_reached:
                return
            shown = _shown(name)
            if shown in self._named:
                continue
            self._named.add(shown)
            more = "; further ones are dropped without a finding" if self.limit_reached else ""
            yield Finding(
                code="metric-dropped",
                severity=Severity.WARNING,
                what=f"metric {shown} of step {step} was dropped: {reason}{more}",
                where=f"{self._who}, metric {shown}",
                remedy=f"Pass one finite number, under a name of at most {MAX_METRIC_NAME} characters, and at most "
                f"{MAX_METRICS} metrics in a step. The step and its other metrics count.",
            )


def _shown(name: str) -> str:
    """A name in ASCII, cut; names that look alike are reported as one."""
    cut = name[:SHOWN_NAME_CHARACTERS]
    return f"{cut!a}{'...' if len(name) > len(cut) else ''}"
