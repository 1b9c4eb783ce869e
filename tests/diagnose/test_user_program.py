"""Errors of a program, its launcher or a library before rendezvous: usage errors, outages, files that do not parse."""

from __future__ import annotations

import pytest
from tests.diagnose.log_lines import diagnose_lines
from tests.golden import Golden

from holdfast.cli.diagnose import render_diagnosis as screen
from holdfast.diagnose.diagnosis import MOST_MAY_BE
from holdfast.diagnose.failure_classes import FailureClass

IN_URLLIB = (
    "Traceback (most recent call last):",
    '  File "/home/ada/train.py", line 12, in main',
    "    urllib.request.urlopen(url)",
    '  File "/usr/lib/python3.12/urllib/request.py", line 1344, in do_open',
    "    h.request(req.get_method(), req.selector, req.data, headers,",
    '  File "/usr/lib/python3.12/socket.py", line 978, in getaddrinfo',
    "    for res in _socket.getaddrinfo(host, port, family, type, proto, flags):",
)
GAI = "socket.gaierror: [Errno -2] Name or service not known"


REFUSED = (
    ["usage: train.py [-h] [--lr LR]", "train.py: error: unrecognized arguments: --learning-rate 1"],
    ["[rank0]: train.py: error: argument --lr: invalid float value: 'x'"],
    ["Usage: train.py [OPTIONS]", "", "Error: Missing option '--data'."],
    ["╭─ Error ─────╮", "│ No such option: --lrr        │", "╰─────────╯"],
    ["╭─ Unrecognized options ─╮", "│ Unrecognized options: --lrr 1  │"],
    ["Could not override 'optm.lr'.", "Key 'optm' is not in struct"],
    ["-------", "mpirun has detected an attempt to run as root.", "", "-------"],
)


def test_usage_error_is_told_in_the_words_of_who_refused(golden: Golden) -> None:
    ended = "[E1120 10:00:00.1 api.py:882] failed (exitcode: 2) local_rank: 0 (pid: 942) of binary: python"
    answers = [diagnose_lines(*lines, ended) for lines in REFUSED]
    assert [answer.failure_class for answer in answers] == [FailureClass.USAGE] * len(REFUSED)
    golden("\n".join(answer.what for answer in answers))


@pytest.mark.parametrize("error", ["SyntaxError: expected ':'", "IndentationError: unexpected indent"])
def test_file_that_does_not_parse_is_named_with_its_line(error: str) -> None:
    assert (
        "at model.py:7"
        in diagnose_lines('  File "/home/ada/model.py", line 7', "    def f(x)", "        ^", error).what
    )
    imported = (
        "Traceback (most recent call last):",
        '  File "/home/ada/train.py", line 1, in <module>',
        "    import x",
    )
    answer = diagnose_lines(*imported, '  File "/home/ada/model.py", line 7', "    def f(x)", "        ^", error)
    assert answer.what.endswith("at model.py:7")


OUTAGES = (
    [*IN_URLLIB, GAI],
    [*IN_URLLIB, "urllib.error.URLError: <urlopen error [Errno -3] Temporary failure>"],
    ["ConnectionError: Couldn't reach 'wikitext' on the Hub (ConnectionError)"],
    ["requests.exceptions.ConnectionError: HTTPSConnectionPool(host='data.org', port=443): x"],
    ["huggingface_hub.errors.HfHubHTTPError: 503 Server Error: Unavailable for url: https://huggingface.co/api/x"],
)


def test_outage_of_a_hub_is_no_rendezvous(golden: Golden) -> None:
    answers = [diagnose_lines(*lines) for lines in OUTAGES]
    assert [answer.failure_class for answer in answers] == [FailureClass.UNREACHABLE] * len(OUTAGES)
    assert "MASTER_ADDR" not in repr(answers)
    golden("\n".join(answer.what for answer in answers))


@pytest.mark.parametrize(
    "lines",
    [
        [GAI],
        ["[c10d] The IPv6 network addresses of (head-0, 29500) cannot be retrieved (gai error: -2 - Name or service)."],
        [
            "Traceback (most recent call last):",
            '  File "/opt/venv/site-packages/torch/distributed/rendezvous.py", line 200, in _create_c10d_store',
            "    return TCPStore(",
            GAI,
        ],
    ],
)
def test_name_of_the_master_that_does_not_resolve_is_rendezvous(lines: list[str]) -> None:
    assert diagnose_lines(*lines).failure_class is FailureClass.RENDEZVOUS


def test_machine_without_a_gpu_has_no_broken_driver() -> None:
    answer = diagnose_lines(
        "RuntimeError: Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU"
    )
    assert (answer.failure_class, answer.code) == (FailureClass.NOT_STARTED, "no-nvidia-driver")


def test_no_more_classes_are_offered_than_a_person_looks_after() -> None:
    answer = diagnose_lines("n1:8:9 [0] misc/socket.cc:700 NCCL WARN ncclSocketRecv: socket state (3) is not ready")
    open_ = [failure_class for each in answer.next_evidence for failure_class in each.distinguishes]
    assert len(set(open_)) > MOST_MAY_BE == len(answer.may_be)
    assert answer.may_be == tuple(dict.fromkeys(open_))[:MOST_MAY_BE]
    (line,) = [line for line in screen(answer).plain.splitlines() if line.strip().startswith("may be")]
    assert line.split(maxsplit=2)[2] == ", ".join(answer.may_be)
    known = diagnose_lines(
        "RuntimeError: Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU"
    )
    assert known.may_be == ()
