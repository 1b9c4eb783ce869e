"""Owns the one pass over the lines: which thread of which process wrote what, at the speed of splitting bytes.

A set-up log is mostly connection lines, and those of one thread differ mostly in the number of the channel. So a line
is cut at the channel, and what follows is a key that is parsed once, however many channels it has.

Refuses to own what a message means (messages.py) and whose a connection is (placing.py).
"""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.diagnose.block import Block
from holdfast.diagnose.transport import grammar
from holdfast.diagnose.transport.grammar import CONNECTIONS, MARK, words
from holdfast.diagnose.transport.joining import join
from holdfast.diagnose.transport.messages import cut, handlers
from holdfast.diagnose.transport.records import CHANNEL_BITS, ProcessRecord, ThreadRecord
from holdfast.diagnose.transport.result import Evidence, Transport
from holdfast.diagnose.transport.verdict import judged
from holdfast.fabric.catalog import Fabric

_MOST_THREADS = 1 << 20
"""Beyond so many threads lines are left out: no job has them, but a hostile file may."""
_MOST_KEYS = 1 << 17
"""Of one session; each rank of an all-to-all over 16,384 has 65,536."""
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


class Reading:
    """The pass, for who has other use for the blocks too: `feed` each, then ask for the `result`."""

    def __init__(self) -> None:
        self._sources: list[str] = []
        self._processes: list[ProcessRecord] = []
        self._numbers: dict[tuple[str, str, int], int] = {}
        self._threads: dict[str | None, dict[bytes, ThreadRecord]] = {}
        self._channels: dict[bytes, int] = {}
        self._versions: dict[str, Evidence] = {}
        self._info_lines = 0
        self._torn = 0
        self._left_out = 0

    def feed(self, block: Block) -> None:
        """Read the lines of one block."""
        name = block.source.name
        if not self._sources or self._sources[-1] != name:
            self._sources.append(name)
        if b"NCCL version " in block.data:
            self._note_versions(block)
        pieces = block.data.split(MARK)
        if len(pieces) > 1:
            self._info_lines += len(pieces) - 1
            self._read(block, pieces)

    def result(self, expected: Fabric | None = None) -> Transport:
        """What all that was fed shows; afterwards nothing more can be fed."""
        for threads in self._threads.values():
            for thread in threads.values():
                cut(thread, self._processes[thread.process])
        self._threads.clear()
        return judged(
            join(self._processes, self._sources),
            versions=self._versions,
            info_lines=self._info_lines,
            torn=self._torn,
            left_out=self._left_out,
            expected=expected,
        )

    def _read(self, block: Block, pieces: list[bytes]) -> None:
        source, place = block.source.name, len(self._sources) - 1 << 40
        threads = self._threads.setdefault(block.source.node, {})
        channels = self._channels
        processes = self._processes
        line, counted, number = block.first_line, 0, 0

        def line_number() -> int:
            # Counted up to the mark before this message, whose line is the one that the mark stands in.
            nonlocal line, counted
            line += sum(piece.count(b"\n") for piece in pieces[counted:number])
            counted = number
            return line

        def quote() -> Evidence:
            begin = pieces[number - 1].rpartition(b"\n")[2][-_QUOTED_BYTES:]
            text = begin + MARK + pieces[number].partition(b"\n")[0][:_QUOTED_BYTES]
            return Evidence(source, line_number(), words(text).strip())

        before = pieces[0]
        for number in range(1, len(pieces)):
            piece = pieces[number]
            head = before[before.rfind(b"\n") + 1 :]
            before = piece
            thread = threads.get(head)
            if thread is None:
                thread = self._thread(threads, head, block.source.node)
                if thread is None:
                    continue
            end = piece.find(b"\n")
            if piece.startswith(CONNECTIONS):
                # Without its newline a line may be torn, and what is missing could be "/GDRDMA".
                label, _, key = piece[:end].partition(b" : ") if end >= 0 else (b"", b"", b"")
                bit = channels.get(label)
                if bit is None:
                    bit = self._channel(label)
                known = thread.keys.get(key)
                if known is not None:
                    thread.keys[key] = known | bit
                elif not bit:
                    self._torn += 1
                elif len(thread.keys) < _MOST_KEYS:
                    thread.keys[key] = (place + line_number()) << CHANNEL_BITS | bit
                else:
                    self._left_out += 1
            else:
                message = piece[: end if 0 <= end < _LONGEST_BYTES else _LONGEST_BYTES]
                for handler in handlers(message.partition(b" ")[0]):
                    handler(message, thread, processes[thread.process], quote)

    def _channel(self, label: bytes) -> int:
        """The bit of a channel's label; 0 for what is none."""
        match = grammar.CHANNEL.match(label)
        bit = 1 << int(match[1]) if match and int(match[1]) < CHANNEL_BITS else 0
        if bit:
            self._channels[label] = bit
        return bit

    def _thread(self, threads: dict[bytes, ThreadRecord], head: bytes, node: str | None) -> ThreadRecord | None:
        """The thread whose prefix ends a line's beginning, whatever a launcher wrote before it."""
        last = head.rsplit(b" ", 2)
        if len(last) == 3 and (thread := threads.get(last[1] + b" " + last[2])):
            return thread
        match = grammar.THREAD.search(head[-_QUOTED_BYTES:])
        if match is None:
            return None
        thread = threads.get(match[0])
        if thread is None:
            if len(threads) >= _MOST_THREADS:
                self._left_out += 1
                return None
            host, pid = words(match[1]), int(match[2])
            identity = (node or host, host, pid)
            number = self._numbers.setdefault(identity, len(self._processes))
            if number == len(self._processes):
                self._processes.append(ProcessRecord(node=identity[0], host=host, pid=pid))
            thread = threads[match[0]] = ThreadRecord(process=number)
        return thread

    def _note_versions(self, block: Block) -> None:
        for match in grammar.VERSION.finditer(block.data):
            version = f"{words(match[1])}+cuda{words(match[2])}"
            if version not in self._versions:
                line = block.first_line + block.data.count(b"\n", 0, match.start())
                self._versions[version] = Evidence(block.source.name, line, words(match[0]))
