"""Looks on at a run without agents: keeps its folder here by what the API server shows of its object and its pods.

It is in the mirror's place where there is no controller to ask. What pods wrote before they were removed is here as far
as it was heard.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING

from holdfast.errors import ExitCode
from holdfast.events import AnyEvent, Outcome, RunFinished
from holdfast.events.log import EventWriter, last_event, read_events
from holdfast.folder import RunFolder
from holdfast.job.accepted import Accepted
from holdfast.launch.kubernetes import sight
from holdfast.launch.kubernetes.ending import CANCEL, OBEYED, conclude
from holdfast.launch.kubernetes.hearing import Ear
from holdfast.launch.kubernetes.names import PART_LABEL, RUN_LABEL
from holdfast.launch.kubernetes.paths import PODS
from holdfast.launch.kubernetes.place import Place
from holdfast.launch.kubernetes.refusals import ClusterError, RefusedBy

if TYPE_CHECKING:
    from holdfast.launch.kubernetes.cluster import Cluster

log = logging.getLogger("holdfast.mirror")

LOOK_S = 0.5
LAST_WORDS_S = 10.0
"""Longest that the rest of what pods wrote is waited for once the run is over."""


class Onlooker:
    """One run's folder here, and what is seen of the run in its cluster."""

    def __init__(self, folder: RunFolder, cluster: Cluster, place: Place) -> None:
        self._folder, self._cluster, self._place = folder, cluster, place
        self._accepted = Accepted.read(folder.job)
        self._ear = Ear(folder)
        self._hearing: dict[sight.Command, asyncio.Task[bool]] = {}
        self._known = read_events(folder.events) if folder.events.exists() else []
        if not self._known:
            self._tell(sight.asked_for(self._accepted, folder.run))

    async def run(self) -> None:
        """Look until the run is over."""
        said = ""
        while not isinstance(last_event(self._folder.events), RunFinished):
            try:
                await self._look()
                self._ear.hears()
            except ClusterError as error:
                self._ear.hears_nothing(str(error))
                if str(error) != said:
                    said = str(error)
                    log.warning("%s", said)
            await asyncio.sleep(LOOK_S)

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Be told to end the run, which is all that can be asked where no agent hears; anything else breaks off."""
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            if head.startswith(CANCEL):
                await self._cluster.remove(self._place.owner)
                self._conclude(Outcome.CANCELLED, "cancelled on request", ExitCode.CANCELLED)
                writer.write(OBEYED)
        except Exception as error:
            log.warning("a question was not answered: %s", error)
        finally:
            writer.close()

    async def _look(self) -> None:
        try:
            owner = await self._cluster.read(self._place.owner)
        except RefusedBy as refused:
            if refused.status != HTTPStatus.NOT_FOUND:
                raise
            self._conclude(Outcome.CANCELLED, "its object was removed from the cluster", ExitCode.CANCELLED)
            return
        workload = self._accepted.workload
        selector = f"{RUN_LABEL}={self._folder.run},{PART_LABEL}={sight.part(workload)}"
        found = await self._cluster.read(PODS, labelSelector=selector)
        seen = tuple(sight.commands(found["items"], workload))
        self._tell(sight.news(seen, self._accepted, self._known, now=time.time()))
        self._hear(seen)
        if ended := sight.end(owner):
            if self._hearing:
                await asyncio.wait(self._hearing.values(), timeout=LAST_WORDS_S)
            outcome, why = ended
            code = 0 if outcome is Outcome.SUCCEEDED else sight.exit_code(self._known)
            self._conclude(outcome, why, code)

    def _hear(self, seen: Sequence[sight.Command]) -> None:
        """Take down what each command writes; once it has ended, what was not heard of it."""
        hearing = {(one.pod, one.attempt) for one, task in self._hearing.items() if not task.done()}
        for one in seen:
            heard = one in self._hearing and self._hearing[one].done() and self._hearing[one].result()
            if one.begun and (one.pod, one.attempt) not in hearing and not (heard and one.code is not None):
                self._hearing[one] = asyncio.ensure_future(self._take_down(one))

    async def _take_down(self, one: sight.Command) -> bool:
        """Write a command's output to its rank's file, from where that ends; whether all of it was heard."""
        path = self._folder.rank_log(one.attempt, sight.rank(self._accepted, one.node))
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        try:
            with path.open("ab") as file:
                known = file.tell()
                async for data in self._cluster.output(one.pod):
                    file.write(data[known:])
                    file.flush()
                    known = max(0, known - len(data))
        except ClusterError as error:
            log.warning("pod %s is not heard: %s", one.pod, error)
            return False
        return True

    def _tell(self, events: Iterable[AnyEvent]) -> None:
        news = tuple(events)
        if news:
            writer = EventWriter(self._folder.events)
            writer.append(news, sync=True)
            writer.close()
            self._known = [*self._known, *news]

    def _conclude(self, outcome: Outcome, why: str, code: int) -> None:
        conclude(self._folder, outcome, why, code)
