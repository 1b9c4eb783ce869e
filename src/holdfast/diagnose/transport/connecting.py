"""Owns making connections of what their lines say: all at once that a thread has told of, when somebody needs to know.

Lines of one connection differ in the number of the channel, so what follows it is parsed once for all of them.
Refuses to own who wrote a line (reading.py) and its wording (grammar.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import partial

from holdfast.diagnose.room import Room
from holdfast.diagnose.transport import grammar
from holdfast.diagnose.transport.quoting import Quoting, TooMuch
from holdfast.diagnose.transport.records import LINE_BYTES, LINK_BYTES, UNTIL_CUT_BYTES, ProcessRecord, ThreadRecord
from holdfast.diagnose.transport.result import Link

_MOST_ROUTES = 256
"""Kinds of ways by their names, of which a job has ten."""


class Connecting:
    """Turns what threads have told into connections, for all threads of a pile."""

    def __init__(self, room: Room, processes: Sequence[ProcessRecord]) -> None:
        self._room, self._processes = room, processes
        self._routes: set[str] = set()
        self.torn = 0
        """Lines that were cut or mixed with others."""
        self.left_out = 0
        """Lines for which there was no room."""

    def settle(self, thread: ThreadRecord, quoting: Quoting) -> None:
        """Parse what the thread has told in the block that `quoting` quotes."""
        connections, process = thread.connections, self._processes[thread.process]
        for said, (channels, number) in thread.told.items():
            end, _, words = said.partition(b" : ")
            words = words.partition(b"\n")[0]
            if end not in grammar.ENDS:
                continue
            if (known := connections.get(words)) is not None:
                known.channels |= channels
                continue
            if len(words) > LINE_BYTES or (ends := grammar.connection(words)) is None:
                self.torn += 0 if grammar.is_ring(words) else channels.bit_count()
                continue
            sender, receiver, way, own = ends
            until_cut = UNTIL_CUT_BYTES + len(words)
            admitted = way.route in process.evidence or self._admits(way.route)
            if not admitted or not self._room.take(LINK_BYTES + until_cut):
                self.left_out += channels.bit_count()
                continue
            connections[words] = Link(sender, receiver, channels, way, own)
            thread.until_cut_bytes += until_cut
            if way.route not in process.evidence:
                with suppress(TooMuch):
                    process.note(way.route, way.route, partial(quoting.at, number))
        thread.told.clear()

    def is_cut(self, said: bytes) -> None:
        """A line ends with the pile itself; what is missing could be `/GDRDMA`."""
        self.torn += said.partition(b" : ")[0] in grammar.ENDS

    def _admits(self, route: str) -> bool:
        """Whether there are not too many kinds of ways yet."""
        if len(self._routes) < _MOST_ROUTES:
            self._routes.add(route)
        return route in self._routes
