"""Searches logs for many patterns in one pass, with Hyperscan or with RE2.

Both take time linear in their input, so no logged text can make a pattern hang. Hyperscan is three times as fast,
but takes 1.4 s to compile all rules, so it is used for large inputs only, and where it is installed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import cache
from typing import Any, cast

import re2

OnMatch = Callable[[int, int, int, int, object], None]
"""Called with the index of a pattern, a begin that may be 0, the end of its match, and two unused arguments."""
PatternScan = Callable[[bytes, OnMatch], None]
"""Calls back for every match in the data, in the order of each pattern's matches."""
_BLOCK_BYTES = 1 << 13
"""Lines that RE2 searches together for the strings that patterns require."""


def compile_scan(patterns: Sequence[bytes], *, once: Collection[bytes] = (), is_large: bool = True) -> PatternScan:
    """A scan for all patterns in an input of some size; of those in `once` it need only report the first match."""
    if not is_large:
        return _re2_scan(patterns)
    try:
        import hyperscan
    except ModuleNotFoundError:  # the extra `diagnose` is not installed
        return _re2_scan(patterns)

    database = hyperscan.Database()
    database.compile(
        expressions=patterns,
        ids=list(range(len(patterns))),
        elements=len(patterns),
        flags=[hyperscan.HS_FLAG_SINGLEMATCH if each in once else hyperscan.HS_FLAG_MULTILINE for each in patterns],
    )
    return lambda data, on_match: database.scan(data, match_event_handler=on_match)


def compile_re2(pattern: str):
    """A pattern that searches bytes, whatever their encoding."""
    return re2.compile(pattern.encode(), _latin1())


def _re2_scan(patterns: Sequence[bytes]) -> PatternScan:
    """The same for blocks of lines: RE2 searches for strings that the patterns require, then for the patterns left."""
    required = cast("Any", re2).Filter()  # the type stubs lack it, and `never_nl`
    for each in patterns:
        required.Add(each, _latin1())
    required.Compile()
    within_line: Any = _latin1()
    within_line.never_nl = True

    @cache
    def compiled(index: int) -> Any:
        return re2.compile(b"(?m)" + patterns[index], within_line)

    def scan(data: bytes, on_match: OnMatch) -> None:
        start = 0
        while start < len(data):
            end = data.rfind(b"\n", start, start + _BLOCK_BYTES) + 1 or data.find(b"\n", start) + 1 or len(data)
            block = data[start:end]
            for index in required.Match(block, potential=True) or ():
                for found in compiled(index).finditer(block):
                    on_match(index, 0, start + found.end(), 0, None)
            start = end

    return scan


def _latin1() -> re2.Options:
    options = re2.Options()
    options.encoding = re2.Options.Encoding.LATIN1
    return options
