"""Ranges of numbers and text in received messages, so that one absurd value cannot corrupt a log or a state.

Wide enough for every correct message. The receiver rejects what lies outside: an agent from its ranks, the controller
from its agents.
"""

from __future__ import annotations

import re
from typing import Any, Generic, TypeVar, cast

import msgspec

Message = TypeVar("Message")

_MAX_EXACT_INT = 2**53
"""JSON readers disagree on integers beyond this."""
_MAX_TIME_S = 1e11
"""Unix seconds until the year 5138, also for durations; sums of a few stay finite and exact to the microsecond."""
MAX_ITEMS = 65_536
MAX_TEXT = 65_536
MAX_METRICS = 128
"""Maximum metrics per step."""
MAX_METRIC_NAME = 128
"""Maximum length of a metric's name."""

_INT_RANGES: dict[str, tuple[int, int]] = {
    "step": (-1, _MAX_EXACT_INT),
    "last_step": (-1, _MAX_EXACT_INT),
    "attempt": (-1, 2**31),
    "rank": (0, 2**31),
    "pid": (0, 2**31),
    "port": (0, 65_535),
    "seq": (0, _MAX_EXACT_INT),
}
_ADDRESS = re.compile(r"[0-9A-Za-z._:%-]{1,255}")
"""A host name, IPv4 or IPv6 address; it becomes an environment variable of other nodes' ranks."""
_CODE = re.compile(r"[a-z0-9][a-z0-9-]{0,63}")
"""The code of a finding: printed unmodified and looked up."""
_PATTERNS = {"address": _ADDRESS, "code": _CODE}


class ValidatingDecoder(Generic[Message]):
    """Decodes JSON messages of some types; also raises msgspec.ValidationError for values out of range."""

    def __init__(self, kinds: Any) -> None:
        self._decoder: msgspec.json.Decoder[Message] = msgspec.json.Decoder(kinds)

    def decode(self, text: bytes) -> Message:
        message = self._decoder.decode(text)
        if isinstance(message, msgspec.Struct) and (problem := out_of_range(message)):
            raise msgspec.ValidationError(f"out of bounds: {problem}")
        return message


def out_of_range(message: msgspec.Struct) -> str:
    """The first out-of-range value of a message, such as `step: 36893488147419103232`; empty if there is none."""
    for name in message.__struct_fields__:
        if problem := _out_of_range_value(name, getattr(message, name)):
            return problem
    return ""


def _out_of_range_value(name: str, value: Any) -> str:
    match value:
        case int():
            low, high = _INT_RANGES.get(name, (-_MAX_EXACT_INT, _MAX_EXACT_INT))
            valid = low <= value <= high
        case float():
            valid = abs(value) <= _MAX_TIME_S
        case str():
            shape = _PATTERNS.get(name)
            valid = len(value) <= MAX_TEXT if shape is None else shape.fullmatch(value) is not None
        case dict():
            metrics = cast("dict[str, float]", value)
            valid = len(metrics) <= MAX_METRICS and all(len(key) <= MAX_METRIC_NAME for key in metrics)
        case tuple():
            items = cast("tuple[object, ...]", value)
            inner = (problem for item in items if isinstance(item, msgspec.Struct) if (problem := out_of_range(item)))
            valid = len(items) <= MAX_ITEMS
            if valid and (problem := next(inner, "")):
                return f"{name}: {problem}"
        case msgspec.Struct():
            return out_of_range(value)
        case _:
            valid = True
    return "" if valid else f"{name}: {value!r:.100}"
