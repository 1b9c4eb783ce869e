"""Receives a run's event log and rank logs from the controller's pod, chunk by chunk, into the local folder.

launch/changed_files.py finds what to send.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated

import msgspec

from holdfast.events import RunFinished
from holdfast.events.log import last_event
from holdfast.launch.changed_files import CHUNK_BYTES, LOG_TAIL_KEY, SYNCED_FILES, log_tail_crc, write_at
from holdfast.launch.kubernetes.client.pod_port import PortClosed
from holdfast.run_dir import EVENTS_NAME, RunDir

MAX_HEADER_BYTES = 512
"""Longest header line of a chunk."""


class ChunkHeader(msgspec.Struct, frozen=True):
    """Header of a chunk; one without bytes ends a poll."""

    name: Annotated[str, msgspec.Meta(pattern=f"^({SYNCED_FILES.pattern})$")] = EVENTS_NAME
    at: Annotated[int, msgspec.Meta(ge=0, le=2**53)] = 0
    bytes: Annotated[int, msgspec.Meta(ge=0, le=CHUNK_BYTES)] = 0
    failing: str = ""
    """At the end of a poll: the last line of the controllers that keep failing; empty if they do not."""


_chunk_header = msgspec.json.Decoder(ChunkHeader)


async def read_chunks(output: AsyncIterator[bytes]) -> AsyncIterator[tuple[ChunkHeader, bytes]]:
    """Chunks from the sync server: a header line, then as many bytes as it states.

    Raises PortClosed for malformed input: the pod may run other code than holdfast's.
    """
    buffer = bytearray()
    async for data in output:
        buffer += data
        while (end := buffer.find(b"\n", 0, MAX_HEADER_BYTES)) >= 0:
            try:
                piece = _chunk_header.decode(buffer[:end])
            except msgspec.DecodeError as error:
                raise PortClosed(f"what the controller's pod sends is no part of a run: {error}") from error
            if len(buffer) - end - 1 < piece.bytes:
                break
            yield piece, bytes(buffer[end + 1 : end + 1 + piece.bytes])
            del buffer[: end + 1 + piece.bytes]
        if end < 0 and len(buffer) > MAX_HEADER_BYTES:
            raise PortClosed("what the controller's pod sends is no part of a run: a line without an end")


class FileCopy:
    """The local copy of a run's files, during one connection."""

    def __init__(self, folder: RunDir) -> None:
        self._folder = folder
        self._is_resending = False
        """Whether the pod is sending the log from the start."""

    def state(self) -> dict[str, int]:
        """Local size of each file, and the checksum of the log's end."""
        files = (
            self._folder.events,
            *self._folder.path.glob("logs/*/*"),
            *self._folder.path.glob("traces/*/rank-*"),
        )
        sizes = {str(path.relative_to(self._folder.path)): path.stat().st_size for path in files if path.exists()}
        log = self._folder.events
        return sizes | ({LOG_TAIL_KEY: log_tail_crc(log, sizes[log.name])} if log.name in sizes else {})

    def write(self, piece: ChunkHeader, data: bytes) -> bool:
        """Write a chunk of a file; returns whether the event log is now complete.

        A log that is sent from the start replaces the local one once it is complete: readers never see a part of it.
        """
        log, place = self._folder.events, self._folder.path / piece.name
        fresh = log.with_suffix(".new")
        if not piece.bytes:
            if not self._is_resending:
                return False
            self._is_resending = False
            fresh.rename(log)
        elif place == log and (self._is_resending or (piece.at == 0 and log.exists())):
            self._is_resending = True
            write_at(fresh, piece.at, data)
            return False
        else:
            write_at(place, piece.at, data)
        return place == log and isinstance(last_event(log), RunFinished)
