"""Owns what a number or a text in anybody's word may be, so that one absurd value cannot spoil a log or a state.

Wide enough for every honest word. What decodes but lies outside is refused where it enters: by an agent from its
ranks, by the controller from its agents.
"""

from __future__ import annotations

import re
from typing import Any, Generic, TypeVar, cast

import msgspec

Word = TypeVar("Word")

_HUGE = 2**53
"""Whole numbers beyond it are not the same in every reader of JSON."""
_TIME_S = 1e11
"""Unix seconds until the year 5138, and spans of as many; sums of a few stay finite and exact to the microsecond."""
ITEMS = 65_536
TEXT = 65_536
METRICS = 128
"""Metrics that a step may have."""
NAME_CHARACTERS = 128
"""Longest name of a metric."""

_WHOLE: dict[str, tuple[int, int]] = {
    "step": (-1, _HUGE),
    "last_step": (-1, _HUGE),
    "attempt": (-1, 2**31),
    "rank": (0, 2**31),
    "pid": (0, 2**31),
    "port": (0, 65_535),
    "seq": (0, _HUGE),
}
_ADDRESS = re.compile(r"[0-9A-Za-z._:%-]{1,255}")
"""A name or an address of either kind: it becomes a variable of other nodes' ranks."""
_CODE = re.compile(r"[a-z0-9][a-z0-9-]{0,63}")
"""The code of a finding: it is printed as it is, and looked up."""
_SHAPES = {"address": _ADDRESS, "code": _CODE}


class Decoder(Generic[Word]):
    """Decodes words of some kinds from JSON; raises msgspec.ValidationError for those that cannot be, too."""

    def __init__(self, kinds: Any) -> None:
        self._decoder: msgspec.json.Decoder[Word] = msgspec.json.Decoder(kinds)

    def decode(self, text: bytes) -> Word:
        word = self._decoder.decode(text)
        if isinstance(word, msgspec.Struct) and (said := implausible(word)):
            raise msgspec.ValidationError(f"out of bounds: {said}")
        return word


def implausible(word: msgspec.Struct) -> str:
    """What about a decoded word cannot be, such as `step: 36893488147419103232`; empty when all of it can."""
    for name in word.__struct_fields__:
        if said := _wrong(name, getattr(word, name)):
            return said
    return ""


def _wrong(name: str, value: Any) -> str:
    match value:
        case int():
            low, high = _WHOLE.get(name, (-_HUGE, _HUGE))
            fine = low <= value <= high
        case float():
            fine = abs(value) <= _TIME_S
        case str():
            shape = _SHAPES.get(name)
            fine = len(value) <= TEXT if shape is None else shape.fullmatch(value) is not None
        case dict():
            metrics = cast("dict[str, float]", value)
            fine = len(metrics) <= METRICS and all(len(key) <= NAME_CHARACTERS for key in metrics)
        case tuple():
            items = cast("tuple[object, ...]", value)
            inner = (said for item in items if isinstance(item, msgspec.Struct) if (said := implausible(item)))
            fine = len(items) <= ITEMS
            if fine and (said := next(inner, "")):
                return f"{name}: {said}"
        case msgspec.Struct():
            return implausible(value)
        case _:
            fine = True
    return "" if fine else f"{name}: {value!r:.100}"
