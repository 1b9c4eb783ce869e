"""Quotes the few lines of a chunk that are evidence: the line number and its text."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from holdfast.diagnose.log_chunk import LogChunk
from holdfast.diagnose.memory_budget import MemoryBudget
from holdfast.diagnose.nccl_transport.line_patterns import MARK, to_text
from holdfast.diagnose.nccl_transport.transport_report import LogLine

_ONCE_BYTES = 1024
"""Longest part kept of a quoted line, and of what is noted with it: a communicator, a variable, a fact."""
_MOST_BYTES = 240


class OverBudget(Exception):
    """The line had more than is kept."""


class LineQuoter:
    """The lines of one chunk, which was split at NCCL's mark."""

    def __init__(self, block: LogChunk, pieces: Sequence[bytes], room: MemoryBudget) -> None:
        self._block, self._pieces, self._budget = block, pieces, room
        self._counted, self._offset, self._line = 0, 0, 0

    def quote(self, number: int) -> LogLine:
        """The line of the mark before the piece of this number; counted from the last request."""
        if number < self._counted or not self._line:
            self._counted, self._offset, self._line = 0, 0, int(self._block.first_line)
        begin, passed = self._offset, self._pieces[self._counted : number]
        self._offset += sum(map(len, passed)) + len(passed) * len(MARK)
        self._line += self._block.data.count(b"\n", begin, self._offset)
        self._counted = number
        head = self._pieces[number - 1].rpartition(b"\n")[2][-_MOST_BYTES:]
        text = to_text(head + MARK + self._pieces[number].partition(b"\n")[0][:_MOST_BYTES]).strip()
        if not self._budget.reserve(_ONCE_BYTES + 2 * sys.getsizeof(text)):
            raise OverBudget
        return LogLine(self._block.source.name, self._line, text)
