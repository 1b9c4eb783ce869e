"""Owns the shape of an explanation."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """What a code means, for somebody who has only seen the code."""

    code: str
    """As it is written where it is seen: `rank-crashed`, `XID-79`, `SIGBUS`, `ncclSystemError`."""
    title: str = ""
    """Its own name in words, where it has one beside the code."""
    cause: str
    confirm: str
    """What to look at, or to run, to know that it is this."""
    remedy: str
    source: str
    names: tuple[str, ...] = ()
    """What else it is seen as: `137` and `-9` for SIGKILL."""
