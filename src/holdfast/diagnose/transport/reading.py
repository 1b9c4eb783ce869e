"""Owns the one pass over the lines: which thread of which process wrote what, at the speed of splitting bytes.

A set-up log is mostly connection lines, and those of one thread differ mostly in the number of the channel. So a line
is cut at the channel, and what follows is a key that is parsed once, however many channels it has. Where the next line
begins as this one does, which it mostly does, nobody need look for its writer.

Refuses to own what a message means (messages.py) and whose a connection is (placing.py).
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from contextlib import suppress
from itertools import islice

from holdfast.diagnose.block import Block, Source
from holdfast.diagnose.collecting import collected_rarely
from holdfast.diagnose.room import SET_UP_BYTES, Room
from holdfast.diagnose.transport import grammar
from holdfast.diagnose.transport.grammar import MARK, words
from holdfast.diagnose.transport.joining import join
from holdfast.diagnose.transport.messages import Handler, cut, handler
from holdfast.diagnose.transport.records import LINK_BYTES, UNTIL_CUT_BYTES, ProcessRecord, Quote, ThreadRecord
from holdfast.diagnose.transport.result import Evidence, Link, Transport
from holdfast.diagnose.transport.verdict import judged
from holdfast.fabric.catalog import Fabric

# What is kept beyond its own text, as measured at the end of piles that hold one kind only
_PROCESS_BYTES = 1536
_THREAD_BYTES = 768
_QUOTED_ONCE_BYTES = 1024
"""Of a line that is quoted, and of what is noted with it: a communicator, a variable, a fact."""
_SOURCE_BYTES = 256
_MOST_PROCESSES = 1 << 16
"""No job has more, and time grows with them."""
_MOST_ROUTES = 256
"""Kinds of ways by their names, of which a job has ten."""
_MOST_VERSIONS = 64
_MOST_WORDS = 1 << 13
"""Of beginnings of messages, how many are remembered."""
_NOTHING: dict[bytes, Link] = {}
_LONGEST_BYTES = 1024
"""NCCL's own buffer for a line."""
_QUOTED_BYTES = 240


@collected_rarely()
def read(blocks: Iterable[Block], expected: Fabric | None = None, *, most_bytes: int = SET_UP_BYTES) -> Transport:
    """What the fabric did by these logs; `expected` is the fabric that the job was meant to use, where that is known.

    Sources may come in any order, interleaved too, as long as the blocks of each come in theirs. No more than
    `most_bytes` are kept of them.
    """
    reading = Reading(most_bytes)
    for block in blocks:
        reading.feed(block)
    return reading.result(expected)


class _TooMuch(Exception):
    """More was said than is kept."""


