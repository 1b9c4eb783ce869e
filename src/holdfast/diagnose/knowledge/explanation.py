"""The form of an explanation."""

from __future__ import annotations

from msgspec import Struct


class Explanation(Struct, frozen=True, kw_only=True):
    """What a code means, for a reader who has only seen the code."""

    code: str
    """The code as it appears in output: `rank-crashed`, `XID-79`, `SIGBUS`, `ncclSystemError`."""
    title: str = ""
    """Its title, where it has one besides the code."""
    cause: str
    confirm: str
    """What to check or run to confirm it."""
    remedy: str
    source: str
    names: tuple[str, ...] = ()
    """Aliases: `137` and `-9` for SIGKILL."""
