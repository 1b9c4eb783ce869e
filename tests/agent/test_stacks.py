"""What is taken from py-spy's word on where a rank's main thread stands."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from holdfast.agent import stacks
from holdfast.agent.stacks import MOST_BYTES, Stacks, commit_line, take

AT_ITS_END = """Process 811: python train.py 100
Python v3.11.7 (/usr/bin/python3.11)

Thread 811 (idle): "MainThread"
    _all_reduce_alone (/opt/venv/lib/python3.11/site-packages/holdfast/train/misfortune.py:41)
    befall (/opt/venv/lib/python3.11/site-packages/holdfast/train/misfortune.py:24)
    wish (/opt/venv/lib/python3.11/site-packages/holdfast/train/liaison.py:166)
    commit (/opt/venv/lib/python3.11/site-packages/holdfast/train/session.py:232)
    <module> (/home/ada/train.py:27)
Thread 812 (idle): "Thread-1 (run)"
    settle (/opt/venv/lib/python3.11/site-packages/holdfast/train/replicas.py:120)
"""
BEFORE_ITS_REPORT = AT_ITS_END.replace(
    "wish (/opt/venv/lib/python3.11/site-packages/holdfast/train/liaison.py:166)",
    "settle (/opt/venv/lib/python3.11/site-packages/holdfast/train/replicas.py:230)",
)
IN_THE_LOOP = AT_ITS_END.replace("commit (", "forward (")
OF_ANOTHER = """Thread 811 (idle): "MainThread"
    step (/home/ada/train.py:9)
Thread 812 (idle): "Thread-1"
    commit (/opt/venv/lib/python3.11/site-packages/holdfast/train/session.py:232)
"""


@pytest.mark.parametrize(
    ("dump", "line"),
    [(AT_ITS_END, 232), (BEFORE_ITS_REPORT, 0), (IN_THE_LOOP, 0), (OF_ANOTHER, 0), ("", 0)],
    ids=["past its report", "before it", "in the loop", "another thread", "nothing"],
)
def test_line_of_commit_is_that_of_the_main_thread_past_its_report(dump: str, line: int) -> None:
    assert commit_line(dump) == line


def taken(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> Stacks:
    """What is taken with a py-spy that is this shell script."""
    (program := folder / "py-spy").write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    return asyncio.run(take(1, folder / "stacks.txt", stopped=False))


def test_dump_without_end_is_cut_and_its_beginning_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "TAKE_S", 200.0)
    (tmp_path / "dump").write_text(AT_ITS_END)
    told = taken(tmp_path, monkeypatch, f"cat {tmp_path}/dump; exec yes")
    assert told.commit_line == 232
    assert (tmp_path / "stacks.txt").stat().st_size == MOST_BYTES


def test_dump_that_fails_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert taken(tmp_path, monkeypatch, "echo half; exit 1") == Stacks()
