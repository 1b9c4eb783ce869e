"""Finds the lines that rules match in chunks of logs, in one pass for all rules over each chunk.

RE2 extracts the values from the few lines found.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache

from msgspec.structs import replace

from holdfast.diagnose.fact import Fact
from holdfast.diagnose.frames import crashed_at, raised_at, service_client, thread_position
from holdfast.diagnose.line_prefix import parse_process, process_of_summary, torchrun_root_cause
from holdfast.diagnose.log_chunk import LogChunk, LogSource
from holdfast.diagnose.memory_budget import FACTS_BYTES, MemoryBudget
from holdfast.diagnose.pattern_scan import compile_re2, compile_scan
from holdfast.diagnose.rules import RULES
from holdfast.diagnose.rules.hang_records import STACK
from holdfast.diagnose.rules.rule import Role, Rule
from holdfast.diagnose.rules.torchrun import LAUNCHER_ROOT_CAUSE, LAUNCHER_STARTED
from holdfast.diagnose.rules.user_program import UNREACHABLE
from holdfast.diagnose.timestamps import parse_timestamp, timestamp_above

LINE_BYTES = 2000
"""Longest part kept of a matched line, around the match."""
REDACTED_BYTES = 16 * LINE_BYTES
"""How much of a line is searched for secrets; the kept part ends well before this."""
_NCCL_SETUP = rb"NCCL (?:INFO|version) "
VALUE_BYTES = 200
"""Longest value extracted from a line."""
MAX_FACTS_PER_RULE = 20
"""Facts kept per rule, source and rank, per day and launcher; further ones are only counted."""
MAX_FACTS = 50_000
"""Facts kept in all, as far as memory allows."""
_FACT_BYTES = 1536
"""Bytes per fact besides its text and values, until all are weighed."""

# 2026-11-20T10:00:00   2026/11/20 10:00:00   [E1120 10:00:00   [Thu Nov 20 10:00:00 2026]
_DAY = re.compile(rb"20\d\d[-/]\d\d[-/]\d\d|[DIWEFC][01]\d\d\d (?=\d\d:)|[JFMASOND][a-y]{2} [ \d]\d (?=\d\d:)")
_DAY_BYTES = 120
_ESCAPES = re.compile(rb"\x1b(?:\[[0-9;:?]*[ -/]*[@-~]|\][^\x07\n]{0,256}\x07|[()][A-Z0-9])")


class RuleMatcher:
    """The compiled rules, for large inputs or for others."""

    def __init__(self, rules: Iterable[Rule], *, is_large: bool) -> None:
        self.rules = [rule for rule in rules if rule.matches]
        self._patterns = [rule.pattern for rule in self.rules]
        self.names_rank = ["(?P<rank>" in pattern for pattern in self._patterns]
        patterns = [*map(str.encode, self._patterns), _NCCL_SETUP]
        self._scan = compile_scan(patterns, once=[_NCCL_SETUP], is_large=is_large)

    def candidate_lines(self, data: bytes) -> tuple[list[tuple[int, int, list[int]]], bool]:
        """Start and end of each line in which a rule may match, and which rules, by their index.

        Also whether there are lines of NCCL's set-up.
        """
        ends = [0] * (len(self.rules) + 1)
        found: dict[int, list[int]] = {}

        def note(index: int, _begin: int, end: int, _flags: int, _context: object) -> None:
            if end > ends[index]:  # the first rule in this line
                ends[index] = data.find(b"\n", end - 1) + 1 or len(data)
                found.setdefault(ends[index], []).append(index)

        def rules(indices: list[int]) -> list[int]:
            return sorted(index for index in indices if index < len(self.rules))

        self._scan(data, note)
        lines = [
            (data.rfind(b"\n", 0, end - 1) + 1, end, which) for end in sorted(found) if (which := rules(found[end]))
        ]
        return lines, ends[-1] > 0

    def is_excluded(self, index: int, line: bytes) -> bool:
        """Whether a line has a rule's words without its meaning."""
        unless = self.rules[index].exclude
        return bool(unless) and _compiled(unless).search(line) is not None

    def search(self, index: int, line: bytes) -> tuple[int, dict[str, str]] | None:
        """Where a rule matches in a line, and its values, cut where they are long."""
        found = _compiled(self._patterns[index]).search(line)
        if found is None:
            return None
        return found.start(), {
            name.decode(): _text(value[:VALUE_BYTES]) for name, value in found.groupdict().items() if value is not None
        }


_compiled = cache(compile_re2)


@cache
def rule_matcher(is_large: bool) -> RuleMatcher:
    """The same for all rules."""
    return RuleMatcher(RULES.values(), is_large=is_large)


