"""Owns one diagnosis from end to end: a pile is read once, facts are found, and the answer is reasoned from them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from holdfast.diagnose.answer import Answer
from holdfast.diagnose.block import Block
from holdfast.diagnose.fact import Fact
from holdfast.diagnose.pile import Pile
from holdfast.diagnose.reason import answer
from holdfast.diagnose.scan import Scanner
from holdfast.diagnose.structured import flight
from holdfast.diagnose.transport import Reading, is_sound
from holdfast.diagnose.transport import facts as transport_facts
from holdfast.fabric.catalog import Fabric


def diagnose(
    pile: Pile, *, known: Sequence[Fact] = (), first_rank: int | None = None, fabric: Fabric | None = None
) -> Answer:
    """What happened in the run whose logs a pile holds.

    `known` is what the run's own event log says, with the rank that failed first; `fabric` what the job was meant to
    use, where that is known.
    """
    scanner, reading = Scanner(), Reading()
    facts: list[Fact] = [*known]
    ranks: set[int] = set()
    for block in pile.blocks():
        if block.source.rank is not None:
            ranks.add(block.source.rank)
        facts += scanner.feed(block)
        if scanner.set_up:
            reading.feed(block)
    facts += flight.compare(pile.dumps)
    ranks.update(dump.rank for dump in pile.dumps)
    transport = reading.result(fabric) if reading.info_lines else None
    if transport is not None:
        facts += transport_facts(transport, told=fabric is not None)
    found = answer(
        facts,
        counts=scanner.counts,
        ranks_with_logs=frozenset(ranks),
        first_rank=first_rank,
        sound_fabric=transport is not None and is_sound(transport),
        notes=tuple(pile.notes),
    )
    return replace(found, transport=transport)


def diagnose_blocks(blocks: Iterable[Block]) -> Answer:
    """What the lines say one by one, for what is at hand already as blocks."""
    scanner = Scanner()
    facts = [fact for block in blocks for fact in scanner.feed(block)]
    return answer(facts, counts=scanner.counts)
