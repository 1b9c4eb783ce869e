"""NCCL warnings: every warning of every version has a rule, or states itself that nothing fails by it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import re2
from tests.diagnose.log_lines import diagnose_lines

from holdfast.diagnose.failure_classes import Confidence, FailureClass
from holdfast.diagnose.rules import RULES
from holdfast.diagnose.rules.nccl import NOT_FATAL_PATTERN
from holdfast.diagnose.run_context import nothing_failed

WARNINGS = [
    tuple(row.split("\t"))
    for row in Path(__file__).with_name("nccl_warnings.tsv").read_text().splitlines()
    if not row.startswith(("#", "file\t"))
]
_FILLING = {"s": "foo", "p": "0x7f12ab00", "x": "1a000", "X": "1A000", "c": "x", "f": "1.5", "m": "Invalid argument"}


def line_of(file: str, form: str) -> str:
    """A line as NCCL writes it by a format, with something in the place of its values."""
    said = re.sub(r"%[-#0-9.*+ ]*(?:hh|h|ll|l|z|j|t)?([a-zA-Z])", lambda spot: _FILLING.get(spot[1], "3"), form)
    return f"[2026-11-20 10:00:00] n1:811:990 [3] {file}:123 NCCL WARN {said}"


def test_every_warning_of_every_version_is_quoted_or_says_that_it_continues() -> None:
    assert len(WARNINGS) > 600
    silent: list[str] = []
    for file, _, _, form in WARNINGS:
        answer = diagnose_lines(line_of(file, form))
        if not answer.evidence:
            silent.append(form)
        elif answer.failure_class is FailureClass.UNKNOWN:
            assert answer.next_evidence, form
            assert any(each.distinguishes for each in answer.next_evidence), form
    assert [form for form in silent if not re2.search(NOT_FATAL_PATTERN, form)] == []
    assert len(silent) < 40


UNHEARD = "n1:811:990 [3] grommet.cc:12 NCCL WARN the grommet has come off"


def test_warning_that_nobody_knows_is_the_evidence_and_no_cause() -> None:
    answer = diagnose_lines(UNHEARD)
    assert answer.failure_class is FailureClass.UNKNOWN
    assert [each.text for each in answer.evidence] == [UNHEARD]
    assert answer.next_evidence


@pytest.mark.parametrize(
    ("file", "failure_class"),
    [
        ("transport/net_ib.cc", FailureClass.NETWORK_LOSS),
        ("ibvwrap.c", FailureClass.RDMA_DEVICE_MISSING),
        ("misc/socket.cc", FailureClass.FIREWALL),
        ("graph/topo.cc", FailureClass.OTHER),
        ("misc/shmutils.cc", FailureClass.SHM_TOO_SMALL),
        ("plugin/net.cc", FailureClass.VERSION_MISMATCH),
    ],
)
def test_part_of_nccl_that_warns_says_between_what_to_look(file: str, failure_class: FailureClass) -> None:
    answer = diagnose_lines(UNHEARD.replace("grommet.cc", file))
    assert failure_class in {each for missing in answer.next_evidence for each in missing.distinguishes}


def test_warning_that_nobody_knows_stands_behind_a_cause_and_ends_no_run() -> None:
    unhandled = "n1:811:990 [3] NCCL WARN Cuda failure 'out of memory'"
    answer = diagnose_lines(UNHEARD, unhandled)
    assert (answer.failure_class, answer.confidence) == (FailureClass.OOM_GPU, Confidence.CERTAIN)
    assert nothing_failed(diagnose_lines(UNHEARD), None).code == ""


def test_slow_fabric_of_a_run_that_continues_is_said_all_the_same() -> None:
    answer = diagnose_lines(
        "n1:8:9 [0] NCCL INFO NCCL_IB_HCA set to mlx5_0", "n1:8:9 [0] NCCL INFO Using network Socket"
    )
    assert RULES[answer.code].performance_only
    assert nothing_failed(answer, None) is answer


@pytest.mark.parametrize(
    "errno", ["No such device", "19 No such device, on dev mlx5_1:1, curr state INIT, next state RTR", "Bad address"]
)
def test_queue_pair_refused_for_any_reason_asks_for_the_gid(errno: str) -> None:
    answer = diagnose_lines(f"n1:8:9 [0] misc/ibvwrap.cc:284 NCCL WARN Call to ibv_modify_qp failed with error {errno}")
    assert any("GID" in each.what and FailureClass.NETWORK_LOSS in each.distinguishes for each in answer.next_evidence)


def test_warning_of_the_first_versions_is_one_too() -> None:
    answer = diagnose_lines("n1:811:811 [0] init.cu:674 WARN the grommet has come off")
    assert answer.evidence


@pytest.mark.parametrize(
    ("place", "failure_class"),
    [
        ("misc/shmutils.cc:72", FailureClass.SHM_TOO_SMALL),
        ("transport/net_ib.cc:485", FailureClass.NETWORK_LOSS),
        ("misc/socket.cc:565", FailureClass.FIREWALL),
        ("graph/xml.cc:469", FailureClass.VERSION_MISMATCH),
        ("transport/p2p.cc:275", FailureClass.ACS_IOMMU),
    ],
)
def test_chain_of_calls_without_its_warning_says_in_which_part_it_began(
    place: str, failure_class: FailureClass
) -> None:
    answer = diagnose_lines(
        f"n1:8:9 [0] NCCL INFO {place} -> 2", "n1:8:9 [0] NCCL INFO group.cc:73 -> 2 [Async thread]"
    )
    assert answer.failure_class is FailureClass.UNKNOWN
    assert failure_class in {each for missing in answer.next_evidence for each in missing.distinguishes}


def test_sockets_that_close_at_the_end_are_no_failure() -> None:
    answer = diagnose_lines(
        "n1:8:9 [0] NCCL INFO misc/socket.cc:47 -> 3", "n1:8:9 [0] NCCL INFO misc/socket.cc:752 -> 6"
    )
    assert (answer.code, answer.evidence) == ("", ())
