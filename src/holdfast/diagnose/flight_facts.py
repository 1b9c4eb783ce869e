"""Turns verdicts on flight recorder dumps into facts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from holdfast.diagnose.fact import Fact, ProcessRef
from holdfast.diagnose.flight_verdict import hang_verdicts
from holdfast.diagnose.rules.hang_records import FLIGHT_RULES
from holdfast.diagnose.structured.flight_recorder import FlightDump


def flight_facts(dumps: Sequence[FlightDump]) -> Iterator[Fact]:
    """The facts of several ranks' dumps."""
    for verdict in hang_verdicts(dumps):
        yield Fact(
            rule=FLIGHT_RULES[verdict.kind],
            source=verdict.source,
            line=0,
            text=verdict.text,
            process=ProcessRef(rank=verdict.rank),
            at=verdict.at,
            values={"group": verdict.group, "seq": str(verdict.seq), "op": verdict.op},
        )
