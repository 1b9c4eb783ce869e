"""Turns the input into chunks: files, folders, compressed files, standard input; and notes what was not read.

Everything is bounded: bytes per file and in all, line length, number of files. Nothing is written, and no input file is
ever run or unpickled.
"""

from __future__ import annotations

import codecs
import contextlib
import gzip
import io
import os
import re
import stat
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias, cast

import zstandard
from msgspec.structs import replace

from holdfast.diagnose.line_index import LazyLineNumber, LineIndex
from holdfast.diagnose.log_chunk import LogChunk, LogSource
from holdfast.diagnose.memory_budget import FACTS_BYTES, MemoryBudget
from holdfast.diagnose.open_files import (
    SNIFF_BYTES,
    NotARegularFile,
    SparseFileReader,
    holds_text,
    is_binary,
    walk_files,
)
from holdfast.diagnose.structured import flight_recorder, structured_files
from holdfast.diagnose.structured.dump_store import DumpStore
from holdfast.protocol.nccl_log_files import place_of

CHUNK_BYTES = 1 << 18
"""Fits into a core's own cache while several readers scan it."""
LARGE_BYTES = 32 << 20
"""Inputs beyond this size are searched with Hyperscan."""
_PACKED_SUFFIXES, _MOST_PACKED = frozenset((".gz", ".zst")), 16
"""A compressed log counts as this many times its size."""
LINE_BYTES = 1 << 16
"""Longest line that is read whole; of a longer one this much, and its end: a traceback may follow a progress bar."""
END_BYTES = 1 << 12
"""How much of the end of such a line is read."""
UNPACKED_BYTES = 8 << 30
"""Most bytes unpacked from one compressed file."""
UNPACKED_TOTAL_BYTES = 32 << 30
"""Most bytes unpacked from all of them."""
STREAM_BYTES = 32 << 30
"""Most bytes read from a stream, which may have no end."""
WINDOW_BYTES = 128 << 20
"""Most memory that a zstd file may require."""
MAX_FILES = 200_000
MAX_NOTES = 20
"""Files named per kind of problem; further ones are only counted."""
SEARCH_BYTES = 1 << 20
"""How far into a stream that begins with something else the reader looks for text."""

