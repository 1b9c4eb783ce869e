"""Ten thousand broken logs: no crash, no class without a line as evidence, and always a printable answer."""

from __future__ import annotations

import gzip
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard

from holdfast.cli.diagnose import render_diagnosis
from holdfast.diagnose import log_input as piles
from holdfast.diagnose.failure_classes import FailureClass
from holdfast.diagnose.log_chunk import LogChunk, LogSource
from holdfast.diagnose.log_input import LogInput
from holdfast.diagnose.pipeline import diagnose_chunks
from holdfast.diagnose.redact import redact_diagnosis
from holdfast.diagnose.rules import RULES

INPUTS = 10_000
ROUNDS = 5
LINES = [line.encode() for rule in RULES.values() for line in rule.matches.values()]
PREFIXES = [
    b"",
    b"3: ",
    b"[1,5]<stderr>:",
    b"[pod/worker-3/main] ",
    b"(RayWorker pid=811, ip=10.0.0.3) ",
    b"2026-11-20T10:00:00.123Z stderr F ",
    b"[rank99999999999999999999]:[E1399 99:99:99.1 x] ",
    b"\x1b[31m",
    b"\xff\xfe\x00",
    "é中🙂".encode()[:-1],
    b"\r10%|###| \r",
]
NUMBERS = [b"0", b"-1", b"9" * 400, b"18446744073709551616", "٣".encode()]


def broken(chance: random.Random) -> bytes:
    """Some lines that rules know, damaged: cut, joined, repeated, with bytes turned and numbers out of any range."""
    lines = [chance.choice(PREFIXES) + chance.choice(LINES) for _ in range(chance.randint(1, 6))]
    data = chance.choice((b"\n", b"\r\n", b"\r", b"\n\n", b"\0\n", b" ")).join(lines)
    for _ in range(chance.randint(0, 4)):
        at = chance.randrange(len(data) + 1)
        damage = chance.randrange(6)
        if damage == 0:
            data = data[:at]
        elif damage == 1:
            data = data[:at] + chance.randbytes(chance.randint(1, 20)) + data[at:]
        elif damage == 2:
            data = data[:at] + data[at + chance.randint(1, 40) :]
        elif damage == 3:
            data += data[at : at + 200] * chance.randint(1, 5)
        elif damage == 4:
            data = data.replace(chance.choice((b"1", b"2", b"3", b"8")), chance.choice(NUMBERS))
        else:
            data = bytes(byte ^ (chance.random() < 0.02) * chance.randrange(256) for byte in data)
    return data


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(ROUNDS))
def test_broken_logs_are_answered_with_evidence_or_not_at_all(seed: int) -> None:
    chance = random.Random(seed)
    for number in range(INPUTS // ROUNDS):
        blocks = [
            LogChunk(
                source=LogSource(name=f"{each}.log", rank=chance.choice((None, each))),
                first_line=1,
                data=broken(chance),
            )
            for each in range(chance.randint(1, 3))
        ]
        answer = diagnose_chunks(blocks)
        assert answer.evidence or answer.failure_class is FailureClass.UNKNOWN, number
        assert answer.failure_class is not FailureClass.UNKNOWN or answer.next_evidence, number
        if number % 10 == 0:
            assert render_diagnosis(redact_diagnosis(answer)).plain


@pytest.mark.parametrize("pack", [bytes, gzip.compress, zstandard.ZstdCompressor().compress])
def test_broken_files_are_read_as_far_as_they_go(tmp_path: Path, pack: Callable[[bytes], bytes]) -> None:
    chance = random.Random(1)
    for number in range(100):
        data = bytearray(pack(broken(chance) * 20) or b"\n")
        for _ in range(chance.randint(0, 3)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        (tmp_path / f"rank-{number}.log").write_bytes(data[: chance.randint(1, len(data))])
    pile = LogInput((tmp_path,))
    assert all(block.data for block in pile.chunks())
    assert pile.files == 100


def test_files_beyond_the_bound_are_left_and_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(piles, "MAX_FILES", 10)
    for number in range(30):
        (tmp_path / f"{number}.log").write_text("x\n")
    pile = LogInput((tmp_path,))
    assert sum(1 for _ in pile.chunks()) == 10
    assert any("only the first" in note for note in pile.notes)
