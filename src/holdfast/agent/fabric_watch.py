"""Reports what carries the traffic of NCCL's communicators, by the lines that this node's ranks log as they set up.

The files are read again from their start when they have grown and then rested, up to a limit, by the same reader as
`holdfast diagnose` uses; lines that change no report are passed over. Nothing is kept in between. Beyond the limit only
the newest lines of a file stay on the disk: they explain a failure.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from msgspec import Struct

from holdfast.clock import Clock
from holdfast.diagnose.log_chunk import LogChunk, LogSource
from holdfast.events import FabricObserved
from holdfast.host import sparse_files
from holdfast.protocol.nccl_log_files import INTERFACES, log_env, private_folder, private_path
from holdfast.protocol.orders import StartRanks

log = logging.getLogger("holdfast.agent")

POLL_S = 0.25
"""Seconds between two looks at the sizes of the files."""
MAX_GROWING_S = 2.5
"""Seconds for which files that keep growing are not read."""
MAX_LOAD = 0.05
"""Share of one core that reading may take."""
MAX_REST_S = 1.5
"""Longest rest after reading, so that a communicator is judged in time behind 32 MiB, which take half a second."""
MAX_FILE_BYTES = 4 << 20
"""Bytes read of each file; the set-up of one rank among 16,384 has about 1 MB for each communicator."""
KEPT_TAIL_BYTES = 1 << 20
"""Bytes kept at the end of a file that is longer than what is read of it."""
SLACK_BYTES = 1 << 20
"""Bytes more than that on the disk at which the middle of a file is freed."""
OUTPUT_BYTES = 128 << 10
"""Bytes read of each rank's output, where libibverbs writes as NCCL begins."""
MAX_FILES = 64
MAX_READER_BYTES = 64 << 20
MAX_REPORTS = 4
"""Reports of one communicator, whose transports are added as its ranks connect; the last is kept for when they have."""

MAX_WORDS_BYTES = 64
"""Bytes before what is new that are searched again, since a line may have been written in two parts."""
_NEWS = re.compile(rb"Init COMPLETE| via (?:NET|COLLNET|P2P|SHM|direct)|NCCL WARN |Call to ibv")

_READING = threading.Lock()
"""Only one thread may search at a time: the patterns' scratch memory is shared, and so is the core."""

_Key = tuple[str, int, tuple[tuple[int, int], ...]]


class _Growth(Struct, frozen=True, kw_only=True):
    """What is known of the files' sizes."""

    sizes: Mapping[Path, int]
    since: float
    """Monotonic seconds at which they were first seen to have grown since the last read."""


class FabricWatch:
    """The set-up logs of one attempt's ranks on this node, in their own folder."""

    def __init__(
        self,
        order: StartRanks,
        *,
        node: int,
        folder: Path,
        clock: Clock,
        send: Callable[[FabricObserved], object],
        poll_s: float = POLL_S,
    ) -> None:
        self._order, self._node, self._poll_s = order, node, poll_s
        self._node_folder = folder
        self._folder = private_folder(folder, order.replica, order.attempt)
        self._clock = clock
        self._send = send
        self._sent: dict[_Key, list[FabricObserved]] = {}
        self._task: asyncio.Task[None] | None = None
        self._trims = True
        """Whether the file system can free the middle of a file, as far as is known."""
        self._read_sizes: Mapping[Path, int] = {}
        self._growth: _Growth | None = None
        self._rest_until = 0.0

    def env_defaults(self, rank: int, given: Iterable[str]) -> dict[str, str]:
        """Where a rank's processes log the set-up of NCCL, unless the job or the node already says how they log."""
        if not self._order.nccl_logs:
            return {}
        if not self._folder.exists():
            self._replace_folder()
        if not self._folder.is_dir():  # no room, perhaps: NCCL would log to the rank's output
            return {}
        return log_env(private_path(self._folder, rank), given)

    def start(self) -> None:
        """Watch until `stop`."""
        if self._order.nccl_logs:
            self._task = asyncio.ensure_future(self._run())

    def stop(self) -> None:
        """The ranks have ended; their files stay until the next attempt."""
        if self._task is not None:
            self._task.cancel()

    def _replace_folder(self) -> None:
        """The files of the last attempt only are kept."""
        for earlier in self._node_folder.glob(private_folder(Path(), self._order.replica, "*").name):
            shutil.rmtree(earlier, ignore_errors=True)
        with contextlib.suppress(OSError):
            self._folder.mkdir(mode=0o700, parents=True)

    async def _run(self) -> None:
        said = ""
        while True:
            await asyncio.sleep(self._poll_s)
            try:
                await self._poll()
            except Exception as error:
                if said != (said := repr(error)):
                    log.error("the logs of NCCL's set-up cannot be read", exc_info=error)

    async def _poll(self) -> None:
        found = _look(self._folder)
        sizes, now = {path: min(size, MAX_FILE_BYTES) for path, size in found.items()}, time.monotonic()
        if self._trims and any(map(_is_long, found.values())):
            self._trims = await asyncio.to_thread(trim, found)
        if sizes == self._read_sizes or now < self._rest_until:
            return
        growth = self._growth
        rested = growth is not None and growth.sizes == sizes
        growth = self._growth = _Growth(sizes=sizes, since=growth.since if growth else now)
        if rested or now - growth.since >= MAX_GROWING_S:
            before, self._read_sizes, self._growth = self._read_sizes, sizes, None
            if await asyncio.to_thread(has_news, before, sizes):
                began = time.monotonic()
                seen = await asyncio.to_thread(self._read, sizes)
                self._rest_until = time.monotonic() + min((time.monotonic() - began) / MAX_LOAD, MAX_REST_S)
                self.report(seen)

    def _read(self, sizes: Mapping[Path, int]) -> list[FabricObserved]:
        base = FabricObserved(
            at=self._clock(),
            node=self._node,
            replica=self._order.replica,
            attempt=self._order.attempt,
            promised=self._order.fabric,
            communicator="",
            size=0,
            ranks=(),
            spans_nodes=False,
        )
        outputs = [Path(launch.log) for launch in self._order.ranks]
        return observe(sizes, outputs, base, self._order.env.get(INTERFACES, ""))

    def report(self, found: Iterable[FabricObserved]) -> None:
        """Send what is new; a communicator is sent again when its connections have changed."""
        for seen in found:
            sent = self._sent.setdefault((seen.communicator, seen.size, seen.ranks), [])
            if len(sent) < MAX_REPORTS - (not seen.connected) and not (sent and _is_same(sent[-1], seen)):
                sent.append(seen)
                self._send(seen)


