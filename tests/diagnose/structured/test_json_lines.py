"""Logs whose lines are JSON objects."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
from tests.diagnose.log_lines import chunk, diagnose_lines

from holdfast.diagnose.failure_classes import FailureClass
from holdfast.diagnose.structured import json_lines

AT = "2026-11-20T10:10:42.123456789Z"
TRACEBACK = (
    "Traceback (most recent call last):",
    '  File "/home/ada/train.py", line 42, in step',
    "    return self.index[i]['tokens']",
    "KeyError: 'tokens'",
)
CLOSED = "n1:8:9 [0] misc/socket.cc:49 NCCL WARN socketProgress: Connection closed by remote peer n3<51159>"


def docker(*lines: str) -> list[str]:
    return [json.dumps({"log": f"{line}\n", "stream": "stderr", "time": AT}) for line in lines]


def structlog(prefix: str = "") -> list[str]:
    return [
        prefix + json.dumps({"event": "step", "step": 5, "timestamp": AT, "rank": 1}),
        prefix
        + json.dumps(
            {"event": "failed", "level": "error", "rank": 1, "timestamp": AT, "exception": "\n".join(TRACEBACK)}
        ),
        prefix + json.dumps({"event": CLOSED, "rank": 0, "timestamp": AT}),
    ]


@pytest.mark.parametrize(
    ("lines", "number", "rank"),
    [
        (docker("step 5", *TRACEBACK, CLOSED), 5, None),
        (structlog(), 2, 1),
        (structlog("[pod/train-0/main] "), 2, 1),
        (["no object", *structlog()], 3, 1),
    ],
)
def test_traceback_in_objects_is_told_as_in_lines_and_at_its_line(
    lines: Sequence[str], number: int, rank: int | None
) -> None:
    answer = diagnose_lines(*lines)
    assert answer.failure_class is FailureClass.PROGRAM_ERROR
    assert "train.py:42 in step" in answer.what
    assert answer.evidence[0].where == f"log:{number}"
    assert [each.code for each in answer.symptoms] == ["connection-closed"]
    assert answer.symptoms[0].first.where == f"log:{len(lines)}"
    assert (answer.first_failure.rank if answer.first_failure else None) == rank


@pytest.mark.parametrize("line", ['{"a": 1}', '{"log": }', '{"' + "[" * 5000 + "}", '{"log": 5}', "step 5", "{}"])
def test_object_without_text_is_left_as_it_is(line: str) -> None:
    before = chunk(line, "step 6")
    assert b"".join(each.data for each in json_lines.to_plain_lines(before)) == before.data
