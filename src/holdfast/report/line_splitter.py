"""Splits a rank's output bytes into printable lines, in bounded memory.

Of a long line it keeps the beginning and counts the rest. log_tail.py reads the bytes.
"""

from __future__ import annotations

import codecs

from holdfast.report.formatting import MAX_LINE_CHARS, sanitize

MAX_LINE_BYTES = 4 * MAX_LINE_CHARS
"""Maximum bytes kept of one line: enough for MAX_LINE_CHARS characters of any width."""

_PLAIN = bytes(range(0x20, 0x7F)) + b"\t\n"
_BLANK = b" \t\b"
_UP = b"\x1b[A"
"""tqdm draws a second bar as `\\n\\rBAR\\x1b[A`: cursor down one row, draw, cursor up."""


class LineSplitter:
    """Takes bytes in blocks and returns each line when it is complete."""

    def __init__(self, *, colours: bool) -> None:
        self.line = PendingLine()
        """The incomplete last line."""
        self._colours = colours

    def feed(self, block: bytes) -> list[str]:
        """The lines that end in this block; the rest is buffered."""
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
        """The final line without a newline, if there is one."""
        return [self._end()] if self.line.started else []

    def preview(self) -> str:
        """The current text of the incomplete line."""
        return self._shown(*self.line.visible())

    def _end(self) -> str:
        shown = self.preview()
        self.line = PendingLine()
        return shown

    def _cut_rows(self, rest: bytes) -> list[str]:
        """Split output with cursor-up sequences: a newline after a cursor-up returns to the row left before."""
        lines: list[str] = []
        for text in rest.split(b"\n"):
            if not self.line.consume_cursor_up():
                lines.append(self._end())
            self.line.add(text)
        return lines

    def _whole(self, body: bytes) -> list[str]:
        """Complete lines; a block of plain text, the usual case, is split without inspecting each line."""
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
        """The sanitized beginning of a line of `size` bytes."""
        if size <= MAX_LINE_CHARS and _is_plain(text):
            return text.decode("ascii")
        if size <= len(text):
            return sanitize(text.decode("utf-8", "replace"), colours=self._colours)
        # A character split by the truncation is dropped.
        begin = codecs.utf_8_decode(text, "replace", False)[0][:MAX_LINE_CHARS]
        return f"{sanitize(begin, colours=self._colours)}… ({size:,} bytes in all)"


class PendingLine:
    """An incomplete line. As on a terminal, text after a carriage return overwrites the text before it."""

    def __init__(self) -> None:
        self.started = False
        self.overwrites = False
        self.updated = False
        """Whether text was added since the line was last shown."""
        self._now = self._before = (b"", 0)
        """Beginning and size of the text since the last carriage return, and of the text before it."""

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
        """Beginning and size in bytes of what a terminal would show; an erased progress bar is still shown."""
        return self._now if self._now[0].strip(_BLANK) or not self._before[1] else self._before

    @property
    def ends_with_cursor_up(self) -> bool:
        return self._now[0].endswith(_UP)

    def consume_cursor_up(self) -> bool:
        """Undo one cursor-up at the end of a row; False if there is none."""
        if not self.ends_with_cursor_up:
            return False
        text, size = self._now
        self._now = (text[: -len(_UP)], size - len(_UP))
        if not self.ends_with_cursor_up:
            self.add(b"\r")
        return True


def _is_plain(text: bytes) -> bool:
    return not text.translate(None, _PLAIN)
