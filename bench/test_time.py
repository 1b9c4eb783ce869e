"""Shows where the time of the tests goes, by directory: `python -m bench.test_time` after `make test` or `make quick`.

CPU seconds are those of the test's process and of all processes that were waited for: most, but not those that outlive
their parents.
"""

from __future__ import annotations

import argparse
import xml.etree.ElementTree as ET
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

REPORT = Path(".pytest_cache/report.xml")
"""What `make test` and `make quick` write."""

HEADER = """\
| directory | quick tests | CPU s | wall s | slow tests | CPU s | wall s |
| --- | ---: | ---: | ---: | ---: | ---: | ---: |"""


@dataclass(frozen=True, kw_only=True)
class TestTime:
    """How long one test took, its fixtures included."""

    __test__ = False
    name: str
    slow: bool
    cpu_s: float
    wall_s: float


def read(report: Path) -> Iterator[TestTime]:
    """Every test of a JUnit report; one that was interrupted has no name there."""
    for case in ET.parse(report).iterfind(".//testcase[@classname]"):
        known = {each.get("name"): each.get("value", "") for each in case.iter("property")}
        yield TestTime(
            name=f"{case.get('classname')}.{case.get('name')}",
            slow=known.get("slow") == "True",
            cpu_s=float(known.get("cpu_s", 0)),
            wall_s=float(case.get("time", 0)),
        )


def directory(test: TestTime) -> str:
    """`tests/train` for all below it; `tests` for the files directly in it."""
    _, first, *_ = test.name.partition("[")[0].split(".")
    return "tests" if first.startswith("test_") else f"tests/{first}"


def table(tests: Iterable[TestTime]) -> str:
    """A row for each directory, the one with most CPU seconds first, and their sum."""
    rows: defaultdict[str, list[TestTime]] = defaultdict(list)
    for test in tests:
        rows[directory(test)].append(test)
    ordered = sorted(rows.items(), key=lambda row: -sum(test.cpu_s for test in row[1]))
    everything = [test for row in rows.values() for test in row]
    return "\n".join([HEADER, *(_row(name, row) for name, row in [*ordered, ("all", everything)])])


def _row(name: str, tests: list[TestTime]) -> str:
    cells = [name]
    for slow in (False, True):
        chosen = [test for test in tests if test.slow is slow]
        cpu_s, wall_s = sum(test.cpu_s for test in chosen), sum(test.wall_s for test in chosen)
        cells += [f"{len(chosen):,}", f"{cpu_s:,.0f}", f"{wall_s:,.0f}"]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Print the table and the most expensive tests."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("report", type=Path, nargs="*", default=[REPORT], help="JUnit reports (pytest --junitxml)")
    parser.add_argument("--top", type=int, default=20, help="how many of the most expensive tests to list")
    args = parser.parse_args()
    tests = [test for report in args.report for test in read(report)]
    print(table(tests))
    for test in sorted(tests, key=lambda test: -test.cpu_s)[: args.top]:
        print(f"{test.cpu_s:6.1f} CPU s {test.wall_s:6.1f} s  {test.name}")


if __name__ == "__main__":
    main()
