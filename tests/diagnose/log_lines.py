"""Log lines in the form in which readers receive them."""

from __future__ import annotations

from holdfast.diagnose.diagnosis import Diagnosis
from holdfast.diagnose.log_chunk import LogChunk, LogSource
from holdfast.diagnose.pipeline import diagnose_chunks


def chunk(*lines: str, name: str = "log", rank: int | None = None) -> LogChunk:
    return LogChunk(
        source=LogSource(name=name, rank=rank), first_line=1, data="".join(f"{line}\n" for line in lines).encode()
    )


def diagnose_lines(*lines: str) -> Diagnosis:
    return diagnose_chunks([chunk(*lines)])
