"""What the scanner finds in lines, and what it keeps of them."""

from __future__ import annotations

import pytest
from tests.diagnose.log_lines import chunk

from holdfast.diagnose.line_prefix import parse_process
from holdfast.diagnose.log_chunk import LogChunk, LogSource
from holdfast.diagnose.rules import RULES
from holdfast.diagnose.scanner import LINE_BYTES, MAX_FACTS_PER_RULE, VALUE_BYTES, Scanner
from holdfast.diagnose.timestamps import parse_timestamp

HIT = "n1:8:9 [0] NCCL WARN Accept failed: Too many open files"


def test_each_quoted_line_is_found_among_others() -> None:
    quoted = [(rule, line) for rule in RULES.values() for line in rule.matches.values()]
    for rule, line in quoted:
        found = list(Scanner().feed(chunk("before", line, "after")))
        codes = {fact.rule.code for fact in found}
        assert rule.code in codes or (rule.fallback and codes), (rule.code, line)
        assert {fact.line for fact in found} == {2}, (rule.code, line)


def test_many_alike_are_kept_a_few_times_and_all_counted() -> None:
    scanner = Scanner()
    found = list(scanner.feed(chunk(*[HIT] * 1000)))
    assert len(found) == MAX_FACTS_PER_RULE
    assert scanner.counts["too-many-open-files"] == 1000


def test_long_lines_and_values_are_kept_in_part() -> None:
    (fact,) = Scanner().feed(chunk(f"ValueError: {'x' * 60_000}"))
    assert len(fact.values["message"]) == VALUE_BYTES
    assert len(fact.text) <= LINE_BYTES + len(" ... ")


def test_colours_and_progress_bars_hide_nothing() -> None:
    line = "\x1b[31mn1:8:9 [0] NCCL WARN Accept failed: Too \x1b[1mmany open files\x1b[0m"
    assert [fact.rule.code for fact in Scanner().feed(chunk(f"10%\r20%\r{line}"))] == ["too-many-open-files"]


def test_bytes_that_are_no_text_do_no_harm() -> None:
    data = b"\xff\xfe\x80 torn \xe2\x82\n" + HIT.encode() + b" \xc3\n"
    (fact,) = Scanner().feed(LogChunk(source=LogSource(name="x"), first_line=1, data=data))
    assert fact.line == 2


@pytest.mark.parametrize(
    ("line", "rank", "host", "pid"),
    [
        ("n1:811:990 [3] NCCL INFO x", None, "n1", 811),
        ("2026-11-20T10:00:00.123Z [2026-11-20 10:00:00] gpu-7:811:990 [3] init.cc:5 NCCL WARN x", None, "gpu-7", 811),
        ("[rank3]:[E1120 10:00:00.1 ProcessGroupNCCL.cpp:607] [Rank 3] Watchdog", 3, None, None),
        ("[1,5]<stderr>:n1:811:990 [3] NCCL INFO x", 5, "n1", 811),
        ("3: ValueError: x", 3, None, None),
        ("[pod/worker-3/main] ValueError: x", None, None, None),
        ("(RayWorker pid=811, ip=10.0.0.3) ValueError", None, "10.0.0.3", 811),
        ("worker-1: ValueError: x", None, "worker-1", None),
        ("Nov 20 10:00:00 n1 kernel: NVRM: Xid", None, "n1", None),
        ("[PG ID 0 PG GUID 0(default_pg) Rank 7] x", 7, None, None),
    ],
)
def test_prefix_says_who_wrote(line: str, rank: int | None, host: str | None, pid: int | None) -> None:
    who = parse_process(line, LogSource(name="x"))
    assert (who.rank, who.host, who.pid) == (rank, host, pid)


@pytest.mark.parametrize(
    ("line", "rank"),
    [
        ("[rank3]: ValueError: x", 3),
        ("[default3]:[rank3]: ValueError: x", 3),
        ("2026-11-20T10:00:05.5Z [rank3]: ValueError: x", 3),
        ("ValueError: x", 0),
        ("ValueError: see [rank3]: x", 0),
        ("[Rank 3] is waited for", 0),
    ],
)
def test_own_prefix_says_more_than_a_files_name(line: str, rank: int) -> None:
    """A launcher's file bears the number of the node, or of its first rank."""
    assert parse_process(line, LogSource(name="rank-0.log", rank=0)).rank == rank


@pytest.mark.parametrize(
    "line",
    [
        "2026-11-20T10:00:05.5Z x",
        "2026-11-20 10:00:05,500 INFO x",
        "[2026-11-20 10:00:05.5] n1:1:2 [0] NCCL WARN",
        "2026-11-20T11:00:05.500+01:00 stdout F x",
    ],
)
def test_clocks_of_all_forms_agree(line: str) -> None:
    clock = parse_timestamp(line)
    assert clock is not None
    assert clock.at == 1795168805.5