_NOT_LOG_SUFFIXES = frozenset(
    (".py", ".ipynb", ".sh", ".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".md", ".rst", ".html", ".toml", ".ini", ".cfg")
)
"""File endings of code and of pages about it, which quote errors that did not happen."""
_BOMS = ((b"\xff\xfe", "utf-16-le"), (b"\xfe\xff", "utf-16-be"))
_RANK = re.compile(r"(?:^|[^a-z])rank[-_.= ]?(?P<rank>\d{1,7})(?!\d)", re.IGNORECASE)
_NODE = re.compile(r"(?:^|[-_./])(?P<node>(?:node|worker|host|pod|master|launcher)[-_]?\d+)", re.IGNORECASE)
_REPLICA = re.compile(r"(?:^|[-_./])replica[-_.=]?(?P<replica>\d{1,7})(?!\d)", re.IGNORECASE)


Reader: TypeAlias = "io.BufferedReader[Any]"


class LogInput:
    """The input; `notes` collects, while chunks are read, what was left out."""

    def __init__(self, paths: tuple[Path, ...], *, stdin: BinaryIO | None = None, shared_logs: bool = False) -> None:
        """`shared`: several ranks write into one file, which is then named after its launcher's first rank."""
        self._paths = paths
        self._shared_logs = shared_logs
        self._stdin = stdin
        self.budget = MemoryBudget(FACTS_BYTES)
        """The memory budget for all that is kept, except NCCL's set-up."""
        self.notes: list[str] = []
        self._note_counts: Counter[str] = Counter()
        self.dumps = DumpStore(self.budget)
        """Flight recorder dumps among the files, which are not lines; filled like `notes`."""
        self.files = self.bytes = 0
        self._left_out: Counter[str] = Counter()
        self._unpacked_bytes = 0

    def is_large(self) -> bool:
        """Whether searching the input takes longer than preparing the faster search; a stream may be of any size."""
        left = LARGE_BYTES
        for path in self._paths:
            if not path.exists() or path.is_fifo():
                return True
            for file in walk_files(path, lambda _path, _error: None) if path.is_dir() else (path,):
                with contextlib.suppress(OSError):
                    left -= file.stat().st_size * (_MOST_PACKED if file.suffix in _PACKED_SUFFIXES else 1)
                if left < 0:
                    return True
        return False

    def chunks(self) -> Iterator[LogChunk]:
        """Every chunk of every file, one file after the other."""
        for path in self._paths:
            if str(path) == "-" and self._stdin is not None:
                yield from self._read_stream(self._stdin, LogSource(name="-"), most=STREAM_BYTES)
                continue
            yield from self._read_path(path)
        self.notes += [f"not read: {count} {what}" for what, count in sorted(self._left_out.items())]
        more = ((count - MAX_NOTES, what) for what, count in sorted(self._note_counts.items()))
        self.notes += [f"{count:,} more {what}" for count, what in more if count > 0]
        self.notes += self.dumps.notes()

    def _note(self, note: str, what: str) -> None:
        """Notes a problem of one file: by name if there are few, else only counted."""
        self._note_counts[what] += 1
        if self._note_counts[what] <= MAX_NOTES:
            self.notes.append(note)

    def _read_path(self, path: Path) -> Iterator[LogChunk]:
        """The paths named by the user: a pipe, such as the shell's <(command), a file, or a folder."""
        try:
            mode = path.stat().st_mode
            if stat.S_ISFIFO(mode):
                with _open_pipe(path) as pipe:
                    yield from self._read_stream(pipe, LogSource(name=_printable_path(path)), most=STREAM_BYTES)
                return
        except OSError as error:
            self._unreadable(path, error)
            return
        if not stat.S_ISDIR(mode):
            yield from self._read_file(path, self._source(path, path.parent))
            return
        for file in walk_files(path, self._unreadable):
            if self.files >= MAX_FILES:
                self.notes.append(f"only the first {MAX_FILES:,} files were read")
                return
            if file.suffix in _NOT_LOG_SUFFIXES:
                self._left_out["files of code or documentation"] += 1
                continue
            yield from self._read_file(file, self._source(file, path))

    def _source(self, path: Path, root: Path) -> LogSource:
        source = _source(path, root)
        return replace(source, rank=None) if self._shared_logs else source

    def _read_file(self, path: Path, source: LogSource) -> Iterator[LogChunk]:
        try:
            with SparseFileReader(path) as file:
                yield from self._read_stream(file, source, LineIndex(path), most=max(file.size + 1, STREAM_BYTES))
        except NotARegularFile:
            note = f"{source.name} is not read: it is a socket, a pipe, a device or a file of /proc"
            self._note(note, "sockets, pipes or devices are not read")
        except OSError as error:
            self._unreadable(path, error)

    def _unreadable(self, path: Path, error: OSError) -> None:
        self._note(f"{_printable_path(path)} cannot be read: {error.strerror or error}", "files cannot be read")

    def _read_stream(
        self, file: BinaryIO | SparseFileReader, source: LogSource, lines: LineIndex | None = None, *, most: int
    ) -> Iterator[LogChunk]:
        """The chunks of an opened file, up to the limit per file, or to the rest of the limit for unpacked data."""
        self.files += 1
        reader = _buffered(file)
        zeros = _skip_zeros(reader, most)
        unpack = next(
            (unpack for magic, unpack in _DECOMPRESSORS.items() if reader.peek(SNIFF_BYTES).startswith(magic)), None
        )
        try:
            if unpack is not None:
                reader = unpack(reader)
                most = min(UNPACKED_BYTES, UNPACKED_TOTAL_BYTES - self._unpacked_bytes)
            head = reader.peek(SNIFF_BYTES)[:SNIFF_BYTES]
            begun = b""
            if flight_recorder.is_dump(head) or structured_files.kind_of(source.name, head):
                begun = _read_all(reader, structured_files.DOCUMENT_BYTES + 1)
                try:
                    document = self._read_document(source, head, begun)
                except Exception as error:  # whatever it contains, the other files are read
                    document = None
                    note = f"{source.name} cannot be read as a document, and is read as text: {type(error).__name__}"
                    self._note(note, "documents cannot be read as such")
                if document is not None:
                    self.bytes += len(begun)
                    yield from document
                    return
            encoding = next((encoding for bom, encoding in _BOMS if head.startswith(bom)), None)
            if encoding is None and is_binary(head):
                if begun or unpack or not isinstance(file, SparseFileReader):
                    begun = begun or _read_all(reader, SEARCH_BYTES)
                    samples = (begun,)
                else:
                    samples = file.samples()
                if not holds_text(head, samples):
                    self._left_out["files that are no text"] += 1
                    return
            self._note_hole(source, zeros + (file.first_data if isinstance(file, SparseFileReader) else 0))
            if unpack or encoding:
                lines = None  # an offset here is not one in the file
            before = self.bytes
            try:
                yield from self._whole_lines(reader, source, most, encoding, begun, lines, zeros)
            finally:
                self._unpacked_bytes += self.bytes - before if unpack else 0
        except (EOFError, zlib.error, gzip.BadGzipFile, zstandard.ZstdError) as error:
            note = f"{source.name} is damaged, and read up to the damage: {error}"
            self._note(note, "files are damaged, and read up to the damage")

    def _note_hole(self, source: LogSource, size: int) -> None:
        if size >= SNIFF_BYTES:
            note = (
                f"{source.name} begins with a hole of {size:,} bytes, where older lines were dropped (logs.max_bytes)"
            )
            self._note(note, "files begin with a hole")

    def _read_document(self, source: LogSource, head: bytes, data: bytes) -> Iterator[LogChunk] | None:
        """The lines of a document; None if it is not one after all, or is too large."""
        if structured_files.is_too_large(data):
            return None
        if flight_recorder.is_dump(head):
            if (dump := flight_recorder.read(source, data)) is None:
                return None
            self.dumps.add(dump)
            return iter(())
        kind = structured_files.kind_of(source.name, head)
        return iter(structured_files.to_chunks(kind, source, data)) if kind else None

    def _whole_lines(
        self,
        reader: Reader,
        source: LogSource,
        most: int,
        encoding: str | None,
        begun: bytes,
        lines: LineIndex | None,
        skipped: int,
    ) -> Iterator[LogChunk]:
        """Chunks that end with a line's end, from the `begun` data and the rest; only the last may not.

        `skipped` is how much was read before.
        """
        number, rest, taken, begins, passing = 1, b"", skipped, skipped, False
        most += skipped
        decoder = codecs.getincrementaldecoder(encoding)("replace") if encoding else None
        while taken < most and (data := begun or reader.read(CHUNK_BYTES)):
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
            yield LogChunk(source=source, first_line=LazyLineNumber(lines, begins) if lines else number, data=block)
            if lines is None:
                number += block.count(b"\n")
            rest = data[end:]
            begins = taken - len(rest)
            if len(rest) > LINE_BYTES:
                self._left_out["middles of very long lines"] += 1
                rest, passing = rest[:LINE_BYTES], True
        if taken >= most:
            note = f"{source.name}: only the first {taken >> 30} GiB were read"
            self._note(note, "files were read only up to the limit per file")
        if rest:
            yield LogChunk(source=source, first_line=LazyLineNumber(lines, begins) if lines else number, data=rest)


def _skip_zeros(reader: Reader, most: int) -> int:
    """Skips the zeros of a hole, or of the rest of one; returns how many there were."""
    count = 0
    while count < most and (head := reader.peek(SNIFF_BYTES)).startswith(b"\0"):
        count += len(reader.read(len(head) - len(head.lstrip(b"\0"))))
    return count


def _read_all(reader: Reader, most: int) -> bytes:
    """Reads up to this many bytes."""
    parts: list[bytes] = []
    while most > 0 and (part := reader.read(min(most, CHUNK_BYTES))):
        parts.append(part)
        most -= len(part)
    return b"".join(parts)


def _open_pipe(path: Path) -> BinaryIO:
    """A named pipe, opened without waiting for a writer; without one it is empty."""
    pipe = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    os.set_blocking(pipe, True)
    return open(pipe, "rb")


def _buffered(file: Any) -> Reader:
    return cast("Reader", file if isinstance(file, io.BufferedReader) else io.BufferedReader(file))


def _gunzip(packed: Reader) -> Reader:
    return _buffered(gzip.GzipFile(fileobj=packed))


def _unzstd(packed: Reader) -> Reader:
    unpacker = zstandard.ZstdDecompressor(max_window_size=WINDOW_BYTES)
    return _buffered(unpacker.stream_reader(packed, read_across_frames=True))


_DECOMPRESSORS: Mapping[bytes, Callable[[Reader], Reader]] = {b"\x1f\x8b": _gunzip, b"\x28\xb5\x2f\xfd": _unzstd}


def _printable_path(path: Path) -> str:
    """A path as it can be printed and sent: file names are bytes, and not always text."""
    return str(path).encode("utf-8", "backslashreplace").decode()


def _source(path: Path, root: Path) -> LogSource:
    """A file's source, with the rank and node that its relative path names."""
    below = os.path.relpath(path, root) if root != path else path.name
    rank, node = _RANK.findall(below), _NODE.findall(below)
    replica = _REPLICA.findall(f"{path.parent.name}/{below}")
    by_nccl = place_of(path)
    return LogSource(
        name=_printable_path(path),
        rank=int(rank[-1]) if rank else None,
        node=by_nccl[0] if by_nccl else node[-1] if node else None,
        replica=by_nccl[1] if by_nccl else int(replica[-1]) if replica else None,
    )
