"""What `holdfast explain` knows, and how it is found."""

from __future__ import annotations

import signal
from itertools import chain

import pytest

from holdfast.diagnose.knowledge.index import FINDINGS_SOURCE, GROUPS, find, suggest
from holdfast.errors import ExitCode

ROWS = list(chain.from_iterable(GROUPS.values()))


@pytest.mark.parametrize(
    ("words", "codes"),
    [
        ("XID-79", ["XID-79"]),
        ("xid 79", ["XID-79"]),
        ("SXid 20034", ["SXID-20034"]),
        ("SIGBUS", ["SIGBUS"]),
        ("-7", ["SIGBUS"]),
        ("135", ["SIGBUS"]),
        ("137", ["SIGKILL"]),
        ("exitcode: -9", ["SIGKILL"]),
        ("ncclsystemerror", ["ncclSystemError"]),
        ("IBV_WC_RETRY_EXC_ERR", ["IBV_WC_RETRY_EXC_ERR"]),
        ("12", ["IBV_WC_RETRY_EXC_ERR"]),
        ("cudaErrorIllegalAddress", ["CUDA_ERROR_ILLEGAL_ADDRESS"]),
        ("802", ["CUDA_ERROR_SYSTEM_NOT_READY"]),
        ("rank-hung", ["rank-hung"]),
        ("80", ["holdfast-exit-80"]),
        ("2", ["holdfast-exit-2", "IBV_WC_LOC_QP_OP_ERR"]),
        ("oom-host", ["oom-host"]),
        ("flight-behind", ["flight-behind"]),
        ("NaN%", []),
        ("", []),
    ],
)
def test_words_find_what_they_name(words: str, codes: list[str]) -> None:
    assert [row.code for row in find(words)] == codes


def test_mistyped_code_is_offered() -> None:
    assert suggest("rank-hnug")[0] == "rank-hung"
    assert suggest("ncclSytemEror")[0] == "ncclSystemError"
    assert suggest("qqqqqqqqqqqq") == []


@pytest.mark.slow
def test_every_code_is_found_by_itself_and_said_once_in_its_group() -> None:
    assert [row.code for row in ROWS if {one.code for one in find(row.code)} != {row.code}] == []
    for rows in GROUPS.values():
        assert len({row.code for row in rows}) == len(rows)


def test_every_row_says_everything() -> None:
    texts = [(row.code, text) for row in ROWS for text in (row.cause, row.confirm, row.remedy, row.source)]
    assert [row for row in texts if not row[1] or row[1].strip() != row[1] or row[1].count("`") % 2] == []


def test_every_exit_code_of_holdfast_is_explained() -> None:
    for code in ExitCode:
        assert f"holdfast-exit-{code.value}" in {row.code for row in find(str(code.value))}


@pytest.mark.parametrize(("code", "same_as"), [("run-rank-killed", "rank-killed"), ("fabric-on-tcp", "tcp-fallback")])
def test_rule_that_stands_for_a_finding_is_explained_like_it(code: str, same_as: str) -> None:
    (row,), (other, *_) = find(code), find(same_as)
    assert row.cause == other.cause


def test_signals_that_end_a_process_with_a_core_are_explained() -> None:
    for one in (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSYS):
        assert [row.code for row in find(f"-{int(one)}")] == [one.name]


@pytest.mark.parametrize(
    ("code", "word"),
    [
        ("gpu-in-use", "ask them"),
        ("read-only-file-system", "rw"),
        ("disk-error", "server"),
        ("checkpoint-failed", "evidence"),
        ("data-worker-lost", "/dev/shm"),
    ],
)
def test_remedy_can_be_done_by_whoever_reads_it(code: str, word: str) -> None:
    rows = [row for row in find(code) if row.source == FINDINGS_SOURCE]
    assert [word in row.remedy for row in rows] == [True]
