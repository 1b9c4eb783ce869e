"""Owns how a pile becomes blocks: files, folders, compressed files, standard input; and what of it is not read.

Everything is bounded: how much is read of a file and in all, how long a line may be, how many files there may be.
Refuses to own what lines mean. Nothing is written, and nothing in the pile is ever run or unpickled.
"""

from __future__ import annotations

import codecs
import gzip
import io
import os
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PurePath
from typing import Any, BinaryIO, TypeAlias, cast

import zstandard

from holdfast.diagnose.block import Block, Source
from holdfast.diagnose.numbering import LineAt, Lines
from holdfast.diagnose.room import FACTS_BYTES, Room
from holdfast.diagnose.structured import documents, flight
from holdfast.diagnose.structured.dumps import Dumps

BLOCK_BYTES = 1 << 18
"""What stays in a core's own cache while several readers go over it."""
LINE_BYTES = 1 << 16
"""Longest line that is read whole; of a longer one this much, and its end: a traceback may follow a progress bar."""
END_BYTES = 1 << 12
"""How much of the end of such a line is read."""
UNPACKED_BYTES = 8 << 30
"""Most that is unpacked of one compressed file."""
UNPACKED_IN_ALL_BYTES = 32 << 30
"""Most that is unpacked of all of them."""
STREAM_BYTES = 32 << 30
"""Most that is read of a stream, which may have no end."""
WINDOW_BYTES = 128 << 20
"""Most memory that a zstd file may ask for."""
MOST_FILES = 200_000
MOST_NOTED = 20
"""Files that are named of one kind of trouble; more of them are only counted."""
SNIFF_BYTES = 4096

