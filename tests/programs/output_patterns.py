"""A rank with a pattern of output: `output_patterns.py WAY [WORD]`; all its output is unbuffered."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

NUMBERED = b"line %07d of a rank that has much to say\n"


def say(content: bytes) -> None:
    while content:
        content = content[os.write(1, content) :]


def lines(count: str) -> None:
    """COUNT numbered lines, as fast as possible."""
    for begin in range(0, int(count), 1000):
        say(b"".join(NUMBERED % number for number in range(begin, min(begin + 1000, int(count)))))


def anything(_: str) -> None:
    """Everything that may break a reader, then a last line without an end."""
    say(b"first\n" + b"x" * 10_000_000 + b"\n")
    say(bytes(range(256)) + b"\n")
    say(b"\x1b[31mred\x1b[0m \x1b]0;a title\x07\x1b[2J\x1b[10Aafter\n")
    say(b"".join(b"\r%3d%%" % percent for percent in range(101)) + b"\n")
    umlaut = "ü\n".encode()
    say(umlaut[:1])
    say(umlaut[1:])
    say(b"no end")


LEAST_DRAWN = 1000


def bar(until: str) -> None:
    """A progress bar that runs until a file exists, and long enough; the last line has the number of redraws."""
    drawn = 0
    while drawn < LEAST_DRAWN or not Path(until).exists():
        drawn += 1
        say(b"\r%d it |####    |" % drawn)
    say(b"\ndrawn %d times\n" % drawn)


WAYS: dict[str, Callable[[str], None]] = {"lines": lines, "anything": anything, "bar": bar}

if __name__ == "__main__":
    WAYS[sys.argv[1]](sys.argv[2] if len(sys.argv) > 2 else "")
