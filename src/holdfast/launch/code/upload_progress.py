"""How far a run's code has been uploaded; the process that uploads it writes it, and commands show it."""

from __future__ import annotations

import contextlib
import time

import msgspec

from holdfast.host.files import atomic_write, read_small
from holdfast.run_dir import RunDir

INTERVAL_S = 0.25
"""Least seconds between two writes."""
STALE_S = 60.0
"""After so many seconds without a write, the process that uploaded was killed, or nothing moves."""


class UploadProgress(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of the code's archive."""

    sent_bytes: int
    total_bytes: int

    @property
    def text(self) -> str:
        """Such as `the code is uploaded: 12 of 480 MiB`."""
        return f"the code is uploaded: {self.sent_bytes / 2**20:,.0f} of {self.total_bytes / 2**20:,.0f} MiB"


def upload_progress(folder: RunDir) -> UploadProgress | None:
    """The upload in progress; None if there is none."""
    try:
        if time.time() - folder.code_upload.stat().st_mtime > STALE_S:
            return None
        return msgspec.json.decode(read_small(folder.code_upload), type=UploadProgress)
    except (OSError, msgspec.MsgspecError):
        return None


class UploadRecord:
    """Stores in the run's folder how far an upload is, while it lasts."""

    def __init__(self, folder: RunDir, total_bytes: int) -> None:
        self._folder = folder
        self._total_bytes = total_bytes
        self._sent_bytes = 0
        self._written_at = 0.0

    def add(self, sent_bytes: int) -> None:
        """Count bytes that were sent; a full disk costs the display, not the upload."""
        self._sent_bytes += sent_bytes
        if time.monotonic() - self._written_at >= INTERVAL_S:
            self._written_at = time.monotonic()
            progress = UploadProgress(sent_bytes=self._sent_bytes, total_bytes=self._total_bytes)
            with contextlib.suppress(OSError):
                atomic_write(self._folder.code_upload, msgspec.json.encode(progress))

    def end(self) -> None:
        """The upload has ended, or has failed."""
        with contextlib.suppress(OSError):
            self._folder.code_upload.unlink(missing_ok=True)