_NO_LOGS = frozenset(
    (".py", ".ipynb", ".sh", ".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".md", ".rst", ".html", ".toml", ".ini", ".cfg")
)
"""Endings of code and of pages about it, which quote errors without having had them."""
_CONTROLS = bytes(set(range(32)) - set(b"\b\t\n\r\f\x1b"))
"""What no text holds, but for a torn byte here and there."""
_BOMS = ((b"\xff\xfe", "utf-16-le"), (b"\xfe\xff", "utf-16-be"))
_RANK = re.compile(r"(?:^|[^a-z])rank[-_.= ]?(?P<rank>\d{1,7})(?!\d)", re.IGNORECASE)
_NODE = re.compile(r"(?:^|[-_./])(?P<node>(?:node|worker|host|pod|master|launcher)[-_]?\d+)", re.IGNORECASE)
_REPLICA = re.compile(r"(?:^|[-_./])replica[-_.=]?(?P<replica>\d{1,7})(?!\d)", re.IGNORECASE)


Reader: TypeAlias = "io.BufferedReader[Any]"


class Pile:
    """What is to be read; `notes` fills, while blocks are taken, with what was left out."""

    def __init__(self, paths: tuple[Path, ...], *, stdin: BinaryIO | None = None) -> None:
        self._paths = paths
        self._stdin = stdin
        self.room = Room(FACTS_BYTES)
        """For all that is kept of it, but for NCCL's set-up."""
        self.notes: list[str] = []
        self._noted: Counter[str] = Counter()
        self.dumps = Dumps(self.room)
        """Flight recorder dumps among the files, which are no lines; filled as `notes` is."""
        self.files = self.bytes = 0
        self._left_out: Counter[str] = Counter()
        self._unpacked = 0

    def blocks(self) -> Iterator[Block]:
        """Every block of every file, a file after the other."""
        for path in self._paths:
            if str(path) == "-" and self._stdin is not None:
                yield from self._stream(self._stdin, Source(name="-"), most=STREAM_BYTES)
                continue
            if path.is_fifo():  # asked for by name, such as the shell's <(command)
                with _opened_pipe(path) as pipe:
                    yield from self._stream(pipe, Source(name=str(path)), most=STREAM_BYTES)
                continue
            root = path if path.is_dir() else path.parent
            for file in self._files(path):
                yield from self._file(file, _source(file, root))
        self.notes += [f"not read: {count} {what}" for what, count in sorted(self._left_out.items())]
        more = ((count - MOST_NOTED, what) for what, count in sorted(self._noted.items()))
        self.notes += [f"{count:,} more {what}" for count, what in more if count > 0]
        self.notes += self.dumps.notes()

    def _note(self, said: str, what: str) -> None:
        """Say of one file, by name, what is so of few; of many it is only counted."""
        self._noted[what] += 1
        if self._noted[what] <= MOST_NOTED:
            self.notes.append(said)

    def _files(self, path: Path) -> Iterator[Path]:
        if not path.is_dir():
            yield path
            return
        for folder, folders, names in os.walk(path):
            folders.sort()
            for name in sorted(names):
                if self.files >= MOST_FILES:
                    self.notes.append(f"only the first {MOST_FILES:,} files were read")
                    return
                if PurePath(name).suffix in _NO_LOGS:
                    self._left_out["files of code or documentation"] += 1
                    continue
                yield Path(folder) / name

    def _file(self, path: Path, source: Source) -> Iterator[Block]:
        try:
            if not path.is_file():
                self._left_out["sockets, pipes or devices"] += 1
                return
            with path.open("rb") as file:
                yield from self._stream(file, source, Lines(path), most=max(path.stat().st_size + 1, STREAM_BYTES))
        except OSError as error:
            self._note(f"{source.name} cannot be read: {error.strerror or error}", "files cannot be read")

    def _stream(self, file: BinaryIO, source: Source, lines: Lines | None = None, *, most: int) -> Iterator[Block]:
        """The blocks of what was opened, of which so much is read, or so much of what is packed in it as is left."""
        self.files += 1
        reader = _buffered(file)
        unpack = next((unpack for magic, unpack in _PACKED.items() if reader.peek(SNIFF_BYTES).startswith(magic)), None)
        try:
            if unpack is not None:
                reader = unpack(reader)
                most = min(UNPACKED_BYTES, UNPACKED_IN_ALL_BYTES - self._unpacked)
            head = reader.peek(SNIFF_BYTES)[:SNIFF_BYTES]
            begun = b""
            if flight.fits(head) or documents.kind_of(source.name, head):
                begun = _read(reader, documents.DOCUMENT_BYTES + 1)
                if (told := self._document(source, head, begun)) is not None:
                    self.bytes += len(begun)
                    yield from told
                    return
            encoding = next((encoding for bom, encoding in _BOMS if head.startswith(bom)), None)
            if encoding is None and _is_binary(head):
                self._left_out["files that are no text"] += 1
                return
            if unpack or encoding:
                lines = None  # an offset here is none in the file
            before = self.bytes
            try:
                yield from self._whole_lines(reader, source, most, encoding, begun, lines)
            finally:
                self._unpacked += self.bytes - before if unpack else 0
        except (EOFError, zlib.error, gzip.BadGzipFile, zstandard.ZstdError) as error:
            said = f"{source.name} is damaged, and read up to there: {error}"
            self._note(said, "files are damaged, and read up to there")

    def _document(self, source: Source, head: bytes, data: bytes) -> Iterator[Block] | None:
        """The lines that a document comes to; None for what is none after all, or is too large for one."""
        if documents.is_too_large(data):
            return None
        if flight.fits(head):
            if (dump := flight.read(source, data)) is None:
                return None
            self.dumps.add(dump)
            return iter(())
        kind = documents.kind_of(source.name, head)
        return documents.blocks(kind, source, data) if kind else None

    def _whole_lines(
        self,
        reader: Reader,
        source: Source,
        most: int,
        encoding: str | None,
        begun: bytes,
        lines: Lines | None,
    ) -> Iterator[Block]:
        """Blocks that end with a line's end, of what was `begun` to be read and the rest; only the last may not."""
        number, rest, taken, begins, passing = 1, b"", 0, 0, False
        decoder = codecs.getincrementaldecoder(encoding)("replace") if encoding else None
        while taken < most and (data := begun or reader.read(BLOCK_BYTES)):
            begun = b""
            taken += len(data)
            self.bytes += len(data)
            if decoder:
                data = decoder.decode(data).encode("utf-8", "replace")
            end = data.rfind(b"\n") + 1
            if passing:
                if not end:
                    continue
                passing, begin = False, max(0, data.find(b"\n") - END_BYTES)
                data, end = data[begin:], end - begin
            if not end:
                rest += data
                if len(rest) > LINE_BYTES:
                    self._left_out["middles of very long lines"] += 1
                    rest, passing = rest[:LINE_BYTES], True
                continue
            block = b"".join((rest, memoryview(data)[:end]))
            yield Block(source=source, first_line=LineAt(lines, begins) if lines else number, data=block)
            if lines is None:
                number += block.count(b"\n")
            rest = data[end:]
            begins = taken - len(rest)
            if len(rest) > LINE_BYTES:
                self._left_out["middles of very long lines"] += 1
                rest, passing = rest[:LINE_BYTES], True
        if taken >= most:
            said = f"{source.name}: only the first {taken >> 30} GiB were read"
            self._note(said, "files were read only up to what is read of one")
        if rest:
            yield Block(source=source, first_line=LineAt(lines, begins) if lines else number, data=rest)


def _is_binary(head: bytes) -> bool:
    return (len(head) - len(head.translate(None, _CONTROLS))) * 20 > len(head)


def _read(reader: Reader, most: int) -> bytes:
    """All that there is, and no more than this."""
    parts: list[bytes] = []
    while most > 0 and (part := reader.read(min(most, BLOCK_BYTES))):
        parts.append(part)
        most -= len(part)
    return b"".join(parts)


def _opened_pipe(path: Path) -> BinaryIO:
    """A named pipe, opened without waiting for somebody to write to it; where nobody does, it is empty."""
    pipe = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    os.set_blocking(pipe, True)
    return open(pipe, "rb")


def _buffered(file: Any) -> Reader:
    return cast("Reader", file if isinstance(file, io.BufferedReader) else io.BufferedReader(file))


def _gunzipped(packed: Reader) -> Reader:
    return _buffered(gzip.GzipFile(fileobj=packed))


def _unzstd(packed: Reader) -> Reader:
    unpacker = zstandard.ZstdDecompressor(max_window_size=WINDOW_BYTES)
    return _buffered(unpacker.stream_reader(packed, read_across_frames=True))


_PACKED: Mapping[bytes, Callable[[Reader], Reader]] = {b"\x1f\x8b": _gunzipped, b"\x28\xb5\x2f\xfd": _unzstd}


def _source(path: Path, root: Path) -> Source:
    """A file's source; what its path below the pile says of rank and node."""
    below = os.path.relpath(path, root) if root != path else path.name
    rank, node = _RANK.findall(below), _NODE.findall(below)
    replica = _REPLICA.findall(f"{path.parent.name}/{below}")
    return Source(
        name=str(path),
        rank=int(rank[-1]) if rank else None,
        node=node[-1] if node else None,
        replica=int(replica[-1]) if replica else None,
    )
