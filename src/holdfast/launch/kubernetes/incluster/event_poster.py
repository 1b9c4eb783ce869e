"""Posts what happens in a run as Kubernetes Events of the run's object, which `kubectl describe` shows.

It follows the run's log, so it never delays or fails the run. Without the permission to create Events it posts none.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Any

from msgspec import Struct

from holdfast.events import (
    AnyEvent,
    AttemptStarted,
    NodeEvicted,
    NodeRequested,
    Outcome,
    RecoveryDecided,
    ShutdownDecided,
    StandbyPromoted,
)
from holdfast.events.log import EventReader
from holdfast.launch.kubernetes.client.api_errors import ApiError
from holdfast.launch.kubernetes.client.cluster import ClusterClient
from holdfast.run_dir import RunDir

log = logging.getLogger("holdfast.controller")

POLL_S = 1.0
MAX_PER_MINUTE = 20
MAX_WAITING = 100
"""Most notices that wait for the API server or the rate; older ones are dropped."""
FLUSH_S = 3.0
"""Longest time that the end of a run waits for its last notices."""
MAX_NOTE_BYTES = 1000
"""The API server accepts 1,024 bytes."""
NORMAL, WARNING = "Normal", "Warning"
EVENTS_PATH = "/api/v1/namespaces/{namespace}/events"


class Notice(Struct, frozen=True, kw_only=True):
    """The content of one Kubernetes Event."""

    at: float
    reason: str
    note: str
    type: str = NORMAL


def _on_attempt(event: AttemptStarted) -> Notice:
    what = f"{event.world_size} ranks of attempt {event.attempt}, replica {event.replica} are started"
    return Notice(at=event.at, reason="RanksRestarted" if event.attempt else "RanksStarted", note=what)


def _on_recovery(event: RecoveryDecided) -> Notice:
    note = f"{event.finding.what} [{event.finding.code}]; action: {event.action}"
    return Notice(at=event.at, reason="FailureDetected", note=note, type=WARNING)


def _on_node(event: NodeRequested) -> Notice | None:
    if not event.generation:
        return None
    return Notice(at=event.at, reason="NodeReplaced", note=f"node{event.node} is replaced: {event.reason}")


def _on_standby(event: StandbyPromoted) -> Notice:
    return Notice(at=event.at, reason="StandbyPromoted", note=f"node{event.node} takes the place of a missing node")


def _on_eviction(event: NodeEvicted) -> Notice:
    return Notice(at=event.at, reason="Evicted", note=f"ranks save and stop: {event.reason}")


def _on_shutdown(event: ShutdownDecided) -> Notice:
    failed = event.outcome is Outcome.FAILED
    note = f"{event.reason} (exit code {event.exit_code})" if event.exit_code else event.reason
    return Notice(at=event.at, reason=f"Run{event.outcome.capitalize()}", note=note, type=WARNING if failed else NORMAL)


NOTICES: Mapping[type[AnyEvent], Callable[[Any], Notice | None]] = {
    AttemptStarted: _on_attempt,
    RecoveryDecided: _on_recovery,
    NodeRequested: _on_node,
    StandbyPromoted: _on_standby,
    NodeEvicted: _on_eviction,
    ShutdownDecided: _on_shutdown,
}
"""The notice of each event that has one."""


def notice_of(event: AnyEvent) -> Notice | None:
    """What the cluster's users see of an event; None for most."""
    make = NOTICES.get(type(event))
    return make(event) if make else None


class EventPoster:
    """Posts the notices of one run; `owner` is the API path of the object from which its nodes are created."""

    def __init__(self, folder: RunDir, cluster: ClusterClient, owner: str) -> None:
        self._run, self._cluster, self._owner = folder.run_id, cluster, owner
        self._reader = EventReader(folder.events)
        self._reader.skip()  # an earlier controller posted those
        self._waiting: deque[Notice] = deque(maxlen=MAX_WAITING)
        self._last: Notice | None = None
        self._posted_at: deque[float] = deque(maxlen=MAX_PER_MINUTE)
        self._reference: Mapping[str, str] | None = None
        """The run's object, once it is known."""
        self._refusal = ""
        """Why the API server accepts no Events, if so."""
        self._posting = asyncio.Lock()

    async def run(self) -> None:
        """Post notices until cancelled."""
        while True:
            await self._try_posting(limited=True)
            await asyncio.sleep(POLL_S)

    async def flush(self) -> None:
        """Post the remaining notices, for FLUSH_S at most."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FLUSH_S):
                await self._try_posting(limited=False)

    async def _try_posting(self, *, limited: bool) -> None:
        if self._refusal:
            return
        try:
            async with self._posting:
                self._read()
                while self._waiting and not (limited and self._is_at_limit()):
                    await self._post(self._waiting[0])
                    self._waiting.popleft()
        except ApiError as refused:
            self._refusal = str(refused)
            log.warning("the run's object gets no Events: %s", refused)
        except Exception as error:  # the run does not depend on its Events
            log.info("Events of the run's object wait: %s", error)

    def _read(self) -> None:
        for event in self._reader.read():
            notice = notice_of(event)
            if notice is None or (self._last and (notice.reason, notice.note) == (self._last.reason, self._last.note)):
                continue  # each node of an evicted run has the same
            self._last = notice
            self._waiting.append(notice)

    def _is_at_limit(self) -> bool:
        return len(self._posted_at) == MAX_PER_MINUTE and time.monotonic() - self._posted_at[0] < 60.0

    async def _post(self, notice: Notice) -> None:
        self._reference = self._reference or _reference(await self._cluster.get(self._owner))
        self._posted_at.append(time.monotonic())
        try:
            await self._cluster.create(EVENTS_PATH, _manifest(self._run, notice, self._reference))
        except ApiError as refused:
            if refused.status != HTTPStatus.CONFLICT:  # the server has it, and the response was lost
                raise


def _reference(one: Mapping[str, Any]) -> Mapping[str, str]:
    """A reference to the run's object: the object itself, or its owner, such as a JobSet's TrainJob."""
    meta = one["metadata"]
    own = {"apiVersion": one["apiVersion"], "kind": one["kind"], "name": meta["name"], "uid": meta["uid"]}
    owners = (each for each in meta.get("ownerReferences", ()) if each.get("controller"))
    above = next(owners, None)
    reference = {name: above[name] for name in own} if above else own
    return {**reference, "namespace": meta["namespace"]}


def _manifest(run: str, notice: Notice, reference: Mapping[str, str]) -> dict[str, Any]:
    """The Event of a notice; its name depends only on the notice, so that a retry creates no second one."""
    digest = hashlib.sha256(f"{notice.at} {notice.reason} {notice.note}".encode()).hexdigest()[:16]
    at = datetime.fromtimestamp(notice.at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": f"{run}.{digest}", "namespace": reference["namespace"]},
        "involvedObject": reference,
        "reason": notice.reason,
        "message": notice.note.encode()[:MAX_NOTE_BYTES].decode(errors="ignore"),
        "type": notice.type,
        "source": {"component": "holdfast"},
        "reportingComponent": "holdfast",
        "reportingInstance": os.environ.get("HOSTNAME", run),
        "firstTimestamp": at,
        "lastTimestamp": at,
        "count": 1,
    }
