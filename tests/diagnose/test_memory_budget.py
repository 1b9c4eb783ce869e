"""Retained input stays within its budget, whichever kinds fill it, and dropped input is reported."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.diagnose import pipeline
from holdfast.diagnose.log_input import LogInput
from holdfast.diagnose.memory_budget import MemoryBudget
from holdfast.diagnose.nccl_transport import SetupLogReader
from holdfast.diagnose.scanner import Scanner
from holdfast.diagnose.structured.dump_store import DumpStore

# Every kind that is kept, each with the longest words that it takes, a million times over; what is printed is how much
# more memory was needed at most than before the first line, and how many lines were left out.
WORST = """
import resource, sys
from holdfast.diagnose.log_chunk import LogChunk, LogSource
from holdfast.diagnose.memory_budget import MemoryBudget
from holdfast.diagnose.scanner import Scanner
from holdfast.diagnose.nccl_transport import SetupLogReader, format_transport, to_dict

KINDS = (
    "h{i}:{i}:{i} [0] NCCL INFO Using network IB",
    "h{h}:{h}:{i} [0] NCCL INFO Channel 00/0 : {i}[0] -> 7[0] [send] via NET/IB/0",
    "h{h}:{h}:1 [0] NCCL INFO Channel 00/0 : {i}[0] -> 7[0] [send] via NET/IB/0",
    "h{h}:{h}:1 [0] NCCL INFO Channel 00/0 : 7[0] -> {i}[0] [send] via NET/{long}/0",
    "h{h}:{h}:1 [0] NCCL INFO Connected {long}{long}",
    "h{h}:{h}:1 [0] NCCL INFO NCCL_{i} set by environment to \\U0001f4a5{long}{long}",
    "h{h}:{h}:1 [0] NCCL INFO comm 0x{i} rank {i} nranks 9999999 cudaDev 0 busId 1000 commId 0x{i} - Init START",
    "NCCL version 2.{i}.1+cuda12.{i}",
    "[Rank {i}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum={i}, OpType=ALLREDUCE, NumelIn=1, "
    "NumelOut=1, Timeout(ms)=600000) ran for 600017 ms \\U0001f4a5{long}",
)
budget = int(sys.argv[1])
scanner, reading = Scanner(MemoryBudget(budget // 4)), SetupLogReader(budget)
source = LogSource(name="all.log")
facts = [*scanner.feed(LogChunk(source=source, first_line=1, data=b"nothing\\n"))]
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
numbers = iter(range(1 << 30))
while min(reading.left_out, scanner.left_out) < 3000:
    rows = [row.format(i=i, h=i // 99, long=f"{i:0100}") for i in (next(numbers) for _ in range(99)) for row in KINDS]
    block = LogChunk(source=source, first_line=1, data="".join(f"{row}\\n" for row in rows).encode())
    facts += scanner.feed(block)
    reading.feed(block)
transport = reading.result()
format_transport(transport), to_dict(transport)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, reading.left_out, scanner.left_out)
"""
BUDGET_BYTES = 32 << 20


@pytest.mark.slow
def test_worst_of_every_kind_at_once_stays_within_the_budget() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WORST, str(BUDGET_BYTES)], capture_output=True, text=True, check=True, timeout=300
    )
    held_kib, *left_out = map(int, done.stdout.split())
    assert min(left_out) >= 3000
    # a quarter more are facts; remembered words are within bounds of their own
    assert held_kib << 10 < 1.25 * BUDGET_BYTES * 1.3 + (32 << 20)


def test_answer_says_what_was_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def small(_room: MemoryBudget, _hide: object, **_: object) -> Scanner:
        return Scanner(MemoryBudget(20_000))

    monkeypatch.setattr(pipeline, "Scanner", small)
    monkeypatch.setattr(pipeline, "SetupLogReader", lambda: SetupLogReader(20_000))
    timeout = "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1, OpType=ALLREDUCE, NumelIn=1, NumelOut=1"
    said = [f"[Rank {rank}] {timeout}, Timeout(ms)=600000) ran for 600017 ms" for rank in range(99)]
    said += [f"n{rank}:{rank}:1 [0] NCCL INFO Using network IB" for rank in range(99)]
    (tmp_path / "log").write_text("".join(f"{line}\n" for line in said))
    notes = pipeline.diagnose(LogInput((tmp_path,))).notes
    assert [note.split(" ", 3)[3].partition(",")[0] for note in notes] == ["matched lines", "lines of NCCL's set-up"]
    assert all(note.startswith("left out: ") for note in notes)


def test_room_takes_what_fits_and_no_more() -> None:
    room = MemoryBudget(100)
    assert (room.reserve(60), room.reserve(60), room.reserve(40), room.reserve(1)) == (True, False, True, False)
    room.release(50)
    assert room.reserve(50)


def test_dumps_of_many_ranks_share_the_budget_and_what_is_left_out_is_said(tmp_path: Path) -> None:
    ranks = 64
    for rank in range(ranks):
        last = 40 - (rank == 50)
        entries = [
            {
                "collective_seq_id": seq,
                "process_group": ["0", "default_pg"],
                "profiling_name": "nccl:all_reduce",
                "input_sizes": [[4]],
                "input_dtypes": ["Float"],
                "state": "completed" if seq < 40 else "scheduled",
            }
            for seq in range(1, last + 1)
        ]
        config = {"0": {"name": "0", "desc": "", "ranks": str([*range(ranks)])}}
        document = {"version": "2.4", "pg_config": config, "pg_status": {}, "entries": entries}
        (tmp_path / f"nccl_trace_rank_{rank}").write_text(json.dumps(document))
    pile = _short_of_room(tmp_path, 400_000)
    found = pipeline.diagnose(pile)
    assert (len(pile.dumps.dumps), pile.dumps.left_out) == (ranks, 0)
    assert f"left out: all calls but the last of {pile.dumps.shortened} flight recorder dumps" in found.notes[0]
    assert found.first_failure is not None
    assert found.first_failure.rank == 50
    notes = pipeline.diagnose(_short_of_room(tmp_path, 20_000)).notes
    assert any("flight recorder dumps, over the limit; diagnose fewer" in note for note in notes)


def _short_of_room(path: Path, most_bytes: int) -> LogInput:
    pile = LogInput((path,))
    pile.budget = MemoryBudget(most_bytes)
    pile.dumps = DumpStore(pile.budget)
    return pile


def test_many_damaged_files_are_named_up_to_a_number_and_then_counted(tmp_path: Path) -> None:
    for number in range(50):
        (tmp_path / f"{number}.gz").write_bytes(b"\x1f\x8bno gzip at all")
    pile = LogInput((tmp_path,))
    assert list(pile.chunks()) == []
    assert len(pile.notes) == 21
    assert pile.notes[-1] == "30 more files are damaged, and read up to the damage"
