"""Figures and foreign text, as a person reads them."""

from __future__ import annotations

import pytest

from holdfast.report.formatting import count, duration, format_numbers, percentage, sanitize, size


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (-1, "0.0 s"),
        (0, "0.0 s"),
        (0.004, "0.0 s"),
        (0.414, "0.41 s"),
        (1, "1.0 s"),
        (9.26, "9.3 s"),
        (59.9, "59.9 s"),
        (59.96, "1 min 00 s"),
        (94, "1 min 34 s"),
        (3599.7, "1 h 00 min"),
        (7500, "2 h 05 min"),
        (3 * 86400 + 4 * 3600, "3 d 04 h"),
    ],
)
def test_duration_reads_as_a_person_would_say_it(seconds: float, words: str) -> None:
    assert duration(seconds) == words


def test_counts_shares_and_lists() -> None:
    assert (count(1, "step"), count(0, "step"), count(10_000, "step")) == ("1 step", "0 steps", "10,000 steps")
    assert percentage(0.7123) == "71.2 %"
    assert [size(each) for each in (0, 714, 1_000, 1_360_000_000)] == ["", "714 B", "1 kB", "1.36 GB"]
    assert (format_numbers([]), format_numbers([3]), format_numbers([5, 0, 2, 1, 1])) == ("", "3", "0-2, 5")


def test_long_text_is_truncated_with_a_note() -> None:
    assert sanitize("x" * 12, longest=10) == "xxxxxxxxxx… (2 more characters)"
