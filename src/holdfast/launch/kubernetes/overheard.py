"""Keeps what ranks write where no volume holds it: as agents copy it to the standard output of their pods."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from holdfast.events.echoed import Echoed, parsed
from holdfast.folder import RunFolder
from holdfast.host.files import private
from holdfast.launch.kubernetes.names import NODE, PART_LABEL, RUN_LABEL
from holdfast.launch.kubernetes.paths import PODS
from holdfast.launch.kubernetes.pytorchjob import CONTAINER
from holdfast.launch.kubernetes.refusals import ClusterError

if TYPE_CHECKING:
    from holdfast.launch.kubernetes.cluster import Cluster

log = logging.getLogger("holdfast.mirror")

LOOK_S = 1.0
"""Seconds between looks for new pods."""
LINE_BYTES = 1 << 16
"""Longest line that is taken; agents write shorter ones."""


class Overheard:
    """Writes each rank's part of its pod's log to the rank's file in the run's folder here."""

    def __init__(self, folder: RunFolder, cluster: Cluster) -> None:
        self._folder, self._cluster = folder, cluster
        self._hearing: dict[str, asyncio.Task[bool]] = {}
        """By pod: whether all of its log was heard."""

    async def run(self) -> None:
        """Look for pods and hear them, for ever."""
        said = ""
        while True:
            try:
                await self._look()
            except ClusterError as error:
                if str(error) != said:
                    said = str(error)
                    log.warning("the output of ranks cannot be had: %s", said)
            await asyncio.sleep(LOOK_S)

    async def finish(self, within_s: float) -> None:
        """Hear what pods have written by the end of the run."""
        with contextlib.suppress(ClusterError):
            await self._look()
        if self._hearing:
            await asyncio.wait(self._hearing.values(), timeout=within_s)
        for task in self._hearing.values():
            task.cancel()

    async def _look(self) -> None:
        selector = f"{RUN_LABEL}={self._folder.run},{PART_LABEL}={NODE}"
        for pod in (await self._cluster.read(PODS, labelSelector=selector))["items"]:
            name, phase = pod["metadata"]["name"], pod["status"].get("phase")
            task = self._hearing.get(name)
            heard = task is not None and (not task.done() or (task.result() and phase != "Running"))
            if not heard and phase in ("Running", "Succeeded", "Failed"):
                self._hearing[name] = asyncio.ensure_future(self._hear(name, _container(pod)))

    async def _hear(self, pod: str, container: str | None) -> bool:
        """Take down a pod's log from its beginning; whether its end was heard."""
        line, files = bytearray(), dict[Path, _RankFile]()
        try:
            async for data in self._cluster.output(pod, container):
                line += data
                *whole, rest = line.split(b"\n")
                line = bytearray() if len(rest) > LINE_BYTES else rest
                for each in whole:
                    if (echoed := parsed(bytes(each))) is not None:
                        self._file(echoed, files).take(echoed.text)
                for file in files.values():
                    file.flush()
        except (ClusterError, OSError) as error:
            log.warning("pod %s is not heard: %s", pod, error)
            return False
        finally:
            for file in files.values():
                file.close()
        return True

    def _file(self, echoed: Echoed, files: dict[Path, _RankFile]) -> _RankFile:
        who = echoed.speaker
        path = self._folder.rank_log(who.attempt, who.rank, who.replica, 2 if echoed.several else 1)
        if path not in files:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            files[path] = _RankFile(path)
        return files[path]


class _RankFile:
    """A rank's file, which an earlier hearing may have filled: what is said again is not written again."""

    def __init__(self, path: Path) -> None:
        self._file: BinaryIO = open(path, "a+b", opener=private)  # noqa: SIM115 - open as long as its pod is heard
        self._file.seek(0)
        self._repeats = True
        """Whether what comes is still what stands there."""

    def take(self, text: bytes) -> None:
        """Append what is new."""
        if self._repeats:
            known = self._file.read(len(text))
            if known == text:
                return
            self._repeats = False
            if text.startswith(known):
                text = text[len(known) :]
        self._file.write(text)

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _container(pod: Mapping[str, Any]) -> str | None:
    """The agent's: others may have been added to the pod."""
    names = [each["name"] for each in pod["spec"]["containers"]]
    return next((name for name in names if name in (NODE, CONTAINER)), None)
