"""Owns the one pass over the lines: which thread of which process wrote what, at the speed of splitting bytes.

A set-up log is mostly connection lines, and those of one thread differ mostly in the number of the channel. So a line
is cut at the channel, and what follows is a key that is parsed once, however many channels it has.

Refuses to own what a message means (messages.py) and whose a connection is (placing.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from holdfast.diagnose.block import Block, Source
from holdfast.diagnose.transport import grammar
from holdfast.diagnose.transport.grammar import MARK, words
from holdfast.diagnose.transport.joining import join
from holdfast.diagnose.transport.messages import Handler, cut, handler
from holdfast.diagnose.transport.records import ProcessRecord, Quote, ThreadRecord
from holdfast.diagnose.transport.result import Evidence, Link, Transport
from holdfast.diagnose.transport.verdict import judged
from holdfast.fabric.catalog import Fabric

_MOST_PROCESSES = 1 << 16
"""Beyond so many processes lines are left out: no job has them, but a hostile file may. Each takes 5 KB at most."""
_MOST_THREADS = 1 << 18
"""Of all processes; each takes half a KB."""
_MOST_CONNECTIONS = 3 << 20
"""Of all threads, each counted once over its channels; 16,384 ranks with eight communicators have as many. Each takes
100 bytes, and 300 until its set-up is at an end."""
_MOST_QUOTES = 1 << 19
"""Communicators, variables and facts of all processes; 16,384 ranks have as many. Each takes 1 to 2 KB."""
_MOST_ALIKE = 1 << 12
"""Of a thread's connections, how many are known again by the line after them too."""
_MOST_WORDS = 1 << 16
"""Of first words of messages, how many are remembered."""
_NOTHING: dict[bytes, Link] = {}
_LONGEST_BYTES = 1024
"""NCCL's own buffer for a line."""
_QUOTED_BYTES = 240


def read(blocks: Iterable[Block], expected: Fabric | None = None) -> Transport:
    """What the fabric did by these logs; `expected` is the fabric that the job was meant to use, where that is known.

    Sources may come in any order, interleaved too, as long as the blocks of each come in theirs.
    """
    reading = Reading()
    for block in blocks:
        reading.feed(block)
    return reading.result(expected)


class _TooMuch(Exception):
    """More was said than is kept."""


