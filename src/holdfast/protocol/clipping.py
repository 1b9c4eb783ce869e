"""Cuts text and metrics that come from a program to what an event can hold, so that no message is refused for them."""

from __future__ import annotations

from typing import Any, TypeVar, cast

import msgspec

from holdfast.findings import Finding
from holdfast.protocol.metric_validation import split_valid_metrics
from holdfast.protocol.validation import MAX_ITEMS, MAX_TEXT

ClippableMessage = TypeVar("ClippableMessage", bound=msgspec.Struct)

MAX_WHAT = MAX_REMEDY = MAX_EVIDENCE = 2000
MAX_WHERE = 4096
"""Maximum characters of a finding's field; a `where` may be a path."""
MAX_EVIDENCE_LINES = 64


def clip(message: ClippableMessage) -> ClippableMessage:
    """The same message with long text cut and with those of its metrics that an event can hold."""
    if isinstance(message, Finding):
        return clip_finding(message)
    values = {name: getattr(message, name) for name in message.__struct_fields__}
    cut = {name: _clip_value(value) for name, value in values.items()}
    changed = {name: value for name, value in cut.items() if value is not values[name]}
    return msgspec.structs.replace(message, **changed) if changed else message


def clip_finding(finding: Finding) -> Finding:
    """The same finding with long text cut, and without evidence beyond the first lines."""
    lines = finding.evidence[:MAX_EVIDENCE_LINES]
    if left := len(finding.evidence) - len(lines):
        lines = (*lines[:-1], f"and {left + 1:,} more lines")
    return msgspec.structs.replace(
        finding,
        what=_clip_text(finding.what, MAX_WHAT),
        where=_clip_text(finding.where, MAX_WHERE),
        evidence=tuple(_clip_text(line, MAX_EVIDENCE) for line in lines),
        remedy=_clip_text(finding.remedy, MAX_REMEDY),
    )


def _clip_value(value: Any) -> Any:
    match value:
        case str():
            return _clip_text(value, MAX_TEXT)
        case dict():
            return split_valid_metrics(cast("dict[str, float]", value))[0]
        case tuple():
            return tuple(map(_clip_value, cast("tuple[Any, ...]", value)[:MAX_ITEMS]))
        case msgspec.Struct():
            return clip(value)
        case _:
            return value


def _clip_text(text: str, longest: int) -> str:
    if len(text) <= longest:
        return text
    end = f"... ({len(text):,} characters in all)"
    return text[: longest - len(end)] + end
