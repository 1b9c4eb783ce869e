"""Reads set-up logs in one pass: which thread of which process wrote each line, at the speed of splitting bytes.

A set-up log is mostly connection lines, and those of one thread differ mostly in the channel number. So a line is cut
at the channel, and the rest is a key under which the channels gather until its thread logs something else. Where the
next line begins as this one does, which is usual, its writer need not be found again.

connection_parser.py parses connections, message_handlers.py other messages, and link_assigner.py finds a connection's
communicator.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import islice, zip_longest
from typing import NamedTuple

from holdfast.diagnose.gc_tuning import infrequent_gc
from holdfast.diagnose.log_chunk import LogChunk, LogSource
from holdfast.diagnose.memory_budget import NCCL_SETUP_BYTES, MemoryBudget
from holdfast.diagnose.nccl_transport import line_patterns
from holdfast.diagnose.nccl_transport.causes import BY_NAME, NO_PROVIDER, Effect, named_by
from holdfast.diagnose.nccl_transport.connection_parser import ConnectionParser
from holdfast.diagnose.nccl_transport.fabric_verdict import build_report
from holdfast.diagnose.nccl_transport.line_patterns import MARK, to_text
from holdfast.diagnose.nccl_transport.line_quoter import LineQuoter, OverBudget
from holdfast.diagnose.nccl_transport.merge import merge
from holdfast.diagnose.nccl_transport.message_handlers import Handler, close_batch, handler
from holdfast.diagnose.nccl_transport.process_records import LINE_BYTES, ProcessRecord, ThreadRecord
from holdfast.diagnose.nccl_transport.transport_report import LogLine, TransportReport
from holdfast.fabric.fabric import Fabric

# Bytes kept besides its own text, as measured at the end of inputs that hold one kind only
_PROCESS_BYTES = 1536
_THREAD_BYTES = 768
_SOURCE_BYTES = 256
_MAX_PROCESSES = 1 << 16
"""No job has more, and time grows with them."""
_MAX_VERSIONS = 64
_MAX_CACHED = 1 << 13
"""How many beginnings of messages are remembered."""
_PREFIX_BYTES = 240
"""How many bytes at the start of a line are searched for its thread's own prefix."""


@infrequent_gc()
def read_setup_logs(
    blocks: Iterable[LogChunk], expected: Fabric | None = None, *, max_bytes: int = NCCL_SETUP_BYTES
) -> TransportReport:
    """What the fabric did by these logs; `expected` is the job's intended fabric, where known.

    Sources may come in any order, interleaved too, as long as the chunks of each come in order. At most `max_bytes` of
    them are kept.
    """
    reading = SetupLogReader(max_bytes)
    for block in blocks:
        reading.feed(block)
    return reading.result(expected)


class _Failure(NamedTuple):
    """A warning that says why nodes cannot be connected."""

    begin: int
    """Where its line begins in the chunk."""
    name: str
    process: ProcessRecord


def _parts(block: LogChunk, ends: Iterable[int]) -> Iterator[LogChunk]:
    """The lines of a chunk up to each of these places, and the rest."""
    begin, line = 0, block.first_line
    for end in (*ends, len(block.data)):
        yield LogChunk(source=block.source, first_line=line, data=block.data[begin:end])
        line = int(line) + block.data.count(b"\n", begin, end)
        begin = end


