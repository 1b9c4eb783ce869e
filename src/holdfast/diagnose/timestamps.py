"""Parses the times of lines, and guesses the year where a line has none."""

from __future__ import annotations

import calendar
import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from statistics import median_low

from msgspec import Struct
from msgspec.structs import replace

from holdfast.diagnose.fact import Fact

HEAD_CHARS = 400
"""How many bytes at the start of a line can hold its time."""

# 2026-11-20T10:00:00.123Z   2026-11-20 10:00:00,123   [2026-11-20 10:00:00]   2026/11/20 10:00:00
_ISO = re.compile(
    r"(?P<y>20\d\d)[-/](?P<mo>\d\d)[-/](?P<d>\d\d)[T ](?P<h>\d\d):(?P<mi>\d\d):(?P<s>\d\d)(?P<f>[.,]\d{1,9})?"
    r"(?P<zone>Z|[+-]\d\d:?\d\d)?"
)
# [E1120 10:00:00.123456 ...   E0801 12:34:56.789000 1234 file.py:1]            glog; it says no year
_GLOG = re.compile(
    r"(?:^|[\s\[\]:])[DIWEFC](?P<mo>\d\d)(?P<d>\d\d) (?P<h>\d\d):(?P<mi>\d\d):(?P<s>\d\d)(?P<f>\.\d{1,9})?"
)
# Nov 20 10:00:00 n1 kernel:      [Thu Nov 20 10:00:00 2026]                    syslog, dmesg -T
_MONTH = re.compile(
    r"(?P<mon>Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec) +(?P<d>\d{1,2}) (?P<h>\d\d):(?P<mi>\d\d):(?P<s>\d\d)"
    r"(?: (?P<y>20\d\d))?"
)
_MONTHS = {name: number for number, name in enumerate(calendar.month_abbr) if name}
_TIME, _TIMESTAMP_BYTES, _LOOKBACK_BYTES = re.compile(rb"\d\d:\d\d:\d\d"), 20, 8 << 10


class Timestamp(Struct, frozen=True):
    """The time that a line itself gives; a time without zone counts as UTC, one without year as the last such day.

    Only differences between such times are ever used.
    """

    at: float
    """Seconds since the epoch."""
    has_year: bool
    """Whether the line gives the year."""


def parse_timestamp(line: str) -> Timestamp | None:
    """The time that a line gives; None for a line without one."""
    head = line[:HEAD_CHARS]
    found = _ISO.search(head) or _GLOG.search(head) or _MONTH.search(head)
    if found is None:
        return None
    groups = found.groupdict()
    month = _MONTHS[groups["mon"]] if groups.get("mon") else int(groups["mo"])
    now = datetime.now(UTC)
    year = int(groups["y"]) if groups.get("y") else now.year
    try:
        moment = datetime(
            year, month, int(groups["d"]), int(groups["h"]), int(groups["mi"]), int(groups["s"]), tzinfo=UTC
        )
        if not groups.get("y") and moment > now + timedelta(days=1):
            moment = moment.replace(year=year - 1)
    except ValueError:
        return None
    fraction = float(f"0.{groups['f'][1:]}") if groups.get("f") else 0.0
    return Timestamp(moment.timestamp() + fraction - _offset_s(groups.get("zone")), has_year=bool(groups.get("y")))


def timestamp_above(data: bytes, start: int) -> Timestamp | None:
    """The time of the nearest line with one above `start`, no further up than a long traceback begins."""
    begin = max(0, start - _LOOKBACK_BYTES)
    for found in reversed(list(_TIME.finditer(data, begin, start))):
        line = data[data.rfind(b"\n", begin, found.start()) + 1 : found.end() + _TIMESTAMP_BYTES]
        if (clock := parse_timestamp(line.decode("latin-1"))) is not None:
            return clock
    return None


def _offset_s(zone: str | None) -> float:
    if not zone or zone == "Z":
        return 0.0
    digits = zone[1:].replace(":", "")
    return (1 if zone[0] == "+" else -1) * (int(digits[:2]) * 3600 + int(digits[2:]) * 60)


def infer_years(facts: Sequence[Fact]) -> list[Fact]:
    """The facts; those without a year get the year that brings them closest to those with one."""
    dated = [
        at
        for fact in facts
        if fact.has_year and (at := fact.at_of_previous_line if fact.at is None else fact.at) is not None
    ]
    if not dated:
        return list(facts)
    around = median_low(dated)
    return [
        fact
        if fact.has_year
        else replace(
            fact, at=_closest_year(fact.at, around), at_of_previous_line=_closest_year(fact.at_of_previous_line, around)
        )
        for fact in facts
    ]


def _closest_year(at: float | None, around: float) -> float | None:
    if at is None:
        return None
    moment, year = datetime.fromtimestamp(at, UTC), datetime.fromtimestamp(around, UTC).year
    if (moment.month, moment.day) == (2, 29):
        return at
    years = (moment.replace(year=each).timestamp() for each in (year - 1, year, year + 1))
    return min(years, key=lambda each: abs(each - around))
