"""Owns what is gathered while lines go by: mutable, and compact, since there are tens of thousands of processes.

Refuses to own reading (reading.py) and what becomes of it (placing.py).
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from holdfast.diagnose.memory_budget import MemoryBudget
from holdfast.diagnose.nccl_transport.transport_report import Link, LogLine

LINE_BYTES = 1024
"""NCCL's own buffer for a line."""
LINK_BYTES = 130
"""What a connection takes to the end, and in the walks over those of its communicator."""
PENDING_LINK_BYTES = 150
"""What it takes beside its own words until its session is cut."""
BATCH_BYTES = 400

Quote = Callable[[], LogLine]
"""The line that is read, as evidence; only called for what is kept."""


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
    """Which split of its parent it came from, and of which colour; empty where that is not said."""
    complete: bool = False
    nodes: int | None = None
    links: list[Link] = []
    stages: set[bytes] = set()
    """What of it is connected: rings, trees, …; each is connected once."""
    inferred: int = 0


class ConnectionBatch(msgspec.Struct, eq=False):
    """Connections that one thread made in one go, all of one communicator."""

    thread: ThreadRecord
    links: list[Link]
    stage: bytes
    """What was connected then, such as `all rings`; empty where that is not said."""
    comm: CommInit | None
    """None for those made after the set-up (all of them, from 2.22 on): whose they are is found at the end."""


class ThreadRecord(msgspec.Struct, kw_only=True, eq=False):
    """A thread of a process: what it sets up now, and what it has connected meanwhile."""

    process: int
    budget: MemoryBudget
    """What there is for all threads."""
    initializing: CommInit | None = None
    """The communicator that it has begun and not ended; versions before 2.18.3 only say the end."""
    init_line: bytes = b""
    """What the line that began it says of it; the one that ends it says the same."""
    unparsed: dict[bytes, list[int]] = {}
    """By what follows `AgentClient 00` in lines that nobody has parsed yet: a bit for each channel, and the first line."""
    connections: dict[bytes, Link] = {}
    """By what follows `AgentClient 00/0 : ` in their lines."""
    pending_bytes: int = 0
    """What those take until they are cut."""
    batches: list[ConnectionBatch] = []
    """What it connected before these, since it last began a set-up."""
    split: tuple[str, str] = ("", "")
    """Parent and colour of the split that it is about to set up."""


class ProcessRecord(msgspec.Struct, kw_only=True, eq=False):
    """What one process has said so far."""

    node: str
    """That of the source it wrote into; empty where that says none."""
    host: str
    pid: int
    source: str = ""
    """Where its first line stands."""
    replica: int | None = None
    facts: dict[str, str] = {}
    env: dict[str, str] = {}
    hcas: tuple[str, ...] = ()
    interfaces: tuple[str, ...] = ()
    evidence: dict[str, LogLine] = {}
    quoted: dict[bytes | str, LogLine] = {}
    """What is quoted already, by its words; all processes of a host share it, since they mostly say the same."""
    comms: list[CommInit] = []
    batches: list[ConnectionBatch] = []

    def note(self, name: str, said: bytes | str, quote: Quote) -> None:
        """Keep the line that a fact comes from, or one of the same words on the same host."""
        line = self.quoted.get(said)
        if line is None:
            line = self.quoted[said] = quote()
        self.evidence[name] = line
