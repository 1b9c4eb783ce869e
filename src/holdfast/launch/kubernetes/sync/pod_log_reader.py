"""Collects the output of ranks when no volume stores it, from the pods' logs, to which agents echo it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from holdfast.host.files import private_opener
from holdfast.launch.kubernetes.client.api_errors import ClusterError
from holdfast.launch.kubernetes.client.api_paths import PODS_PATH
from holdfast.launch.kubernetes.manifests.pytorchjob import CONTAINER
from holdfast.launch.kubernetes.object_names import NODE, PART_LABEL, RUN_LABEL
from holdfast.protocol.rank_output import RankOutput, parse_line
from holdfast.run_dir import RunDir

if TYPE_CHECKING:
    from holdfast.launch.kubernetes.client.cluster import ClusterClient

log = logging.getLogger("holdfast.sync")

POLL_S = 1.0
"""Seconds between polls for new pods."""
MAX_RETRY_S = 60.0
"""Longest time between two attempts to read the log of a pod. It doubles from POLL_S with each failure."""
MAX_FOLLOWED = 64
"""Most pods followed concurrently: each uses one of the client's 100 connections."""
MAX_LINE_BYTES = 1 << 16
"""Longest accepted line; agents write shorter ones."""


class PodLogReader:
    """Writes each rank's part of its pod's log to the rank's file in the local run folder."""

    def __init__(self, folder: RunDir, cluster: ClusterClient) -> None:
        self._folder, self._cluster = folder, cluster
        self._pods: dict[str, _FollowedPod] = {}
        self._slots = asyncio.Semaphore(MAX_FOLLOWED)
        self._logged: set[str] = set()
        """Warnings already logged: each is logged once."""

    async def run(self) -> None:
        """Find pods and follow their logs until cancelled."""
        while True:
            await self._try_poll()
            await asyncio.sleep(POLL_S)

    def turn_to(self, cluster: ClusterClient) -> None:
        """Read from another cluster, which has the run's pods now."""
        self._cluster = cluster

    async def finish(self, within_s: float) -> None:
        """Read the rest of the pods' logs at the end of the run."""
        for pod in self._pods.values():
            pod.retry_at = 0.0
        await self._try_poll()
        hearing = [pod.task for pod in self._pods.values() if pod.task is not None]
        if hearing:
            await asyncio.wait(hearing, timeout=within_s)
        for task in hearing:
            task.cancel()

    async def _try_poll(self) -> None:
        try:
            await self._poll()
        except Exception as error:  # the sync continues without the output of ranks
            self._warn(f"the output of ranks is not available: {_describe(error)}")

    async def _poll(self) -> None:
        selector = f"{RUN_LABEL}={self._folder.run_id},{PART_LABEL}={NODE}"
        for found in (await self._cluster.get(PODS_PATH, labelSelector=selector))["items"]:
            name, phase = found["metadata"]["name"], found["status"].get("phase")
            pod = self._pods.setdefault(name, _FollowedPod(name, _agent_container(found)))
            heard = pod.task is not None and (not pod.task.done() or (pod.task.result() and phase != "Running"))
            if not heard and phase in ("Running", "Succeeded", "Failed") and time.monotonic() >= pod.retry_at:
                pod.task = asyncio.ensure_future(self._follow_pod(pod))

    async def _follow_pod(self, pod: _FollowedPod) -> bool:
        """Copy new lines of a pod's log; returns whether its end was reached."""
        try:
            async with self._slots:
                await self._copy_lines(pod)
        except Exception as error:  # only this pod is affected
            if not isinstance(error, ClusterError):  # some lines may not have been written: start again
                pod.position, pod.files = _LogPosition(), {}
            self._warn(f"the log of pod {pod.name} cannot be read: {_describe(error)}")
            pod.retry_s = min(MAX_RETRY_S, 2 * pod.retry_s or POLL_S)
            pod.retry_at = time.monotonic() + pod.retry_s
            return False
        return True

    async def _copy_lines(self, pod: _FollowedPod) -> None:
        line, is_new = bytearray(), pod.position.new_line_filter()
        output = self._cluster.pod_logs(pod.name, pod.container, timestamps=True, since=pod.position.since)
        try:
            async for data in output:
                pod.retry_s = 0.0
                line += data
                *whole, rest = line.split(b"\n")
                line = bytearray() if len(rest) > MAX_LINE_BYTES else rest
                for each in whole:
                    at, text = _split_timestamp(bytes(each))
                    if at is not None and is_new(at) and (echoed := parse_line(text)) is not None:
                        self._file(echoed, pod.files).append(echoed.text)
                for file in pod.files.values():
                    file.flush()
        finally:
            for file in pod.files.values():
                file.close()

    def _file(self, echoed: RankOutput, files: dict[Path, _RankFile]) -> _RankFile:
        who = echoed.source
        path = self._folder.rank_log(who.attempt, who.rank, who.replica, 2 if echoed.has_replicas else 1)
        if path not in files:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            files[path] = _RankFile(path)
        return files[path]

    def _warn(self, what: str) -> None:
        if what not in self._logged:
            self._logged.add(what)
            log.warning("%s", what)


