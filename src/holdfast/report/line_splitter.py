"""Owns how the bytes that a rank writes become lines that are safe to show, in bounded memory.

Of a long line the beginning is kept and the rest is counted. Refuses to know where the bytes come from (tail.py).
"""

from __future__ import annotations

import codecs

from holdfast.report.formatting import MAX_LINE_CHARS, sanitize

MAX_LINE_BYTES = 4 * MAX_LINE_CHARS
"""What is kept of one line: enough for all that is shown of it, whatever its characters."""

_PLAIN = bytes(range(0x20, 0x7F)) + b"\t\n"
_BLANK = b" \t\b"
_UP = b"\x1b[A"
"""tqdm draws a second bar as `\\n\\rBAR\\x1b[A`: it goes down a row, draws, and goes up again."""


class LineSplitter:
    """Takes bytes as they come and gives out each line once its end has come."""

    def __init__(self, *, colours: bool) -> None:
        self.line = PendingLine()
        """The line whose end has not come."""
        self._colours = colours

    def feed(self, block: bytes) -> list[str]:
        """The lines that end in this block; what follows the last end waits for its own."""
        first, newline, rest = block.partition(b"\n")
        self.line.add(first)
        if not newline:
            return []
        if self.line.ends_with_cursor_up or _UP in rest:
            return self._cut_rows(rest)
        body, newline, torn = rest.rpartition(b"\n")
        lines = [self._end(), *(self._whole(body) if newline else ())]
        self.line.add(torn)
        return lines

    def flush(self) -> list[str]:
        """The line whose end will never come, if there is one."""
        return [self._end()] if self.line.started else []

    def preview(self) -> str:
        """How the line looks whose end has not come."""
        return self._shown(*self.line.visible())

    def _end(self) -> str:
        shown = self.preview()
        self.line = PendingLine()
        return shown

    def _cut_rows(self, rest: bytes) -> list[str]:
        """Lines of one who moves between rows: the end of a row that was left upwards comes back to that row."""
        lines: list[str] = []
        for text in rest.split(b"\n"):
            if not self.line.consume_cursor_up():
                lines.append(self._end())
            self.line.add(text)
        return lines

    def _whole(self, body: bytes) -> list[str]:
        """Whole lines; those of plain text, as nearly all are, without a look at each."""
        if _is_plain(body):
            lines = body.decode("ascii").split("\n")
            if max(map(len, lines)) <= MAX_LINE_CHARS:
                return lines
        return [self._single(line) for line in body.split(b"\n")]

    def _single(self, text: bytes) -> str:
        if b"\r" not in text:
            return self._shown(text[:MAX_LINE_BYTES], len(text))
        line = PendingLine()
        line.add(text)
        return self._shown(*line.visible())

    def _shown(self, text: bytes, size: int) -> str:
        """The beginning of a line of `size` bytes, as it may be shown."""
        if size <= MAX_LINE_CHARS and _is_plain(text):
            return text.decode("ascii")
        if size <= len(text):
            return sanitize(text.decode("utf-8", "replace"), colours=self._colours)
        # A character that the cut has torn is left out.
        begin = codecs.utf_8_decode(text, "replace", False)[0][:MAX_LINE_CHARS]
        return f"{sanitize(begin, colours=self._colours)}… ({size:,} bytes in all)"


class PendingLine:
    """A line whose end has not come. As on a terminal, what follows a carriage return overwrites what was before."""

    def __init__(self) -> None:
        self.started = False
        self.overwrites = False
        self.updated = False
        """Whether anything was added since it was shown."""
        self._now = self._before = (b"", 0)
        """The beginning of what was written since the last carriage return, with its size; the same before that."""

    def add(self, data: bytes) -> None:
        if not data:
            return
        self.started = self.updated = True
        joining, *overwriting = data.split(b"\r")
        text, size = self._now
        self._now = (text + joining[: MAX_LINE_BYTES - len(text)], size + len(joining))
        for piece in overwriting:
            self.overwrites = True
            if self._now[0].strip(_BLANK):
                self._before = self._now
            self._now = (piece[:MAX_LINE_BYTES], len(piece))

    def visible(self) -> tuple[bytes, int]:
        """The beginning of what a terminal would show, and its size in bytes; a bar that was wiped is still shown."""
        return self._now if self._now[0].strip(_BLANK) or not self._before[1] else self._before

    @property
    def ends_with_cursor_up(self) -> bool:
        return self._now[0].endswith(_UP)

    def consume_cursor_up(self) -> bool:
        """Take back one row upwards, at the end of a row; False when there is none to take back."""
        if not self.ends_with_cursor_up:
            return False
        text, size = self._now
        self._now = (text[: -len(_UP)], size - len(_UP))
        if not self.ends_with_cursor_up:
            self.add(b"\r")
        return True


def _is_plain(text: bytes) -> bool:
    return not text.translate(None, _PLAIN)
