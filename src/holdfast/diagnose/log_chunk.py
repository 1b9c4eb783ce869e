"""Owns the form in which logs reach everything that reads them: blocks of whole lines, and where they came from.

Refuses to own how a pile becomes blocks, and what a line means.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import SupportsInt


@dataclass(frozen=True, kw_only=True)
class LogSource:
    """One stream of log lines: a file, a member of an archive, standard input."""

    name: str
    """As a person would find it: the path as given, or `-` for standard input."""
    node: str | None = None
    """The node whose ranks wrote it, where the place it lies in says so."""
    rank: int | None = None
    """The rank that wrote it, where its name says so; None for a file in which ranks are interleaved."""
    replica: int | None = None
    """The replica whose rank that is, where the place it lies in says so; ranks are counted in each from 0."""


@dataclass(frozen=True, kw_only=True)
class LogChunk:
    """Whole lines of one source, as they were written: up to a few MiB, never ending within a line."""

    source: LogSource
    first_line: SupportsInt
    """The number of the first line, from 1; it may be counted only when somebody asks."""
    data: bytes
    single_line: bool = False
    """Whether all of it stands in one line of the source."""
