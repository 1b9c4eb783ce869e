"""The form in which logs reach every reader: chunks of whole lines, and their source."""

from __future__ import annotations

from typing import SupportsInt

from msgspec import Struct


class LogSource(Struct, frozen=True, kw_only=True):
    """One stream of log lines: a file, a member of an archive, standard input."""

    name: str
    """The path as given, or `-` for standard input."""
    node: str | None = None
    """The node whose ranks wrote it, where its path says."""
    rank: int | None = None
    """The rank that wrote it, where its name says; None for a file in which ranks are interleaved."""
    replica: int | None = None
    """The replica of that rank, where its path says; each replica counts its ranks from 0."""


class LogChunk(Struct, frozen=True, kw_only=True):
    """Whole lines of one source, as written: up to a few MiB, never ending within a line."""

    source: LogSource
    first_line: SupportsInt
    """The number of the first line, from 1; it may be counted on first use."""
    data: bytes
    single_line: bool = False
    """Whether the whole chunk is one line of the source."""
