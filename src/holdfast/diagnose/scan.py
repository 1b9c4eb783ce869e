"""Owns finding the lines that a rule recognises in blocks of logs, at the speed of one pass of RE2 over each block.

Strings that the rules need (needles.py) find lines; only a line that holds one is looked at again, by the rules.
RE2 is linear in what it reads, so no rule can be made to hang by what somebody logs. Refuses to own what facts mean.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache

import re2

from holdfast.diagnose.block import Block, Source
from holdfast.diagnose.fact import Fact
from holdfast.diagnose.needles import folds, needles
from holdfast.diagnose.prefix import clock_of, writer_of
from holdfast.diagnose.rules import RULES
from holdfast.diagnose.rules.row import Rule

LINE_BYTES = 2000
"""Longest line that is kept of one that a rule recognises; around what it recognised."""
EACH = 20
"""Facts kept of one rule, source and rank; more of the same are only counted."""
MOST = 50_000
"""Facts kept in all."""

_ESCAPES = re.compile(rb"\x1b(?:\[[0-9;:?]*[ -/]*[@-~]|\][^\x07\n]{0,256}\x07|[()][A-Z0-9])")
_DFA_BYTES = 64 << 20


class Recognition:
    """The rules made ready to be searched for; made once, since that takes longer than most logs."""

    def __init__(self, rules: Iterable[Rule]) -> None:
        options = re2.Options()
        options.encoding = re2.Options.Encoding.LATIN1
        options.max_mem = _DFA_BYTES
        options.log_errors = False
        self.rules = [rule for rule in rules if rule.pattern]
        self.names_rank = ["(?P<rank>" in rule.pattern for rule in self.rules]
        self.patterns = [re2.compile(rule.pattern.encode(), options) for rule in self.rules]
        options.never_capture = True
        self.needle = re2.compile(_union(self.rules).encode(), options)
        self.which = re2.Set.SearchSet(options)
        for rule in self.rules:
            self.which.Add(rule.pattern.encode())
        self.which.Compile()


@cache
def recognition() -> Recognition:
    """That of all rules."""
    return Recognition(RULES.values())


class Scanner:
    """Turns the blocks of one pile into facts; one for a pile, fed in any order of sources."""

    def __init__(self) -> None:
        self._known = recognition()
        self.counts: Counter[str] = Counter()
        """Lines recognised, by rule; also those of which no fact was kept."""
        self._kept: Counter[tuple[str, str]] = Counter()
        self._facts = 0

    def feed(self, block: Block) -> Iterator[Fact]:
        """The facts of one block, in the order of its lines."""
        data = block.data
        if b"\x1b" in data:
            data = _ESCAPES.sub(b"", data)
        number, counted, at = block.first_line, 0, 0
        while (found := self._known.needle.search(data, at)) is not None:
            where = found.start()
            start = data.rfind(b"\n", at, where) + 1 or at
            at = data.find(b"\n", where) + 1 or len(data)
            line = data[start:at].rstrip(b"\r\n")
            if which := self._known.which.Match(line):
                number += data.count(b"\n", counted, start)
                counted = start
                yield from self._line(block.source, number, line, which)

    def _line(self, source: Source, number: int, line: bytes, which: Sequence[int]) -> Iterator[Fact]:
        if len(which) > 1:
            which = [index for index in which if not self._known.rules[index].fallback] or which
        for index in which:
            if fact := self._fact(source, number, line, index):
                yield fact

    def _fact(self, source: Source, number: int, line: bytes, index: int) -> Fact | None:
        rule, names_rank = self._known.rules[index], self._known.names_rank[index]
        self.counts[rule.code] += 1
        alike = rule.code, source.name
        if self._facts >= MOST or (self._kept[alike] >= EACH and not names_rank):
            return None
        found = self._known.patterns[index].search(line)
        if found is None:
            return None
        values = {name.decode(): _text(said) for name, said in found.groupdict().items() if said is not None}
        if names_rank:
            alike = rule.code, f"{source.name}\0{values.get('rank')}"
            if self._kept[alike] >= EACH:
                return None
        self._kept[alike] += 1
        self._facts += 1
        text = _around(line, found.start())
        who = writer_of(text, source)
        if values.get("rank"):
            who = replace(who, rank=int(values["rank"]))
        return Fact(rule=rule, source=source.name, line=number, text=text, who=who, at=clock_of(text), values=values)


def _around(line: bytes, start: int) -> str:
    """The line as text; where it is long, its beginning and what surrounds the place that was recognised."""
    if len(line) > LINE_BYTES:
        half = LINE_BYTES // 2
        line = line[:half] + b" ... " + line[max(half, start - 100) : max(half, start - 100) + half]
    return _text(line).strip()


def _text(said: bytes) -> str:
    return said.decode("utf-8", "replace")


def _union(rules: Iterable[Rule]) -> str:
    """One pattern for all strings of which a rule needs one; none is longer than a part of it that is there too."""
    strings = {(needle, folds(rule.pattern)) for rule in rules for needle in needles(rule.pattern)}
    texts = {text for text, _ in strings}
    least = (each for each in strings if not any(text != each[0] and text in each[0] for text in texts))
    return "|".join(f"(?i:{re2.escape(text)})" if fold else re2.escape(text) for text, fold in sorted(least))