class Reading:
    """The pass, for who has other use for the blocks too: `feed` each, then ask for the `result`."""

    def __init__(self) -> None:
        self._processes: list[ProcessRecord] = []
        self._numbers: dict[tuple[str, str, int], int] = {}
        self._threads: dict[str | None, dict[bytes, ThreadRecord]] = {}
        self._quoted: dict[tuple[str, str], dict[bytes | str, Evidence]] = {}
        self._handlers: dict[bytes, Handler] = {}
        self._dull: set[bytes] = set()
        """Beginnings of messages that have no handler."""
        self._versions: dict[str, Evidence] = {}
        self._replicas: dict[str, int | None] = {}
        self.info_lines = 0
        """How many lines NCCL wrote at level INFO, so far."""
        self._torn = 0
        self._thread_count = 0
        self._connections = 0
        self._quotes = 0
        self._left_out = 0

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
            left_out=self._left_out,
            expected=expected,
        )

    def _read(self, block: Block, pieces: list[bytes]) -> None:
        source, node = block.source.name, block.source.node
        threads = self._threads.setdefault(node, {})
        channels = grammar.channels()
        dull = self._dull
        line, counted, offset, number = 0, 0, 0, 0

        def quote() -> Evidence:
            """The line that the mark before this message stands in."""
            nonlocal line, counted, offset
            line, begin = line or int(block.first_line), offset
            offset += sum(map(len, pieces[counted:number])) + (number - counted) * len(MARK)
            line += block.data.count(b"\n", begin, offset)
            counted = number
            if self._quotes >= _MOST_QUOTES:
                raise _TooMuch
            self._quotes += 1
            text = tail[-_QUOTED_BYTES:] + MARK + pieces[number].partition(b"\n")[0][:_QUOTED_BYTES]
            return Evidence(source, line, words(text).strip())

        thread, alike, tail = self._writer(threads, b"\n" + pieces[0], block.source)
        for number, piece in enumerate(islice(pieces, 1, None), 1):  # noqa: B007 - quote() asks for it
            bit = channels.get(begin := piece[: grammar.CHANNEL_BYTES])
            if bit is not None:
                known = alike.get(rest := piece[grammar.CHANNEL_BYTES :])
                if known is not None:
                    known.channels |= bit
                    continue  # the line after it begins as this one does
                if thread is not None:
                    self._connection(bit, rest, thread, tail, quote)
            elif begin not in dull and thread is not None:
                message = piece.partition(b"\n")[0]
                if (found := self._handler(message)) is not None:
                    try:
                        found(message[:_LONGEST_BYTES], thread, self._processes[thread.process], quote)
                    except _TooMuch:
                        self._left_out += 1
            if not piece.endswith(tail):
                thread, alike, tail = self._writer(threads, piece, block.source)

    def _handler(self, message: bytes) -> Handler | None:
        """That of a message; remembered where there is none."""
        word = message.partition(b" ")[0]
        if word in self._handlers:
            return self._handlers[word]
        found = handler(word)
        if found is not None:
            if len(self._handlers) < _MOST_WORDS:
                self._handlers[word] = found
        elif len(word) < grammar.CHANNEL_BYTES < len(message) and len(self._dull) < _MOST_WORDS:
            self._dull.add(message[: grammar.CHANNEL_BYTES])
        return found

    def _connection(self, bit: int, rest: bytes, thread: ThreadRecord, tail: bytes, quote: Quote) -> None:
        """Note a connection that no line before told of, or none with the same line after it."""
        said, newline, _ = rest.partition(b"\n")
        end, _, key = said.partition(b" : ")
        if end not in grammar.ENDS:
            return
        if not newline:
            self._torn += 1  # what is missing could be "/GDRDMA"
            return
        known = thread.connections.get(key)
        if known is None:
            ends = grammar.connection(key) if len(key) <= _LONGEST_BYTES else None
            if ends is None:
                self._torn += not grammar.is_ring(key)
                return
            if self._connections >= _MOST_CONNECTIONS:
                self._left_out += 1
                return
            self._connections += 1
            sender, receiver, way, own = ends
            known = thread.connections[key] = Link(sender, receiver, bit, way, own)
            process = self._processes[thread.process]
            if way.route not in process.evidence and self._quotes < _MOST_QUOTES:
                process.note(way.route, way.route, quote)
        known.channels |= bit
        if rest.endswith(tail) and len(thread.alike) < _MOST_ALIKE:
            thread.alike[rest] = known

    def _writer(
        self, threads: dict[bytes, ThreadRecord], piece: bytes, source: Source
    ) -> tuple[ThreadRecord | None, dict[bytes, Link], bytes]:
        """Who writes the line whose beginning ends this piece, its known connections, and that line's beginning."""
        _, newline, head = piece.rpartition(b"\n")
        head = head if newline else b""
        thread = threads.get(head) or self._thread(threads, head, source)
        return thread, _NOTHING if thread is None else thread.alike, b"\n" + head

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
            if self._thread_count >= _MOST_THREADS or number >= _MOST_PROCESSES:
                self._left_out += 1
                return None
            self._thread_count += 1
            if number == len(self._processes):
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
            thread = threads[match[0]] = ThreadRecord(process=number)
        return thread

    def _note_replica(self, block: Block) -> None:
        """Keep which replica wrote this source; None where it names several."""
        source = block.source
        if source.replica is not None:
            self._replicas[source.name] = source.replica
        elif grammar.REPLICA_BEGINS in block.data:
            said = {int(number) for number in grammar.REPLICA.findall(block.data)}
            said |= {self._replicas[source.name]} if source.name in self._replicas else set()
            self._replicas[source.name] = said.pop() if len(said) == 1 else None

    def _note_versions(self, block: Block) -> None:
        at = block.data.find(grammar.VERSION_BEGINS)
        while at >= 0:
            if match := grammar.VERSION.match(block.data, at):
                version = f"{words(match[1])}+cuda{words(match[2])}"
                if version not in self._versions:
                    line = int(block.first_line) + block.data.count(b"\n", 0, at)
                    self._versions[version] = Evidence(block.source.name, line, words(match[0]))
            at = block.data.find(grammar.VERSION_BEGINS, at + 1)
