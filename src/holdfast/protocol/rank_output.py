"""Prefix of a rank's lines in its agent's standard output: rank and attempt.

`[rank 3, attempt 0] text`; with several replicas `[replica 1, rank 3, attempt 0] text`. A `+` after the bracket means
that the rank's next line continues this one.
"""

from __future__ import annotations

import re

from msgspec import Struct

_LINE = re.compile(
    rb"\[(?:replica (?P<replica>\d{1,9}), )?rank (?P<rank>\d{1,9}), attempt (?P<attempt>\d{1,9})\]"
    rb"(?P<more>\+?) (?P<text>.*)",
    re.DOTALL,
)


class OutputSource(Struct, frozen=True, kw_only=True):
    """The rank and attempt that wrote a line."""

    replica: int
    rank: int
    attempt: int

    def label(self, *, has_replicas: bool) -> str:
        """The prefix of its lines; `has_replicas` is whether the run has several replicas."""
        replica = f"replica {self.replica}, " if has_replicas else ""
        return f"[{replica}rank {self.rank}, attempt {self.attempt}]"


class RankOutput(Struct, frozen=True):
    """A part of a rank's output."""

    source: OutputSource
    text: bytes
    has_replicas: bool
    """Whether the run has several replicas."""


def parse_line(line: bytes) -> RankOutput | None:
    """Parse a line of an agent's standard output, without its newline; None for the agent's own lines."""
    found = _LINE.fullmatch(line)
    if found is None:
        return None
    source = OutputSource(replica=int(found["replica"] or 0), rank=int(found["rank"]), attempt=int(found["attempt"]))
    text = found["text"] if found["more"] else found["text"] + b"\n"
    return RankOutput(source, text, found["replica"] is not None)
