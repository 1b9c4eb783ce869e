"""Updates the local folder of a run without agents, from what the API server shows of its object and pods.

It replaces the sync of run_sync.py, because such a run has no controller. Output of deleted pods is complete only up to
the last read.
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
from holdfast.events.log import last_event, read_events
from holdfast.events.log_writer import EventWriter
from holdfast.job.run_spec import RunSpec
from holdfast.launch.cluster_contact import ClusterContact
from holdfast.launch.kubernetes.client.api_errors import ApiError, ClusterError
from holdfast.launch.kubernetes.client.api_paths import PODS_PATH
from holdfast.launch.kubernetes.cluster_ref import ClusterRef, pods_command
from holdfast.launch.kubernetes.object_names import PART_LABEL, RUN_LABEL
from holdfast.launch.kubernetes.sync import pod_events
from holdfast.launch.kubernetes.sync.finish_run import CANCEL_REQUEST, OK_RESPONSE, finish_run
from holdfast.run_dir import RunDir

if TYPE_CHECKING:
    from holdfast.launch.kubernetes.client.cluster import ClusterClient

log = logging.getLogger("holdfast.sync")

POLL_S = 0.5
LOG_DRAIN_S = 10.0
"""Longest time to wait for the rest of the pods' output once the run is over."""


class AgentlessPoller:
    """Polls one run's objects in its cluster and updates the run's local folder."""

    def __init__(self, folder: RunDir, cluster: ClusterClient, cluster_ref: ClusterRef) -> None:
        self._folder, self._cluster, self._cluster_ref = folder, cluster, cluster_ref
        self._accepted = RunSpec.read(folder.job)
        self._contact = ClusterContact(folder, pods_command(folder, cluster_ref))
        self._log_tasks: dict[pod_events.PodCommand, asyncio.Task[bool]] = {}
        self._events = read_events(folder.events) if folder.events.exists() else []
        if not self._events:
            self._append_events(pod_events.initial_events(self._accepted, folder.run_id))

    async def run(self) -> None:
        """Poll until the run is over."""
        logged = ""
        while not isinstance(last_event(self._folder.events), RunFinished):
            try:
                await self._poll()
                self._contact.on_contact()
            except ClusterError as error:
                self._contact.on_contact_lost(str(error))
                if str(error) != logged:
                    logged = str(error)
                    log.warning("%s", logged)
            await asyncio.sleep(POLL_S)

    async def handle_client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Handle a cancel request, the only one that works without agents; close the connection for any other."""
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            if head.startswith(CANCEL_REQUEST):
                await self._cluster.delete(self._cluster_ref.owner)
                self._finish(Outcome.CANCELLED, "cancelled on request", ExitCode.CANCELLED)
                writer.write(OK_RESPONSE)
        except Exception as error:
            log.warning("a request failed: %s", error)
        finally:
            writer.close()

    async def _poll(self) -> None:
        try:
            owner = await self._cluster.get(self._cluster_ref.owner)
        except ApiError as refused:
            if refused.status != HTTPStatus.NOT_FOUND:
                raise
            self._finish(Outcome.CANCELLED, "its object was removed from the cluster", ExitCode.CANCELLED)
            return
        workload = self._accepted.workload
        selector = f"{RUN_LABEL}={self._folder.run_id},{PART_LABEL}={pod_events.command_part(workload)}"
        found = await self._cluster.get(PODS_PATH, labelSelector=selector)
        seen = tuple(pod_events.pod_commands(found["items"], workload))
        self._append_events(pod_events.new_events(seen, self._accepted, self._events, now=time.time()))
        self._follow_logs(seen)
        if ended := pod_events.run_end(owner):
            if self._log_tasks:
                await asyncio.wait(self._log_tasks.values(), timeout=LOG_DRAIN_S)
            outcome, why = ended
            code = 0 if outcome is Outcome.SUCCEEDED else pod_events.exit_code(self._events)
            self._finish(outcome, why, code)

    def _follow_logs(self, seen: Sequence[pod_events.PodCommand]) -> None:
        """Copy the output of each command; once it has ended, the rest of it."""
        hearing = {(one.pod, one.attempt) for one, task in self._log_tasks.items() if not task.done()}
        for one in seen:
            heard = one in self._log_tasks and self._log_tasks[one].done() and self._log_tasks[one].result()
            if one.started and (one.pod, one.attempt) not in hearing and not (heard and one.exit_code is not None):
                self._log_tasks[one] = asyncio.ensure_future(self._copy_log(one))

    async def _copy_log(self, one: pod_events.PodCommand) -> bool:
        """Append a command's output to its rank's file; returns whether it is complete."""
        path = self._folder.rank_log(one.attempt, pod_events.first_rank(self._accepted, one.node))
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        try:
            with path.open("ab") as file:
                known = file.tell()
                async for data in self._cluster.pod_logs(one.pod, one.container):
                    file.write(data[known:])
                    file.flush()
                    known = max(0, known - len(data))
        except ClusterError as error:
            log.warning("the log of pod %s cannot be read: %s", one.pod, error)
            return False
        return True

    def _append_events(self, events: Iterable[AnyEvent]) -> None:
        news = tuple(events)
        if news:
            writer = EventWriter(self._folder.events)
            writer.append(news, sync=True)
            writer.close()
            self._events = [*self._events, *news]

    def _finish(self, outcome: Outcome, why: str, code: int) -> None:
        finish_run(self._folder, outcome, why, code)