class SetupLogReader:
    """The pass, for callers that also use the chunks: `feed` each, then get the `result`."""

    def __init__(self, max_bytes: int = NCCL_SETUP_BYTES) -> None:
        self._budget = MemoryBudget(max_bytes)
        self._processes: list[ProcessRecord] = []
        self._connections = ConnectionParser(self._budget, self._processes)
        self._numbers: dict[tuple[str, str, int], int] = {}
        self._threads: dict[str | None, dict[bytes, ThreadRecord]] = {}
        self._quoted: dict[tuple[str, str], dict[bytes | str, LogLine]] = {}
        self._begun: dict[bytes, Handler | None] = {}
        """The handlers of messages by their beginnings; None for messages that have none."""
        self._versions: dict[str, LogLine] = {}
        self._replicas: dict[str, int | None] = {}
        self._missing_providers: dict[str, LogLine] = {}
        """What libibverbs wrote, by node, or by source where none is known."""
        self.info_lines = 0
        """How many lines NCCL wrote at level INFO, so far."""
        self._left_out = 0

    @property
    def left_out(self) -> int:
        """Lines over the memory budget."""
        return self._left_out + self._connections.left_out

    def feed(self, block: LogChunk) -> None:
        """Reads the lines of one chunk."""
        rare = line_patterns.rare_lines(block.data)
        failures: list[_Failure] = []
        for which, end in rare:
            if which == line_patterns.HAS_VERSION:
                self._note_version(block, end - len(line_patterns.VERSION_BEGINS))
            elif which == line_patterns.HAS_WARNING and (failure := self._note_warning(block, end)):
                failures.append(failure)
            elif which == line_patterns.HAS_LIBRARY:
                self._note_library(block, end - len(line_patterns.LIBRARY_BEGINS))
        self._note_replica(block, any(which == line_patterns.HAS_REPLICA for which, _ in rare))
        if not failures:
            self._read_messages(block)
            return
        for failure, part in zip_longest(failures, _parts(block, [failure.begin for failure in failures])):
            self._read_messages(part)  # what the processes had set up before
            if failure is not None:
                failure.process.failures.add(failure.name)

    def _read_messages(self, block: LogChunk) -> None:
        pieces = block.data.split(MARK)
        if len(pieces) > 1:
            self.info_lines += len(pieces) - 1
            self._read(block, pieces)

    def result(self, expected: Fabric | None = None) -> TransportReport:
        """The result of all chunks fed; afterwards nothing more can be fed."""
        for threads in self._threads.values():
            for thread in threads.values():
                close_batch(thread, self._processes[thread.process])
        self._threads.clear()
        for process in self._processes:
            process.replica = self._replicas.get(process.source)
            missing = self._missing_providers.get(process.node) or self._missing_providers.get(process.source)
            if missing is not None:
                process.evidence["no provider"] = missing
        return build_report(
            merge(self._processes),
            versions=self._versions,
            info_lines=self.info_lines,
            truncated_lines=self._connections.truncated,
            left_out=self.left_out,
            expected=expected,
        )

    def _read(self, block: LogChunk, pieces: list[bytes]) -> None:
        threads = self._threads.setdefault(block.source.node, {})
        channels, begun, settle = line_patterns.channels(), self._begun, self._connections.parse_pending
        beginning, following = slice(line_patterns.CHANNEL_BYTES), slice(line_patterns.CHANNEL_BYTES, None)
        quoting = LineQuoter(block, pieces, self._budget)
        unsettled: dict[ThreadRecord, None] = {}

        thread, unparsed, tail = self._writer(threads, b"\n" + pieces[0], block.source)
        for number, piece in enumerate(islice(pieces, 1, None), 1):
            text = piece.removesuffix(tail)  # the same object where the next line begins otherwise
            begin = text[beginning]
            if (bit := channels.get(begin)) is not None:
                rest = text[following]
                if text is piece and b"\n" not in rest:
                    self._connections.count_truncated(rest)
                elif (known := unparsed.get(rest)) is not None:
                    known[0] |= bit
                else:
                    unparsed[rest] = [bit, number]
            elif thread is not None and (found := begun[begin] if begin in begun else self._handler(begin)) is not None:
                if unparsed:
                    settle(thread, quoting)
                message = text.partition(b"\n")[0][:LINE_BYTES]
                try:
                    found(message, thread, self._processes[thread.process], partial(quoting.quote, number))
                except OverBudget:
                    self._left_out += 1
            if text is piece:
                if thread is not None and unparsed:
                    unsettled[thread] = None
                thread, unparsed, tail = self._writer(threads, piece, block.source)
        for one in unsettled:
            settle(one, quoting)

    def _handler(self, begin: bytes) -> Handler | None:
        """The handler of messages with this beginning."""
        found = handler(begin)
        if len(self._begun) < _MAX_CACHED:
            self._begun[begin] = found
        return found

    def _writer(
        self, threads: dict[bytes, ThreadRecord], piece: bytes, source: LogSource
    ) -> tuple[ThreadRecord | None, dict[bytes, list[int]], bytes]:
        """The writer of the line whose beginning ends this piece, its record, and that line's beginning."""
        _, newline, head = piece.rpartition(b"\n")
        head = head if newline else b""
        thread = threads.get(head) or self._thread(threads, head, source)
        return thread, {} if thread is None else thread.unparsed, b"\n" + head

    def _thread(self, threads: dict[bytes, ThreadRecord], head: bytes, source: LogSource) -> ThreadRecord | None:
        """The thread whose prefix ends a line's beginning, whatever a launcher wrote before it."""
        last = head.rsplit(b" ", 2)
        if len(last) == 3 and (thread := threads.get(last[1] + b" " + last[2])):
            return thread
        match = line_patterns.THREAD.search(head[-_PREFIX_BYTES:])
        if match is None:
            return None
        thread = threads.get(match[0])
        if thread is None:
            host, pid = to_text(match[1]), int(match[2])
            identity = (source.node or "", host, pid)
            number = self._numbers.get(identity, len(self._processes))
            is_new = number == len(self._processes)
            takes = _THREAD_BYTES + 4 * len(match[0]) + is_new * _PROCESS_BYTES
            if number >= _MAX_PROCESSES or not self._budget.reserve(takes):
                self._left_out += 1
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
            thread = threads[match[0]] = ThreadRecord(process=number, budget=self._budget)
        return thread

    def _note_replica(self, block: LogChunk, has_name: bool) -> None:
        """Records the replica that wrote this source; None where it names several."""
        source = block.source
        if source.replica is not None:
            replicas: set[int | None] = {source.replica}
        elif has_name:
            replicas = {int(number) for number in line_patterns.REPLICA.findall(block.data)}
            replicas |= {self._replicas[source.name]} if source.name in self._replicas else set()
        else:
            return
        if source.name in self._replicas or self._budget.reserve(_SOURCE_BYTES + sys.getsizeof(source.name)):
            self._replicas[source.name] = replicas.pop() if len(replicas) == 1 else None
        else:
            self._left_out += 1

    def _note_warning(self, block: LogChunk, at: int) -> _Failure | None:
        """Keep a warning that names a cause, and return one of a failure; `at` is where its message begins."""
        begin = block.data.rfind(b"\n", 0, at) + 1
        head = block.data[max(begin, at - _PREFIX_BYTES) : at - len(line_patterns.WARNING_BEGINS)]
        writer = line_patterns.WARNING.search(head)
        end = block.data.find(b"\n", at, at + LINE_BYTES)
        message = block.data[at : at + LINE_BYTES if end < 0 else end].rstrip()
        if writer is None or not (name := named_by(message)):
            return None
        thread = self._thread(self._threads.setdefault(block.source.node, {}), writer[1], block.source)
        if thread is None:
            return None
        process = self._processes[thread.process]
        try:
            if name not in process.evidence:
                process.note(name, message, partial(self._quote, block, begin, head, message))
        except OverBudget:
            self._left_out += 1
            return None
        return _Failure(begin, name, process) if BY_NAME[name].effect is Effect.FAILURE else None

    def _quote(self, block: LogChunk, begin: int, head: bytes, message: bytes) -> LogLine:
        """A line that begins there."""
        text = to_text(head + line_patterns.WARNING_BEGINS + message[:_PREFIX_BYTES]).strip()
        if not self._budget.reserve(LINE_BYTES + 2 * sys.getsizeof(text)):
            raise OverBudget
        return LogLine(block.source.name, int(block.first_line) + block.data.count(b"\n", 0, begin), text)

    def _note_library(self, block: LogChunk, at: int) -> None:
        """Keep the first line in which libibverbs names a driver that it lacks."""
        where, match = block.source.node or block.source.name, NO_PROVIDER.match(block.data, at)
        known = where in self._missing_providers
        if match and not known and self._budget.reserve(LINE_BYTES + sys.getsizeof(where)):
            line = int(block.first_line) + block.data.count(b"\n", 0, at)
            self._missing_providers[where] = LogLine(block.source.name, line, to_text(match[0][:_PREFIX_BYTES]))

    def _note_version(self, block: LogChunk, at: int) -> None:
        if match := line_patterns.VERSION.match(block.data, at):
            version = f"{to_text(match[1])}+cuda{to_text(match[2])}"
            if version not in self._versions and len(self._versions) < _MAX_VERSIONS:
                line = int(block.first_line) + block.data.count(b"\n", 0, at)
                self._versions[version] = LogLine(block.source.name, line, to_text(match[0]))
