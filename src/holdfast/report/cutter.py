"""Owns how the bytes that a rank writes become lines that are safe to show, in bounded memory.

Of a long line the beginning is kept and the rest is counted. Refuses to know where the bytes come from (tail.py).
"""

from __future__ import annotations

import codecs

from holdfast.report.words import LONGEST_LINE, clean

LONGEST_LINE_BYTES = 4 * LONGEST_LINE
"""What is kept of one line: enough for all that is shown of it, whatever its characters."""

_PLAIN = bytes(range(0x20, 0x7F)) + b"\t\n"
_BLANK = b" \t\b"
_UP = b"\x1b[A"
"""tqdm draws a second bar as `\\n\\rBAR\\x1b[A`: it goes down a row, draws, and goes up again."""


class Cutter:
    """Takes bytes as they come and gives out each line once its end has come."""

    def __init__(self, *, colours: bool) -> None:
        self.line = Line()
        """The line whose end has not come."""
        self._colours = colours

    def cut(self, block: bytes) -> list[str]:
        """The lines that end in this block; what follows the last end waits for its own."""
        first, newline, rest = block.partition(b"\n")
        self.line.add(first)
        if not newline:
            return []
        if self.line.goes_up or _UP in rest:
            return self._cut_rows(rest)
        body, newline, torn = rest.rpartition(b"\n")
        lines = [self._end(), *(self._whole(body) if newline else ())]
        self.line.add(torn)
        return lines

    def rest(self) -> list[str]:
        """The line whose end will never come, if there is one."""
        return [self._end()] if self.line.begun else []

    def shown(self) -> str:
        """How the line looks whose end has not come."""
        return self._shown(*self.line.state())

    def _end(self) -> str:
        shown = self.shown()
        self.line = Line()
        return shown

    def _cut_rows(self, rest: bytes) -> list[str]:
        """Lines of one who moves between rows: the end of a row that was left upwards comes back to that row."""
        lines: list[str] = []
        for text in rest.split(b"\n"):
            if not self.line.comes_back():
                lines.append(self._end())
            self.line.add(text)
        return lines

    def _whole(self, body: bytes) -> list[str]:
        """Whole lines; those of plain text, as nearly all are, without a look at each."""
        if _is_plain(body):
            lines = body.decode("ascii").split("\n")
            if max(map(len, lines)) <= LONGEST_LINE:
                return lines
        return [self._alone(line) for line in body.split(b"\n")]

    def _alone(self, text: bytes) -> str:
        if b"\r" not in text:
            return self._shown(text[:LONGEST_LINE_BYTES], len(text))
        line = Line()
        line.add(text)
        return self._shown(*line.state())

    def _shown(self, text: bytes, size: int) -> str:
        """The beginning of a line of `size` bytes, as it may be shown."""
        if size <= LONGEST_LINE and _is_plain(text):
            return text.decode("ascii")
        if size <= len(text):
            return clean(text.decode("utf-8", "replace"), colours=self._colours)
        # A character that the cut has torn is left out.
        begin = codecs.utf_8_decode(text, "replace", False)[0][:LONGEST_LINE]
        return f"{clean(begin, colours=self._colours)}… ({size:,} bytes in all)"


class Line:
    """A line whose end has not come. As on a terminal, what follows a carriage return overwrites what was before."""

    def __init__(self) -> None:
        self.begun = False
        self.overwrites = False
        self.fresh = False
        """Whether anything was added since it was shown."""
        self._now = self._before = (b"", 0)
        """The beginning of what was written since the last carriage return, with its size; the same before that."""

    def add(self, data: bytes) -> None:
        if not data:
            return
        self.begun = self.fresh = True
        joining, *overwriting = data.split(b"\r")
        text, size = self._now
        self._now = (text + joining[: LONGEST_LINE_BYTES - len(text)], size + len(joining))
        for piece in overwriting:
            self.overwrites = True
            if self._now[0].strip(_BLANK):
                self._before = self._now
            self._now = (piece[:LONGEST_LINE_BYTES], len(piece))

    def state(self) -> tuple[bytes, int]:
        """The beginning of what a terminal would show, and its size in bytes; a bar that was wiped is still shown."""
        return self._now if self._now[0].strip(_BLANK) or not self._before[1] else self._before

    @property
    def goes_up(self) -> bool:
        return self._now[0].endswith(_UP)

    def comes_back(self) -> bool:
        """Take back one row upwards, at the end of a row; False when there is none to take back."""
        if not self.goes_up:
            return False
        text, size = self._now
        self._now = (text[: -len(_UP)], size - len(_UP))
        if not self.goes_up:
            self.add(b"\r")
        return True


def _is_plain(text: bytes) -> bool:
    return not text.translate(None, _PLAIN)
