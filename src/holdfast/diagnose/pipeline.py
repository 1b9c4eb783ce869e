"""Owns one diagnosis from end to end: a pile is read once, facts are found, and the answer is reasoned from them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from itertools import chain

from holdfast.diagnose.answer import Answer, Other
from holdfast.diagnose.block import Block
from holdfast.diagnose.clocks import with_years
from holdfast.diagnose.collecting import collected_rarely
from holdfast.diagnose.fact import Fact
from holdfast.diagnose.pile import Pile
from holdfast.diagnose.reason import answer
from holdfast.diagnose.runs import fails, parted
from holdfast.diagnose.scan import Scanner
from holdfast.diagnose.structured import flight, jsonlines
from holdfast.diagnose.transport import Reading, is_sound
from holdfast.diagnose.transport import facts as transport_facts
from holdfast.diagnose.wording import shown
from holdfast.fabric.catalog import Fabric

MOST_OTHERS = 6
"""Other runs of a pile that are told of."""


@collected_rarely()
def diagnose(
    pile: Pile,
    *,
    known: Sequence[Fact] = (),
    first_rank: int | None = None,
    fabric: Fabric | None = None,
    hide: Callable[[str], str] | None = None,
) -> Answer:
    """What happened in the run whose logs a pile holds.

    `known` is what the run's own event log says, with the rank that failed first; `fabric` what the job was meant to
    use, where that is known; `hide` replaces secrets in a line before it is cut.
    """
    scanner, reading = Scanner(pile.room, hide), Reading()
    facts: list[Fact] = [*known]
    ranks: set[int] = set()
    for block in chain.from_iterable(map(jsonlines.plain, pile.blocks())):
        if block.source.rank is not None:
            ranks.add(block.source.rank)
        facts += scanner.feed(block)
        if scanner.set_up:
            reading.feed(block)
    facts += flight.compare(pile.dumps.kept)
    ranks.update(dump.rank for dump in pile.dumps.kept)
    transport = reading.result(fabric) if reading.info_lines else None
    if transport is not None:
        facts += transport_facts(transport, told=fabric is not None)
    facts = with_years(facts)
    sound, ranks_with_logs = transport is not None and is_sound(transport), frozenset(ranks)
    notes = (*pile.notes, *_left_out(scanner, reading))
    # What the run's own log knows of one attempt is of one run, whatever its clocks say.
    runs = [facts] if known else parted(facts)
    found = _of_last(
        runs,
        scanner.counts,
        lambda facts, counts: answer(
            facts,
            counts=counts,
            ranks_with_logs=ranks_with_logs,
            first_rank=first_rank,
            sound_fabric=sound,
            set_up=transport is not None,
            notes=notes,
        ),
    )
    return replace(found, transport=transport)


def _left_out(scanner: Scanner, reading: Reading) -> Iterator[str]:
    """What was more than is held."""
    for count, kind in ((scanner.left_out, "lines that tell"), (reading.left_out, "lines of NCCL's set-up")):
        if count:
            yield f"left out: {count:,} {kind}, since no more of them are held; diagnose fewer files at once"


def diagnose_blocks(blocks: Iterable[Block]) -> Answer:
    """What the lines say one by one, for what is at hand already as blocks."""
    scanner, set_up = Scanner(), False
    facts: list[Fact] = []
    for block in chain.from_iterable(map(jsonlines.plain, blocks)):
        facts += scanner.feed(block)
        set_up |= scanner.set_up
    return _of_last(
        parted(with_years(facts)),
        scanner.counts,
        lambda facts, counts: answer(facts, counts=counts, set_up=set_up),
    )


def _of_last(
    runs: Sequence[Sequence[Fact]],
    counts: Mapping[str, int],
    weighed: Callable[[Sequence[Fact], Mapping[str, int]], Answer],
) -> Answer:
    """What is answered of the last of the runs that failed, and in a line each of the others."""
    failed = [run for run in runs if any(map(fails, run))] or runs[-1:]
    found = weighed(failed[-1], counts if len(runs) == 1 else Counter(fact.rule.code for fact in failed[-1]))
    others = tuple(_other(run, weighed(run, counts)) for run in failed[:-1][-MOST_OTHERS:])
    notes = found.notes
    if others:
        notes = (
            f"by clocks and launchers {len(failed)} runs that failed are in what was read; this is about the last",
            *notes,
        )
    if runs[-1] is not failed[-1]:
        first = shown(runs[-1][0])
        notes = (f"a run that began after it, at {first.where}, shows no failure so far", *notes)
    return replace(found, others=others, notes=notes)


def _other(facts: Sequence[Fact], found: Answer) -> Other:
    """How another run ended."""
    first = found.evidence[0] if found.evidence else shown(facts[0])
    at = next((fact.at or fact.near for fact in facts if shown(fact) == first), None)
    said = f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M:%S}" if at is not None else ""
    return Other(what=found.what, klass=found.klass, sure=found.sure, at=said, first=first)
