"""Reads documents from files: text, JSON lines and Parquet, uncompressed or compressed with gzip or zstd."""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import zstandard

from holdfast.errors import ExitCode, HoldfastError, failure
from holdfast.findings import Owner

CHUNK_BYTES = 2**20
"""Approximate size of one read from a text file, extended to the end of a line."""


class DocumentChunk(NamedTuple):
    """A part of a document."""

    text: str | bytes
    last: bool
    """Whether it is the document's last part."""


def expand_paths(paths: Sequence[Path | str]) -> list[Path]:
    """Expand folders to their files, by name; raises for missing paths."""
    found: list[Path] = []
    for path in map(Path, paths):
        if not path.exists():
            raise _unreadable(path, "there is no such file or folder", owner=Owner.USER)
        found += sorted(each for each in path.rglob("*") if each.is_file()) if path.is_dir() else [path]
    return found


def read_documents(paths: Sequence[Path], column: str) -> Iterator[DocumentChunk]:
    """The documents of the files, in order: a text file is one; in other formats each row is one, in `column`."""
    for path in paths:
        try:
            yield from _reader(path)(path, column)
        except HoldfastError:
            raise
        except (OSError, EOFError, ValueError, zlib.error, zstandard.ZstdError) as error:
            raise _unreadable(path, f"{type(error).__name__}: {error}") from error


def _reader(path: Path) -> Callable[[Path, str], Iterator[DocumentChunk]]:
    kind = next((suffix for suffix in reversed(path.suffixes) if suffix not in _OPENERS), "")
    return _READERS.get(kind, _text)


def _gzip(path: Path) -> IO[bytes]:
    return cast("IO[bytes]", gzip.open(path, "rb"))


def _zstd(path: Path) -> IO[bytes]:
    return cast("IO[bytes]", io.BufferedReader(_ZstdReader(path)))


class _ZstdReader(io.RawIOBase):
    """A file compressed with zstd; zstandard's own readers accept a truncated file as complete."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb")
        self._frame = zstandard.ZstdDecompressor().decompressobj()
        self._ready = b""
        self._within = False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            packed = self._frame.unused_data or self._file.read(CHUNK_BYTES)
            if not packed:
                if self._within:
                    raise EOFError("the file ends within a frame")
                return 0
            if self._frame.eof:
                self._frame = zstandard.ZstdDecompressor().decompressobj()
            self._ready = self._frame.decompress(packed)
            self._within = not self._frame.eof
        count = min(len(buffer), len(self._ready))
        buffer[:count], self._ready = self._ready[:count], self._ready[count:]
        return count

    def close(self) -> None:
        self._file.close()
        super().close()


_OPENERS: dict[str, Callable[[Path], IO[bytes]]] = {".gz": _gzip, ".zst": _zstd}


def _open(path: Path) -> IO[bytes]:
    return _OPENERS.get(path.suffix, lambda path: path.open("rb"))(path)


def _text(path: Path, _column: str) -> Iterator[DocumentChunk]:
    with _open(path) as file:
        text = file.read(CHUNK_BYTES) + file.readline()
        while text:
            following = file.read(CHUNK_BYTES) + file.readline()
            yield DocumentChunk(text, last=not following)
            text = following


def _json_lines(path: Path, column: str) -> Iterator[DocumentChunk]:
    with _open(path) as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield _row(_parsed(line, f"{path}:{number}"), column, f"{path}:{number}")


def _parsed(line: bytes, where: str) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:  # its line number is 1: it was given one line
        raise _unreadable(where, f"{error.msg} at its character {error.pos + 1}") from error
    except ValueError as error:
        raise _unreadable(where, str(error)) from error


def _json(path: Path, column: str) -> Iterator[DocumentChunk]:
    """Rows of JSON lines, as in most files of that name, C4's among them, or of one array."""
    with _open(path) as file:
        array = file.read(1) == b"["
    if not array:
        yield from _json_lines(path, column)
        return
    with _open(path) as file:
        rows = cast("list[Any]", json.load(file))
    for number, row in enumerate(rows, 1):
        yield _row(row, column, f"{path}, row {number}")


def _parquet(path: Path, column: str) -> Iterator[DocumentChunk]:
    try:
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise failure(
            "data-unreadable",
            "Parquet files are read with pyarrow, which is not installed",
            exit_code=ExitCode.CANNOT_RUN_HERE,
            where=str(path),
            remedy="pip install pyarrow",
        ) from error
    with cast("Any", ParquetFile)(path) as file:
        columns = [column] if column in file.schema_arrow.names else None
        for batch in file.iter_batches(columns=columns):
            yield from (_row(row, column, str(path)) for row in batch.to_pylist())


_READERS: dict[str, Callable[[Path, str], Iterator[DocumentChunk]]] = {
    ".json": _json,
    ".jsonl": _json_lines,
    ".ndjson": _json_lines,
    ".parquet": _parquet,
}


def _row(row: Any, column: str, where: str) -> DocumentChunk:
    return DocumentChunk(text_column(row, column, where), last=True)


def text_column(row: Any, column: str, where: str) -> str | bytes:
    """The text of a table's row, or of a document that is plain text."""
    text = cast("dict[str, Any]", row).get(column) if isinstance(row, dict) else row
    if isinstance(text, str | bytes):
        return text
    found = ", ".join(map(str, cast("dict[str, Any]", row))) if isinstance(row, dict) else type(row).__name__
    raise failure(
        "data-unreadable",
        f"a row has no text in its column '{column}'",
        exit_code=ExitCode.USAGE,
        where=where,
        evidence=(f"it has: {found}",),
        remedy="say which column the text is in: column=...",
    )


def _unreadable(where: Path | str, why: str, owner: Owner = Owner.CLUSTER) -> HoldfastError:
    return failure(
        "data-unreadable",
        "a file of the data cannot be read",
        exit_code=ExitCode.NOT_FOUND if owner is Owner.USER else ExitCode.STORAGE_FAILED,
        where=str(where),
        evidence=(why,),
        remedy="look at the file, its rights and its disk; a copy that was cut short is fetched again",
        owner=owner,
    )