class Scanner:
    """Turns the chunks of one input into facts; one scanner per input, fed in any order of sources."""

    def __init__(
        self, budget: MemoryBudget | None = None, hide: Callable[[str], str] | None = None, *, is_large: bool = False
    ) -> None:
        self._matcher = rule_matcher(is_large)
        self.counts: Counter[str] = Counter()
        """Matched lines by rule; also those of which no fact was kept."""
        self.has_nccl_setup = False
        """Whether the last chunk holds lines of NCCL's set-up, for their readers."""
        self._fact_counts: Counter[tuple[str, str, str]] = Counter()
        self._days: dict[str, str] = {}
        self._launcher_starts: Counter[str] = Counter()
        self._fact_count = 0
        self._budget = budget or MemoryBudget(FACTS_BYTES)
        self._hide = hide
        """Replaces secrets in a line before it is cut: half a key no longer looks like one."""
        self.left_out = 0
        """Matched lines of which no fact was kept, over the limit."""

    def feed(self, block: LogChunk) -> Iterator[Fact]:
        """The facts of one chunk, in the order of its lines."""
        data = block.data
        if b"\x1b" in data:
            data = _ESCAPES.sub(b"", data)
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n")
        number, counted = 0, 0
        lines, self.has_nccl_setup = self._matcher.candidate_lines(data)
        for start, end, which in lines:
            facts = self._facts_of(block.source, data[start:end].rstrip(b"\n"), which)
            if facts:
                number = number or int(block.first_line)
                number += 0 if block.single_line else data.count(b"\n", counted, start)
                counted = start
                yield from (_with_context(replace(fact, line=number), data, start, end) for fact in facts)

    def _facts_of(self, source: LogSource, line: bytes, which: Sequence[int]) -> list[Fact]:
        own = [index for index in which if not self._matcher.rules[index].fallback]
        matched = [index for index in own if not self._matcher.is_excluded(index, line)]
        if not matched and len(which) > len(own):
            matched = [index for index in which if index not in own and not self._matcher.is_excluded(index, line)][:1]
        found = (self._fact(source, line, index) for index in matched)
        return [fact for fact in found if fact is not None]

    def _fact(self, source: LogSource, line: bytes, index: int) -> Fact | None:
        rule, names_rank = self._matcher.rules[index], self._matcher.names_rank[index]
        alike = rule.code, source.name, self._period(source, line)
        if self._fact_counts[alike] >= MAX_FACTS_PER_RULE and not names_rank:
            self.counts[rule.code] += 1
            return None
        if self._fact_count >= MAX_FACTS:
            self.counts[rule.code] += 1
            self.left_out += 1
            return None
        found = self._matcher.search(index, line)
        if found is None:  # the match crossed the line's end
            return None
        self.counts[rule.code] += 1
        if names_rank:
            alike = alike[0], f"{source.name}\0{found[1].get('rank')}", alike[2]
            if self._fact_counts[alike] >= MAX_FACTS_PER_RULE:
                return None
        if self._hide is not None:
            line = self._hide(_text(_excerpt(line, found[0], REDACTED_BYTES))).encode()
            found = self._matcher.search(index, line) or (0, {})
        start, values = found
        text = _text(_excerpt(line, start)).strip()
        if not self._budget.reserve(_FACT_BYTES + sum(map(sys.getsizeof, (text, *values.values())))):
            self.left_out += 1
            return None
        self._fact_counts[alike] += 1
        self._fact_count += 1
        if rule is LAUNCHER_STARTED:
            self._launcher_starts[source.name] += 1
        who = parse_process(text, source)
        if values.get("rank"):
            who = replace(who, rank=int(values["rank"][:9]))
        fact = Fact(rule=rule, source=source.name, line=0, text=text, process=who, values=values)
        clock = parse_timestamp(text)
        return replace(fact, at=clock.at, has_year=clock.has_year) if clock else fact

    def _period(self, source: LogSource, line: bytes) -> str:
        """The day of a line, else of the last one before it in its source, and how many launchers had started there."""
        if day := _DAY.search(line, 0, _DAY_BYTES):
            self._days[source.name] = day[0].decode()
        return f"{self._days.get(source.name)} {self._launcher_starts[source.name]}"


def _with_context(fact: Fact, data: bytes, start: int, end: int) -> Fact:
    """The fact with details from the lines above or below: frames, the rank of a summary, the time."""
    if fact.at is None and (clock := timestamp_above(data, start)) is not None:
        fact = replace(fact, at_of_previous_line=clock.at, has_year=clock.has_year)
    if fact.rule is STACK:
        found = thread_position(data, start, end)
        text = f"{fact.text} {found['stack_location']}" if found else fact.text
        return replace(fact, text=text, values={**fact.values, **found})
    if fact.rule is LAUNCHER_ROOT_CAUSE:
        who, how = torchrun_root_cause(data, start) or (fact.process, "")
        return replace(fact, process=who, values={**fact.values, "how": how})
    if fact.process.rank is None and (who := process_of_summary(data, start)) is not None:
        fact = replace(fact, process=who)
    if fact.rule.code == "name-resolution" and (client := service_client(data, start)):
        fact = replace(fact, rule=UNREACHABLE, values={"service": fact.values.get("name") or f"by {client}"})
    primary = fact.rule.role is Role.CAUSE
    at = (crashed_at(data, start, end) or raised_at(data, start, end)) if primary else None
    return replace(fact, values={**fact.values, "raised_at": at}) if at else fact


def _excerpt(line: bytes, start: int, most: int = LINE_BYTES) -> bytes:
    """The line; where it is long, its beginning and the surroundings of the match."""
    if len(line) > most:
        half = most // 2
        begin = max(half, start - most // 20)
        line = line[:half] + b" ... " + line[begin : begin + half]
    return line


def _text(value: bytes) -> str:
    return value.decode("utf-8", "replace")