class _FollowedPod:
    """One pod, and how far its log has been read, across connections."""

    def __init__(self, name: str, container: str | None) -> None:
        self.name, self.container = name, container
        self.task: asyncio.Task[bool] | None = None
        """Returns whether its whole log has been read."""
        self.retry_s = 0.0
        self.retry_at = 0.0
        """Monotonic time of the next attempt to read its log."""
        self.position = _LogPosition()
        self.files: dict[Path, _RankFile] = {}


class _LogPosition:
    """The last line read of a log, by timestamp: after a log rotation offsets are invalid."""

    def __init__(self) -> None:
        self._at: datetime | None = None
        self._lines = 0
        """Number of lines read with exactly that timestamp."""

    @property
    def since(self) -> str | None:
        """Time from which to read the log; servers ignore fractions of a second."""
        return self._at.replace(microsecond=0).isoformat() if self._at else None

    def new_line_filter(self) -> Callable[[datetime], bool]:
        """A predicate for the lines of the next read, called with each timestamp: whether the line is new."""
        last, known = self._at, self._lines

        def is_new(at: datetime) -> bool:
            nonlocal last, known
            if last is not None and (at < last or (at == last and known)):
                known -= at == last
                return False
            last = None  # from here on all lines are new, even one overtaken by the other stream
            if self._at is None or at > self._at:
                self._at, self._lines = at, 0
            self._lines += at == self._at
            return True

        return is_new


class _RankFile:
    """A rank's file, which an earlier sync process may have filled; repeated output is not written again."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None
        """Open while its pod is followed."""
        self._matched_bytes = 0
        """Bytes of the existing content that were received again."""
        self._still_matching = True
        """Whether the received output still matches the existing content."""

    def append(self, text: bytes) -> None:
        """Append new output."""
        if self._file is None:
            self._file = open(self._path, "a+b", opener=private_opener)  # noqa: SIM115 - `close` closes it
            self._file.seek(self._matched_bytes)
        if self._still_matching:
            known = self._file.read(len(text))
            if known == text:
                self._matched_bytes += len(text)
                return
            self._still_matching = False
            if text.startswith(known):
                text = text[len(known) :]
        self._file.write(text)

    def flush(self) -> None:
        if self._file is not None:
            self._file.flush()

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()


def _split_timestamp(line: bytes) -> tuple[datetime | None, bytes]:
    """A line's time and text; None as time for a line from the server itself."""
    stamp, _, text = line.partition(b" ")
    try:
        return datetime.fromisoformat(stamp.decode()), text
    except ValueError:
        return None, line


def _describe(error: Exception) -> str:
    return str(error) if isinstance(error, ClusterError | OSError) else f"{type(error).__name__}: {error}"


def _agent_container(pod: Mapping[str, Any]) -> str | None:
    """Name of the agent's container: others may have been added to the pod."""
    names = [each["name"] for each in pod["spec"]["containers"]]
    return next((name for name in names if name in (NODE, CONTAINER)), None)