class Reading:
    """The pass, for who has other use for the blocks too: `feed` each, then ask for the `result`."""

    def __init__(self, most_bytes: int = SET_UP_BYTES) -> None:
        self._room = Room(most_bytes)
        self._processes: list[ProcessRecord] = []
        self._numbers: dict[tuple[str, str, int], int] = {}
        self._threads: dict[str | None, dict[bytes, ThreadRecord]] = {}
        self._quoted: dict[tuple[str, str], dict[bytes | str, Evidence]] = {}
        self._begun: dict[bytes, Handler | None] = {}
        """The handlers of messages by their beginnings; None for messages that have none."""
        self._ends: set[bytes] = set()
        """What has stood between channel and connection."""
        self._versions: dict[str, Evidence] = {}
        self._replicas: dict[str, int | None] = {}
        self.info_lines = 0
        """How many lines NCCL wrote at level INFO, so far."""
        self._torn = 0
        self._routes: set[str] = set()
        self.left_out = 0
        """Lines for which there was no room."""

    def feed(self, block: Block) -> None:
        """Read the lines of one block."""
        self._note_versions(block)
        self._note_replica(block)
        pieces = block.data.split(MARK)
        if len(pieces) > 1:
            self.info_lines += len(pieces) - 1
            self._read(block, pieces)

    def result(self, expected: Fabric | None = None) -> Transport:
        """What all that was fed shows; afterwards nothing more can be fed."""
        for threads in self._threads.values():
            for thread in threads.values():
                cut(thread, self._processes[thread.process])
        self._threads.clear()
        for process in self._processes:
            process.replica = self._replicas.get(process.source)
        return judged(
            join(self._processes),
            versions=self._versions,
            info_lines=self.info_lines,
            torn=self._torn,
            left_out=self.left_out,
            expected=expected,
        )

    def _read(self, block: Block, pieces: list[bytes]) -> None:
        source, node = block.source.name, block.source.node
        threads = self._threads.setdefault(node, {})
        channels, begun = grammar.channels(), self._begun
        beginning, following = slice(grammar.CHANNEL_BYTES), slice(grammar.CHANNEL_BYTES, None)
        line, counted, offset, number = 0, 0, 0, 0

        def quote() -> Evidence:
            """The line that the mark before this message stands in."""
            nonlocal line, counted, offset
            line, begin = line or int(block.first_line), offset
            offset += sum(map(len, pieces[counted:number])) + (number - counted) * len(MARK)
            line += block.data.count(b"\n", begin, offset)
            counted = number
            text = words(tail[-_QUOTED_BYTES:] + MARK + pieces[number].partition(b"\n")[0][:_QUOTED_BYTES]).strip()
            if not self._room.take(_QUOTED_ONCE_BYTES + 2 * sys.getsizeof(text)):
                raise _TooMuch
            return Evidence(source, line, text)

        thread, connections, tail = self._writer(threads, b"\n" + pieces[0], block.source)
        for number, piece in enumerate(islice(pieces, 1, None), 1):  # noqa: B007 - quote() asks for it
            said = piece.removesuffix(tail)  # the same object where the next line begins otherwise
            begin = said[beginning]
            if (bit := channels.get(begin)) is not None:
                known = connections.get(said[following])
                if known is not None and said is not piece:
                    known.channels |= bit
                    continue
                if thread is not None:
                    self._connection(bit, piece[following], thread, quote)
            elif thread is not None and (found := begun[begin] if begin in begun else self._handler(said)) is not None:
                message = said.partition(b"\n")[0][:_LONGEST_BYTES]
                try:
                    found(message, thread, self._processes[thread.process], quote)
                except _TooMuch:
                    self.left_out += 1
            if said is piece:
                thread, connections, tail = self._writer(threads, piece, block.source)

    def _handler(self, said: bytes) -> Handler | None:
        """That of a message; remembered where its first word is short."""
        message = said.partition(b"\n")[0]
        word, begin = message.partition(b" ")[0], message[: grammar.CHANNEL_BYTES]
        found = handler(word)
        if len(word) < grammar.CHANNEL_BYTES == len(begin) and len(self._begun) < _MOST_WORDS:
            self._begun[begin] = found
        return found

    def _connection(self, bit: int, rest: bytes, thread: ThreadRecord, quote: Quote) -> None:
        """Note a connection that no line before told of, or none that the same thread wrote on after."""
        said, newline, _ = rest.partition(b"\n")
        end, _, key = said.partition(b" : ")
        if end not in grammar.ENDS:
            return
        if not newline:
            self._torn += 1  # what is missing could be "/GDRDMA"
            return
        known = thread.connections.get(said) or self._otherwise(thread, end, said)
        if known is not None:
            known.channels |= bit
            return
        ends = grammar.connection(key) if len(key) <= _LONGEST_BYTES else None
        if ends is None:
            self._torn += not grammar.is_ring(key)
            return
        sender, receiver, way, own = ends
        many = way.route not in self._routes and len(self._routes) >= _MOST_ROUTES
        if many or not self._room.take(LINK_BYTES + UNTIL_CUT_BYTES + len(said)):
            self.left_out += 1
            return
        self._ends.add(end)
        self._routes.add(way.route)
        thread.connections[said] = Link(sender, receiver, bit, way, own)
        process = self._processes[thread.process]
        if way.route not in process.evidence:
            with suppress(_TooMuch):
                process.note(way.route, way.route, quote)

    def _otherwise(self, thread: ThreadRecord, end: bytes, said: bytes) -> Link | None:
        """The connection, where a line told of it with another end of the channel's words."""
        for other in self._ends:
            if other != end and (known := thread.connections.get(other + said[len(end) :])) is not None:
                return known
        return None

    def _writer(
        self, threads: dict[bytes, ThreadRecord], piece: bytes, source: Source
    ) -> tuple[ThreadRecord | None, dict[bytes, Link], bytes]:
        """Who writes the line whose beginning ends this piece, their known connections, and that line's beginning."""
        _, newline, head = piece.rpartition(b"\n")
        head = head if newline else b""
        thread = threads.get(head) or self._thread(threads, head, source)
        return thread, _NOTHING if thread is None else thread.connections, b"\n" + head

    def _thread(self, threads: dict[bytes, ThreadRecord], head: bytes, source: Source) -> ThreadRecord | None:
        """The thread whose prefix ends a line's beginning, whatever a launcher wrote before it."""
        last = head.rsplit(b" ", 2)
        if len(last) == 3 and (thread := threads.get(last[1] + b" " + last[2])):
            return thread
        match = grammar.THREAD.search(head[-_QUOTED_BYTES:])
        if match is None:
            return None
        thread = threads.get(match[0])
        if thread is None:
            host, pid = words(match[1]), int(match[2])
            identity = (source.node or "", host, pid)
            number = self._numbers.get(identity, len(self._processes))
            is_new = number == len(self._processes)
            takes = _THREAD_BYTES + 4 * len(match[0]) + is_new * _PROCESS_BYTES
            if number >= _MOST_PROCESSES or not self._room.take(takes):
                self.left_out += 1
                return None
            if is_new:
                self._numbers[identity] = number
                self._processes.append(
                    ProcessRecord(
                        node=identity[0],
                        host=host,
                        pid=pid,
                        source=source.name,
                        quoted=self._quoted.setdefault(identity[:2], {}),
                    )
                )
            thread = threads[match[0]] = ThreadRecord(process=number, room=self._room)
        return thread

    def _note_replica(self, block: Block) -> None:
        """Keep which replica wrote this source; None where it names several."""
        source = block.source
        if source.replica is not None:
            said: set[int | None] = {source.replica}
        elif grammar.REPLICA_BEGINS in block.data:
            said = {int(number) for number in grammar.REPLICA.findall(block.data)}
            said |= {self._replicas[source.name]} if source.name in self._replicas else set()
        else:
            return
        if source.name in self._replicas or self._room.take(_SOURCE_BYTES + sys.getsizeof(source.name)):
            self._replicas[source.name] = said.pop() if len(said) == 1 else None
        else:
            self.left_out += 1

    def _note_versions(self, block: Block) -> None:
        at = block.data.find(grammar.VERSION_BEGINS)
        while at >= 0:
            if match := grammar.VERSION.match(block.data, at):
                version = f"{words(match[1])}+cuda{words(match[2])}"
                if version not in self._versions and len(self._versions) < _MOST_VERSIONS:
                    line = int(block.first_line) + block.data.count(b"\n", 0, at)
                    self._versions[version] = Evidence(block.source.name, line, words(match[0]))
            at = block.data.find(grammar.VERSION_BEGINS, at + 1)
