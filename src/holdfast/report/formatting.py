"""Formats numbers, durations and untrusted text for the terminal."""

from __future__ import annotations

import re

from holdfast.events import Ranges, to_ranges

MAX_LINE_CHARS = 4000
"""Maximum characters shown of one line of untrusted text."""

_COLOUR = r"\x1b\[[0-9;:]*m"
_SEQUENCE = re.compile(
    rf"(?P<colour>{_COLOUR})"
    r"|\x1b(?:\[[0-?]*[ -/]*[@-~]"  # CSI: cursor, erasing, modes
    r"|[]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)"  # OSC, DCS and their like: titles, links, the clipboard
    r"|[ -/]+[0-~]|[0-OQ-WYZ`-~=>])"  # character sets, save and restore, reset
)
_UNSEEN = re.compile(rf"(?P<colour>{_COLOUR})|[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_TORN_COLOUR = re.compile(r"\x1b[^m]*\Z")
_RESET = "\x1b[0m"


def duration(seconds: float) -> str:
    """`0.41 s`, `9.3 s`, `1 min 34 s`, `2 h 05 min`, `3 d 04 h`; negative values become zero."""
    if seconds < 59.95:
        return f"{max(seconds, 0.0):.{2 if 0.005 <= seconds < 0.995 else 1}f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02} min"
    return f"{whole // 86400} d {whole % 86400 // 3600:02} h"


def count(number: int, noun: str) -> str:
    """`1 restart`, `2 restarts`, `10,000 steps`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def size(size_bytes: int) -> str:
    """`714 B`, `1.36 GB`; empty for 0, an unknown size."""
    if size_bytes <= 0:
        return ""
    power = next((power for power in (4, 3, 2, 1) if size_bytes >= 1000**power), 0)
    return f"{size_bytes / 1000**power:.3g} {('B', 'kB', 'MB', 'GB', 'TB')[power]}"


def percentage(part: float) -> str:
    """A fraction as a percentage: `71.2 %`."""
    return f"{100 * part:.1f} %"


def format_numbers(numbers: list[int]) -> str:
    """Sorted numbers as ranges: `0-3, 5`."""
    return format_ranges(to_ranges(numbers))


def format_ranges(spans: Ranges) -> str:
    """Ranges of numbers: `0-3, 5`."""
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in spans)


def short_digest(digest: str) -> str:
    """The first twelve characters of a digest."""
    return digest[:12]


def sanitize(text: str, longest: int = MAX_LINE_CHARS, *, colours: bool = False) -> str:
    """One line of untrusted text without terminal control sequences, truncated to `longest` characters.

    Colours are removed too unless `colours` is set; then they are reset at the end of the line.
    """
    clean = _SEQUENCE.sub(lambda found: (colours and found["colour"]) or "", text)
    if len(clean) > longest:
        head = _TORN_COLOUR.sub("", clean[:longest])
        clean = f"{head}… ({len(clean) - longest:,} more characters)"
    seen = _UNSEEN.sub(lambda found: (colours and found["colour"]) or ascii(found[0])[1:-1], clean)
    return f"{seen}{_RESET}" if colours and "\x1b" in seen else seen