def observe(
    files: Iterable[Path], outputs: Iterable[Path], base: FabricObserved, interfaces: str
) -> list[FabricObserved]:
    """What a node's ranks have logged so far to NCCL's files and to their output, for each communicator.

    `base` has the fields that are the same for all; `interfaces` is the run's NCCL_SOCKET_IFNAME.
    """
    from holdfast.diagnose.nccl_transport import SetupLogReader, observations  # 40 ms, which no start waits for

    limits = [*((path, MAX_FILE_BYTES) for path in files), *((path, OUTPUT_BYTES) for path in outputs)]
    with _READING:
        reader = SetupLogReader(MAX_READER_BYTES)
        for path, limit in limits:
            for chunk in _chunks(path, limit, node=f"node{base.node}", replica=base.replica):
                reader.feed(chunk)
        return [*observations(reader.result(), base, interfaces)]


def _is_same(one: FabricObserved, other: FabricObserved) -> bool:
    """Whether two reports differ in no more than the time and the number of channel ends."""

    def compared(seen: FabricObserved) -> tuple[object, ...]:
        ways = (frozenset(seen.between), frozenset(seen.within), seen.network, seen.nics)
        found = seen.devices, seen.nccl, seen.connected
        return *ways, *found, seen.differing, seen.other_interfaces, seen.findings, tuple(seen.causes)

    return compared(one) == compared(other)


def _look(folder: Path) -> dict[Path, int]:
    """The sizes of the ranks' files."""
    found: dict[Path, int] = {}
    with contextlib.suppress(OSError):
        for path in sorted(folder.iterdir())[:MAX_FILES]:
            with contextlib.suppress(OSError):
                found[path] = path.stat().st_size
    return found


def has_news(read: Mapping[Path, int], sizes: Mapping[Path, int]) -> bool:
    """Whether what was written since may change a report: other lines are not worth reading everything again."""
    for path, size in sizes.items():
        known = read.get(path, 0)
        begin = max(0, known - MAX_WORDS_BYTES) if known <= size else 0  # NCCL has opened a shorter one anew
        with contextlib.suppress(OSError), path.open("rb") as file:
            file.seek(begin)
            if _NEWS.search(file.read(size - begin)):
                return True
    return False


def _is_long(size: int) -> bool:
    return size > MAX_FILE_BYTES + KEPT_TAIL_BYTES + SLACK_BYTES


def trim(sizes: Mapping[Path, int]) -> bool:
    """Free the middle of files that are too long; NCCL keeps its own offset, so that it writes on behind the hole.

    False if the file system cannot, and keeps all.
    """
    for path in (path for path, size in sizes.items() if _is_long(size)):
        try:
            known = path.stat()
            if _is_long(known.st_blocks * 512):
                with path.open("r+b") as file:
                    middle = known.st_size - KEPT_TAIL_BYTES - MAX_FILE_BYTES
                    sparse_files.punch_hole(file.fileno(), MAX_FILE_BYTES, middle)
        except OSError as error:
            if error.errno in {errno.EOPNOTSUPP, errno.ENOSYS}:
                return False
    return True


def _chunks(path: Path, limit: int, *, node: str, replica: int) -> Iterable[LogChunk]:
    """The whole lines at the start of a file."""
    try:
        with open(path, "rb") as file:
            data = file.read(limit)
    except OSError:
        return
    if whole := data[: data.rfind(b"\n") + 1]:
        yield LogChunk(source=LogSource(name=path.name, node=node, replica=replica), first_line=1, data=whole)
