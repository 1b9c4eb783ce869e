"""The table of where the tests' time goes, from a JUnit report."""

from __future__ import annotations

from pathlib import Path

from bench.test_time import read, table

REPORT = """<testsuites><testsuite>
<testcase classname="tests.runs.test_mpi" name="test_a[x.y]" time="8.5"><properties>
<property name="cpu_s" value="2.4"/><property name="slow" value="True"/></properties></testcase>
<testcase classname="tests.test_clock" name="test_b" time="0.5"><properties>
<property name="cpu_s" value="1"/><property name="slow" value="False"/></properties></testcase>
<testcase name="interrupted" time="0"/>
</testsuite></testsuites>"""


def test_time_of_a_report_is_summed_by_directory_and_speed(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(REPORT)
    assert table(read(report)).splitlines()[2:] == [
        "| tests/runs | 0 | 0 | 0 | 1 | 2 | 8 |",
        "| tests | 1 | 1 | 0 | 0 | 0 | 0 |",
        "| all | 1 | 1 | 0 | 1 | 2 | 8 |",
    ]
