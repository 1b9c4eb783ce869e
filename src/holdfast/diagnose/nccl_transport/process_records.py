"""The records built up while lines are read: mutable, and compact, since there are tens of thousands of processes.

setup_log_reader.py fills them, and link_assigner.py uses them.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from holdfast.diagnose.memory_budget import MemoryBudget
from holdfast.diagnose.nccl_transport.transport_report import Link, LogLine

LINE_BYTES = 1024
"""NCCL's own buffer for a line."""
LINK_BYTES = 130
"""Bytes per connection to the end, and in the passes over those of its communicator."""
PENDING_LINK_BYTES = 150
"""Bytes besides its own text until its session is cut."""
BATCH_BYTES = 400

Quote = Callable[[], LogLine]
"""The current line as evidence; only called for what is kept."""


class CommInit(msgspec.Struct, kw_only=True, eq=False):
    """A communicator as one of its processes sees it."""

    process: int
    pointer: str
    rank: int
    size: int
    device: int
    nvml: int | None
    bus: str
    evidence: LogLine
    id: str = ""
    parent: str = ""
    split: str = ""
    """The index of its parent's split, and its colour; empty where unknown."""
    complete: bool = False
    nodes: int | None = None
    links: list[Link] = []
    stages: set[bytes] = set()
    """What of it is connected: rings, trees, …; each is connected once."""
    inferred: int = 0
    mixed: bool = False
    """Whether it has connections that are not, or perhaps not, those of complete rings or trees."""


class ConnectionBatch(msgspec.Struct, eq=False):
    """Connections that one thread made in one go, all of one communicator."""

    thread: ThreadRecord
    links: list[Link]
    stage: bytes
    """What was connected then, such as `all rings`; empty where unknown."""
    comm: CommInit | None
    """None for those made after the set-up (all of them, from 2.22 on): their communicator is found at the end."""
    mixed: bool
    """Whether not all of them are certain to be of collectives."""


class ThreadRecord(msgspec.Struct, kw_only=True, eq=False):
    """A thread of a process: its current set-up, and its connections since."""

    process: int
    budget: MemoryBudget
    """State shared by all threads."""
    initializing: CommInit | None = None
    """The communicator that it has begun and not finished; versions before 2.18.3 only log the end."""
    init_line: bytes = b""
    """The first line's fields; the last line repeats them."""
    unparsed: dict[bytes, list[int]] = {}
    """Unparsed lines by the text after `Channel 00`: a bit per channel, and the first line."""
    connections: dict[bytes, Link] = {}
    """Connections by the text after `Channel 00/0 : ` in their lines."""
    pending_bytes: int = 0
    """Their size until they are cut."""
    mixed: bool = False
    """Whether one of them is, or may be, of a single pair of ranks (send and receive)."""
    batches: list[ConnectionBatch] = []
    """What it connected before these, since it last began a set-up."""
    split: tuple[str, str] = ("", "")
    """Parent and colour of the split that it is about to set up."""


class ProcessRecord(msgspec.Struct, kw_only=True, eq=False):
    """The record of one process so far."""

    node: str
    """The node of the source it wrote into; empty where that names none."""
    host: str
    pid: int
    source: str = ""
    """The location of its first line."""
    replica: int | None = None
    facts: dict[str, str] = {}
    env: dict[str, str] = {}
    hcas: tuple[str, ...] = ()
    interfaces: tuple[str, ...] = ()
    evidence: dict[str, LogLine] = {}
    quoted: dict[bytes | str, LogLine] = {}
    """Quoted lines by their text; all processes of a host share it, since they mostly log the same."""
    failures: set[str] = set()
    """The causes of failures warned of since it last began or ended a set-up."""
    comms: list[CommInit] = []
    batches: list[ConnectionBatch] = []

    def note(self, name: str, text: bytes | str, quote: Quote) -> None:
        """Keeps the line that a fact comes from, or an equal one of the same host."""
        line = self.quoted.get(text)
        if line is None:
            line = self.quoted[text] = quote()
        self.evidence[name] = line
