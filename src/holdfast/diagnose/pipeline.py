"""Owns one diagnosis from end to end: a pile is read once, facts are found, and the answer is reasoned from them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from holdfast.diagnose.answer import Answer
from holdfast.diagnose.block import Block
from holdfast.diagnose.fact import Fact
from holdfast.diagnose.pile import Pile
from holdfast.diagnose.reason import answer
from holdfast.diagnose.scan import Scanner
from holdfast.diagnose.structured import flight


def diagnose(pile: Pile, *, known: Sequence[Fact] = (), first_rank: int | None = None) -> Answer:
    """What happened in the run whose logs a pile holds; `known` is what its own event log says, with the first rank."""
    scanner = Scanner()
    facts: list[Fact] = [*known]
    ranks: set[int] = set()
    for block in pile.blocks():
        if block.source.rank is not None:
            ranks.add(block.source.rank)
        facts += scanner.feed(block)
    facts += flight.compare(pile.dumps)
    ranks.update(dump.rank for dump in pile.dumps)
    return answer(
        facts,
        counts=scanner.counts,
        ranks_with_logs=frozenset(ranks),
        first_rank=first_rank,
        notes=tuple(pile.notes),
    )


def diagnose_blocks(blocks: Iterable[Block]) -> Answer:
    """The same for what is at hand already as blocks."""
    scanner = Scanner()
    facts = [fact for block in blocks for fact in scanner.feed(block)]
    return answer(facts, counts=scanner.counts)
