"""Cuts text and metrics that come from a program to what an event can hold, so that no message is refused for them."""

from __future__ import annotations

from typing import Any, TypeVar, cast

import msgspec

from holdfast.events.bounds import ITEMS, TEXT
from holdfast.events.metrics import sift
from holdfast.findings import Finding

Word = TypeVar("Word", bound=msgspec.Struct)

WHAT = REMEDY = EVIDENCE = 2000
WHERE = 4096
"""Characters of a finding's fields; a place may be a path."""
EVIDENCE_LINES = 64


def clipped(word: Word) -> Word:
    """The same message with long text cut and with those of its metrics that an event can hold."""
    if isinstance(word, Finding):
        return clipped_finding(word)
    values = {name: getattr(word, name) for name in word.__struct_fields__}
    cut = {name: _cut(value) for name, value in values.items()}
    changed = {name: value for name, value in cut.items() if value is not values[name]}
    return msgspec.structs.replace(word, **changed) if changed else word


def clipped_finding(finding: Finding) -> Finding:
    """The same finding with long text cut, and without evidence beyond the first lines."""
    lines = finding.evidence[:EVIDENCE_LINES]
    if left := len(finding.evidence) - len(lines):
        lines = (*lines[:-1], f"and {left + 1:,} more lines")
    return msgspec.structs.replace(
        finding,
        what=_shortened(finding.what, WHAT),
        where=_shortened(finding.where, WHERE),
        evidence=tuple(_shortened(line, EVIDENCE) for line in lines),
        remedy=_shortened(finding.remedy, REMEDY),
    )


def _cut(value: Any) -> Any:
    match value:
        case str():
            return _shortened(value, TEXT)
        case dict():
            return sift(cast("dict[str, float]", value))[0]
        case tuple():
            return tuple(map(_cut, cast("tuple[Any, ...]", value)[:ITEMS]))
        case msgspec.Struct():
            return clipped(value)
        case _:
            return value


def _shortened(text: str, longest: int) -> str:
    if len(text) <= longest:
        return text
    end = f"... ({len(text):,} characters in all)"
    return text[: longest - len(end)] + end
