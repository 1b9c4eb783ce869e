"""Lines of a log as what reads them gets them."""

from __future__ import annotations

from holdfast.diagnose.answer import Answer
from holdfast.diagnose.block import Block, Source
from holdfast.diagnose.pipeline import diagnose_blocks


def block(*lines: str, name: str = "log", rank: int | None = None) -> Block:
    return Block(
        source=Source(name=name, rank=rank), first_line=1, data="".join(f"{line}\n" for line in lines).encode()
    )


def told(*lines: str) -> Answer:
    return diagnose_blocks([block(*lines)])
