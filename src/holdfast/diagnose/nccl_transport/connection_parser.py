"""Parses the connection lines that a thread has written, all together when first needed.

Lines of one connection differ in the channel number, so the rest is parsed once for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import partial

from holdfast.diagnose.memory_budget import MemoryBudget
from holdfast.diagnose.nccl_transport import line_patterns
from holdfast.diagnose.nccl_transport.line_quoter import LineQuoter, OverBudget
from holdfast.diagnose.nccl_transport.process_records import (
    LINE_BYTES,
    LINK_BYTES,
    PENDING_LINK_BYTES,
    ProcessRecord,
    ThreadRecord,
)
from holdfast.diagnose.nccl_transport.transport_report import Link

_MAX_ROUTES = 256
"""Distinct link types by name; a job has ten."""


class ConnectionParser:
    """Turns the threads' lines into connections, for all threads of an input."""

    def __init__(self, room: MemoryBudget, processes: Sequence[ProcessRecord]) -> None:
        self._budget, self._processes = room, processes
        self._routes: set[str] = set()
        self.truncated = 0
        """Lines that were cut or mixed with others."""
        self.left_out = 0
        """Lines over the memory budget."""

    def parse_pending(self, thread: ThreadRecord, quoter: LineQuoter) -> None:
        """Parses the thread's lines of the chunk that `quoting` quotes."""
        connections, process = thread.connections, self._processes[thread.process]
        for text, (channels, number) in thread.unparsed.items():
            end, _, words = text.partition(b" : ")
            words = words.partition(b"\n")[0]
            if end not in line_patterns.ENDS:
                continue
            thread.mixed = thread.mixed or (end not in line_patterns.COLLECTIVE_ENDS and b" via NET" in words)
            if (known := connections.get(words)) is not None:
                known.channels |= channels
                continue
            if len(words) > LINE_BYTES or (ends := line_patterns.parse_connection(words)) is None:
                self.truncated += 0 if line_patterns.is_ring(words) else channels.bit_count()
                continue
            sender, receiver, way, own = ends
            until_cut = PENDING_LINK_BYTES + len(words)
            admitted = way.route in process.evidence or self._admits(way.route)
            if not admitted or not self._budget.reserve(LINK_BYTES + until_cut):
                self.left_out += channels.bit_count()
                continue
            connections[words] = Link(sender, receiver, channels, way, own)
            thread.pending_bytes += until_cut
            if way.route not in process.evidence:
                with suppress(OverBudget):
                    process.note(way.route, way.route, partial(quoter.quote, number))
        thread.unparsed.clear()

    def count_truncated(self, text: bytes) -> None:
        """A line ends with the input itself; the missing part could be `/GDRDMA`."""
        self.truncated += text.partition(b" : ")[0] in line_patterns.ENDS

    def _admits(self, route: str) -> bool:
        """Whether the number of link types is still within its limit."""
        if len(self._routes) < _MAX_ROUTES:
            self._routes.add(route)
        return route in self._routes
