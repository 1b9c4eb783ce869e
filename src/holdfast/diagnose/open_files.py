"""Opens the input files: regular files only, without their holes, and only those that contain text.

Files are untrusted: a link may point to a device, a log may begin with a hole or with binary output, and folders may
nest deeper than Python recurses.
"""

from __future__ import annotations

import errno
import io
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

SNIFF_BYTES = 4096
SAMPLE_BYTES = 512
"""Size of one sample of a file that begins with something other than text."""
SAMPLES = 64
"""Samples of such a file, evenly spread; the last is its end, where an error usually is."""
FRAGMENT_BYTES = 128
"""How much of a sample is judged in one step; it may itself begin with something else."""

_CONTROL_CHARACTERS = bytes(set(range(32)) - set(b"\b\t\n\r\f\x1b"))
"""Bytes that no text contains, except a torn byte here and there."""
_BINARY_MAGIC = re.compile(
    rb"\x7fELF|PK\x03\x04|\x93NUMPY|\x89PNG|\xff\xd8\xff|\x89HDF|PAR1|ARROW1|SQLite format|[\s\S]{5}\0\0\0\{"
)
"""Programs, core dumps, archives, pictures, tables, checkpoints (the last are safetensors): none of them holds logs."""


class NotARegularFile(Exception):
    """A socket, pipe, device, or a file that the kernel generates on read, such as /proc/kmsg."""


class SparseFileReader(io.FileIO):
    """The data of a regular file without its holes, which take as long to read as data and contain nothing."""

    def __init__(self, path: Path, offset: int = 0) -> None:
        if not stat.S_ISREG(path.stat().st_mode):
            raise NotARegularFile
        super().__init__(path, opener=_open_nonblocking)  # another file may have replaced it meanwhile
        status = os.fstat(self.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_dev == _proc_device():
            self.close()
            raise NotARegularFile
        self.size = status.st_size
        self.offset = offset
        """Offset in the file, holes included, of the next read."""
        self._end = offset
        self.first_data = self.offset if self._find_data() else self.size
        """Offset of the first data from the start of reading."""

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        """Reads the rest of a stretch of data, or the beginning of the next; 0 at the end of the file."""
        if self.offset >= self._end and not self._find_data():
            return 0
        count = super().readinto(memoryview(buffer).cast("B")[: self._end - self.offset]) or 0
        self.offset += count
        return count

    def samples(self) -> Iterator[bytes]:
        """Pieces of the file from its first data to its end, the end first."""
        last = max(self.first_data, self.size - SAMPLE_BYTES)
        for number in range(SAMPLES, 0, -1):
            yield os.pread(self.fileno(), SAMPLE_BYTES, self.first_data + (last - self.first_data) * number // SAMPLES)

    def _find_data(self) -> bool:
        """Moves to the next stretch of data; returns whether there is any."""
        try:
            self.offset = os.lseek(self.fileno(), self.offset, os.SEEK_DATA)
            self._end = os.lseek(self.fileno(), self.offset, os.SEEK_HOLE)
        except OSError as error:
            if error.errno == errno.ENXIO:
                return False
            self._end = 1 << 62  # a file system without support for holes
        os.lseek(self.fileno(), self.offset, os.SEEK_SET)
        return True


def _open_nonblocking(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY)


def _proc_device() -> int | None:
    """The device number of /proc; None where it is not mounted."""
    try:
        return os.stat("/proc").st_dev
    except OSError:
        return None


def walk_files(folder: Path, fail: Callable[[Path, OSError], None]) -> Iterator[Path]:
    """Every file below a folder in order, its own files before those of its subfolders; links to folders are skipped.

    `fail` is called with each folder that cannot be listed.
    """
    waiting = [folder]
    while waiting:
        here = waiting.pop()
        try:
            with os.scandir(here) as found:
                entries = sorted(found, key=lambda entry: entry.name)
        except OSError as error:
            fail(here, error)
            continue
        folders = [entry for entry in entries if _is_folder(entry, follow=False)]
        yield from (here / entry.name for entry in entries if not _is_folder(entry, follow=True))
        waiting += [here / entry.name for entry in reversed(folders)]


def _is_folder(entry: os.DirEntry[str], *, follow: bool) -> bool:
    try:
        return entry.is_dir(follow_symlinks=follow)
    except OSError:
        return False


def is_binary(head: bytes) -> bool:
    """Whether a file with this beginning is not text, or at least does not begin with text."""
    return _BINARY_MAGIC.match(head) is not None or _count_control_characters(head) * 20 > len(head)


def holds_text(head: bytes, samples: Iterable[bytes]) -> bool:
    """Whether there is text further on in a file that begins with something else."""
    return _BINARY_MAGIC.match(head) is None and any(map(_is_text, chain.from_iterable(map(_fragments, samples))))


def _fragments(sample: bytes) -> Iterator[bytes]:
    """Parts of a sample, the last of which is its end."""
    return (sample[max(0, end - FRAGMENT_BYTES) : end] for end in range(len(sample), 0, -FRAGMENT_BYTES))


def _is_text(piece: bytes) -> bool:
    """Whether it looks like lines of text: tensors have few control characters too, but no UTF-8 with newlines."""
    text = piece.decode("utf-8", "ignore").encode()
    return b"\n" in text and (len(text) - _count_control_characters(text)) * 20 >= len(piece) * 19


def _count_control_characters(data: bytes) -> int:
    return len(data) - len(data.translate(None, _CONTROL_CHARACTERS))
