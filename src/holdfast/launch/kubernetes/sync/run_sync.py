"""Syncs the local folder of a run on Kubernetes with the controller's pod, and forwards requests to the controller.

This process has the role of a local run's supervisor: it holds the folder's lock, listens at its socket, and ends with
the run. The run does not depend on it. If it was killed, or the machine was off, the next command on the run starts
another one, which resumes from the local state.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import re
import signal
import sys
import time
from collections.abc import AsyncGenerator, Awaitable
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from holdfast.errors import ExitCode
from holdfast.events import CancelRequested, Outcome, RunFinished
from holdfast.events.log import last_event
from holdfast.findings import Finding, Owner
from holdfast.host.files import read_small
from holdfast.launch.cluster_contact import ClusterContact
from holdfast.launch.controller_supervisor import listen_for_clients, lock_run, write_controller_record
from holdfast.launch.kubernetes.client.api_errors import ApiError, ApiUnavailable, ClusterError, to_holdfast_error
from holdfast.launch.kubernetes.client.api_paths import NAMESPACE_PATH, collection_path, object_path
from holdfast.launch.kubernetes.client.pod_port import PortClosed
from holdfast.launch.kubernetes.cluster_ref import ClusterRef, pods_command, read_cluster_ref
from holdfast.launch.kubernetes.incluster.sync_server import (
    COPIED,
    SYNCED,
    request_deadline,
    shift_deadline,
)
from holdfast.launch.kubernetes.sync.code_upload import (
    controller_pod,
    fits_in_secret,
    upload_code,
)
from holdfast.launch.kubernetes.sync.controller_link import ControllerLink, open_link, opening
from holdfast.launch.kubernetes.sync.file_copy import FileCopy, read_chunks
from holdfast.launch.kubernetes.sync.finish_run import CANCEL_REQUEST, OK_RESPONSE, finish_run
from holdfast.launch.kubernetes.sync.not_dispatched import NotDispatchedError
from holdfast.launch.kubernetes.sync.pod_log_reader import PodLogReader
from holdfast.run_dir import RunDir

if TYPE_CHECKING:
    from holdfast.launch.kubernetes.client.cluster import ClusterClient
    from holdfast.launch.kubernetes.sync.dispatch import Dispatch

log = logging.getLogger("holdfast.sync")

RETRY_S = 0.5
"""Seconds between polls for the controller's pod."""
START_RETRY_S = 0.1
"""The same while the pod waits for its code, or has started and does not listen yet."""
LOG_DRAIN_S = 10.0
"""Longest time to wait for the rest of the ranks' output in pod logs once the run is over."""
DELETE_RETRY_S = 60.0
"""Longest time to retry a refused deletion: an API server that has just started forbids some."""
MAX_REQUEST_BYTES = 1 << 16
LOG_ELSEWHERE = "its log is on the machine that started it"
LOG_ON_VOLUME = "its log is on the target's volume, if it has one"
_EXIT_CODE = re.compile(r"\(exit code (\d{1,3})\)$")


class UploadedCode(msgspec.Struct, frozen=True):
    """Code that must be uploaded to the controller's pod."""

    digest: str
    bytes: int


class SyncOptions(msgspec.Struct, frozen=True):
    """The part of the accepted run that the sync process needs; the job's full models import too slowly."""

    code: UploadedCode | None = None
    """None if no upload is needed."""
    agent: bool = True
    durable_controller_disk: bool = True
    from_tree: bool = False

    @classmethod
    def of(cls, folder: RunDir) -> SyncOptions:
        """Read the options from a run's folder."""
        try:
            terms = msgspec.json.decode(read_small(folder.job), type=cls)
        except (OSError, msgspec.MsgspecError) as error:
            sys.exit(f"{folder.job} is not what holdfast wrote there: {error}")
        # A machine that did not start the run has no code of it.
        brought = terms.code is None or terms.from_tree or fits_in_secret(terms.code.bytes) or not folder.code.exists()
        return msgspec.structs.replace(terms, code=None) if brought else terms


class RunDeleted(Exception):
    """The run's owner object has been deleted from the cluster."""


class ControllerLeft(Exception):
    """The run is over, and its controller has left with the log, which the machine that started the run has."""

    def __init__(self, outcome: Outcome, reason: str) -> None:
        super().__init__(reason)
        self.outcome, self.reason = outcome, reason


class RunSync:
    """Syncs one run's local folder from the controller's pod."""

    def __init__(self, folder: RunDir, cluster: ClusterClient, cluster_ref: ClusterRef) -> None:
        self._folder, self._manager = folder, cluster
        self._cluster_ref: ClusterRef = cluster_ref
        self._dispatch = _dispatch(folder, cluster, cluster_ref)
        self._cluster: ClusterClient = (self._dispatch and self._dispatch.worker()) or cluster
        """The cluster that has the run's pods; with MultiKueue it may be another than that of its object."""
        self._pod: str | None = None
        """Name of the controller's pod, if known."""
        self._connected = asyncio.Event()
        """Set while the controller's pod is connected."""
        self._options = SyncOptions.of(folder)
        self._contact = ClusterContact(folder, pods_command(folder, cluster_ref))
        self._log_reader = None if self._options.durable_controller_disk else PodLogReader(folder, self._cluster)
        self._code_sent_to: str | None = None
        """The last pod that received the run's code."""

    async def run(self) -> None:
        """Sync until the run is over, across pod restarts and lost connections."""
        hearing = asyncio.ensure_future(self._log_reader.run()) if self._log_reader else None
        try:
            await self._follow()
        finally:
            if hearing is not None:
                hearing.cancel()
        if self._log_reader is not None:
            await self._log_reader.finish(LOG_DRAIN_S)
        await self._delete_if_cancelled()

    async def _follow(self) -> None:
        logged = ""
        while not isinstance(last_event(self._folder.events), RunFinished):
            why, remedy, finding, is_starting = "its controller's pod does not run", "", None, False
            try:
                await self._sync_with_pod()
                finding = await self._namespace_terminating()
            except RunDeleted:
                self._finish("its object was removed from the cluster")
            except ControllerLeft as left:
                code = 0 if left.outcome is Outcome.SUCCEEDED else _exit_code(left.reason)
                # Kueue deletes a finished run in its worker, whether or not a machine has the log.
                only_there = self._options.from_tree or (self._dispatch and not self._cluster_ref.adopted)
                where = LOG_ON_VOLUME if only_there else LOG_ELSEWHERE
                finish_run(self._folder, left.outcome, f"{left.reason}; {where}", code)
            except NotDispatchedError as waiting:
                why, finding = str(waiting), None if self._has_not_started() else waiting.finding
            except (ClusterError, PortClosed) as error:
                why, is_starting = str(error), isinstance(error, PortClosed) and self._has_not_started()
                if isinstance(error, ClusterError):
                    (seen,) = to_holdfast_error(error).findings
                    why, remedy = seen.what, seen.remedy
                if why != logged:
                    logged = why
                    log.warning("%s", logged)
            except Exception as error:  # the run continues in the cluster, so retry after any error
                why = f"{type(error).__name__}: {error}"
                log.exception("the run could not be followed")
            finally:
                self._pod = None
                self._connected.clear()
            self._contact.on_contact_lost(why, remedy, finding=finding)
            await asyncio.sleep(START_RETRY_S if is_starting or self._waits_for_code() else RETRY_S)

    async def handle_client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward one request to the controller, as soon as there is one; close the connection if none comes."""
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            is_cancel = head.startswith(CANCEL_REQUEST)
            unborn = is_cancel and self._pod is None and last_event(self._folder.events) is None
            if not unborn:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(request_deadline(head) - time.monotonic()):
                        await self._connected.wait()
            if self._pod is not None:
                async with self._open_link(self._pod, "request") as remote:
                    await remote.send(shift_deadline(head, lambda: -time.monotonic()))
                    handing = asyncio.ensure_future(_forward_body(reader, remote))
                    async for data in remote.output():
                        writer.write(data)
                        await writer.drain()
                    handing.cancel()
            elif unborn or (is_cancel and await _is_forced(reader)):
                await self._delete()
                when = "before it had a controller" if unborn else "while its controller could not be reached"
                self._finish(f"it was cancelled {when}")
                writer.write(OK_RESPONSE)
        except Exception as error:
            log.warning("a request failed: %s", error)
        finally:
            writer.close()

    async def _sync_with_pod(self) -> None:
        """Sync from the controller's pod while it is connected."""
        pod = await self._controllers_pod()
        if pod is None:
            return
        await self._upload_code(pod)
        async with self._open_link(pod, "follow") as remote:
            copy = FileCopy(self._folder)
            await remote.send(json.dumps(copy.state()).encode() + b"\n")
            self._pod = pod
            self._connected.set()
            failing = ""
            async for piece, data in read_chunks(remote.output()):
                if not piece.bytes and not piece.failing:  # the end of a poll
                    self._contact.on_contact()
                elif not piece.bytes and piece.failing != failing:
                    self._contact.on_contact_lost(piece.failing, finding=self._controller_failing(pod, piece.failing))
                failing = failing if piece.bytes else piece.failing
                if copy.write(piece, data):
                    await remote.send(COPIED if self._cluster_ref.adopted else SYNCED)

    def _open_link(self, pod: str, command: str) -> contextlib.AbstractAsyncContextManager[ControllerLink]:
        return open_link(self._cluster, pod, self._folder, opening(self._folder, command), self._cluster_ref.gateway)

    async def _controllers_pod(self) -> str | None:
        """The running controller pod, or None; raises RunDeleted if there will be none."""
        pod = await self._known_pod()
        if pod is None:
            if not await self._manager.exists(self._cluster_ref.owner):
                raise RunDeleted
            if self._dispatch is not None:
                return await self._pod_in_worker(self._dispatch)
            await self._recreate_controller()
        return pod

    async def _known_pod(self) -> str | None:
        """The running controller pod in the known cluster; None also if the run is not there, or no longer."""
        if self._dispatch is not None and self._cluster_ref.worker is None:
            return None
        try:
            return await controller_pod(self._cluster, self._folder.run_id)
        except ClusterError:
            if self._dispatch is None:
                raise
            if await self._manager.exists(self._cluster_ref.owner):
                await self._end_without_log()
                if not await self._dispatch.has_moved():
                    raise
            return None

    async def _pod_in_worker(self, dispatch: Dispatch) -> str | None:
        """The controller pod in the worker cluster that has the run; raises ControllerLeft if it is over."""
        await self._end_without_log()
        worker = await dispatch.follow()
        if worker is None:
            return None
        if dispatch.cluster_ref != self._cluster_ref:
            self._cluster, self._cluster_ref = worker, dispatch.cluster_ref
            self._contact = ClusterContact(self._folder, pods_command(self._folder, self._cluster_ref))
            if self._log_reader:
                self._log_reader.turn_to(worker)
        return await controller_pod(worker, self._folder.run_id)

    async def _recreate_controller(self) -> None:
        """Recreate a deleted controller ReplicaSet: nothing in the cluster would."""
        lost = self._cluster_ref.controller
        if lost is None:
            return
        with contextlib.suppress(ApiError):  # it is gone; or without read permission, a new one is refused if it exists
            known = await self._cluster.get(object_path(lost))
            if known["spec"].get("replicas") == 0:
                await self._end_without_log()
            return
        if self._options.from_tree:
            return  # the tool that applied it has deleted it, or will apply it again
        if last_event(self._folder.events) is None:
            return  # before the run starts, new objects may not be visible yet
        owner = await self._cluster.get(self._cluster_ref.owner)
        if "deletionTimestamp" in owner["metadata"]:
            return
        try:
            await self._cluster.create(collection_path(lost), lost)
        except ApiError as refused:
            if refused.status != HTTPStatus.CONFLICT:
                raise
        else:
            log.warning("ReplicaSet %s was deleted during the run; it has been recreated", lost["metadata"]["name"])

    async def _end_without_log(self) -> None:
        """Raise ControllerLeft with the outcome that the run's object shows, as soon as it shows one."""
        from holdfast.launch.kubernetes.sync.pod_events import run_end  # late: its models are slow to import

        if ended := run_end(await self._manager.get(self._cluster_ref.owner)):
            raise ControllerLeft(*ended)

    async def _namespace_terminating(self) -> Finding | None:
        """The finding if the namespace of an active run is being deleted; None if it is not, or cannot be read."""
        latest = last_event(self._folder.events)
        if latest is None or isinstance(latest, RunFinished):
            return None  # before the start, `holdfast status` looks up the pending reason
        try:
            namespace = await self._cluster.get(NAMESPACE_PATH)
        except ApiError:
            return None
        if (ends := namespace["metadata"].get("deletionTimestamp")) is None:
            return None
        run = self._folder.run_id
        return Finding(
            code="namespace-terminating",
            what=f"namespace {self._cluster_ref.namespace} is being deleted, and {run} with it",
            where=run,
            evidence=(f"deletionTimestamp: {ends}",),
            remedy="Run it again in another `namespace`, or in this one once it has been deleted and created again.",
            owner=Owner.CLUSTER,
        )

    def _controller_failing(self, pod: str, last_words: str) -> Finding:
        run = self._folder.run_id
        return Finding(
            code="controller-failing",
            what=f"the controllers of {run} fail one after the other",
            where=pod,
            evidence=(last_words,),
            remedy="Ranks continue without one for `recovery.controller_grace_s`, and the next is started: fix what "
            f"their last words say, or set the image back. `holdfast cancel --force {run}` ends the run without one.",
            owner=Owner.CLUSTER,
        )

    async def _upload_code(self, pod: str) -> None:
        """Upload the run's code, unless done: once per run, or once per pod if a pod's folder is lost with it."""
        code = self._options.code
        if code and (
            self._waits_for_code() or (pod != self._code_sent_to and not self._options.durable_controller_disk)
        ):
            await upload_code(self._cluster, pod, self._folder, code.digest, self._cluster_ref.gateway)
        self._code_sent_to = pod

    def _waits_for_code(self) -> bool:
        """Whether the start of the run waits for its code."""
        return self._options.code is not None and self._has_not_started()

    def _has_not_started(self) -> bool:
        return last_event(self._folder.events) is None

    def _finish(self, why: str) -> None:
        finish_run(self._folder, Outcome.CANCELLED, why, ExitCode.CANCELLED)

    async def _delete_if_cancelled(self) -> None:
        """Delete the objects of a cancelled run; those of any other run stay for a day for inspection.

        Those of a tree are deleted by the tool that applied them.
        """
        finished = last_event(self._folder.events)
        if self._options.from_tree or not (isinstance(finished, RunFinished) and finished.outcome is Outcome.CANCELLED):
            return
        deadline = time.monotonic() + DELETE_RETRY_S
        while True:
            try:
                await self._delete()
                return
            except Exception as error:  # retry after any error: objects would be left behind
                log.warning("%s has not been deleted: %s", self._cluster_ref.owner, error)
                if time.monotonic() > deadline:
                    raise
            await asyncio.sleep(RETRY_S)

    async def _delete(self) -> None:
        while True:
            try:
                await self._manager.delete(self._cluster_ref.owner)
                return
            except ApiUnavailable as error:
                log.warning("%s cannot be deleted yet: %s", self._cluster_ref.owner, error)
                await asyncio.sleep(RETRY_S)


def _dispatch(folder: RunDir, manager: ClusterClient, cluster_ref: ClusterRef) -> Dispatch | None:
    if not cluster_ref.workers:
        return None
    from holdfast.launch.kubernetes.sync.dispatch import Dispatch  # late: few runs need it

    return Dispatch(folder, manager, cluster_ref)


def _exit_code(reason: str) -> int:
    """The exit code that the controller wrote into the condition of a failed run; 1 if there is none."""
    found = _EXIT_CODE.search(reason)
    return int(found[1]) if found else 1


async def _is_forced(reader: asyncio.StreamReader) -> bool:
    """Whether the body of a cancel request asks for a forced end."""
    return msgspec.json.decode(await reader.read(MAX_REQUEST_BYTES), type=CancelRequested).force


async def _forward_body(reader: asyncio.StreamReader, remote: ControllerLink) -> None:
    with contextlib.suppress(Exception):  # the response reports the failure
        while data := await reader.read(MAX_REQUEST_BYTES):
            await remote.send(data)


@contextlib.asynccontextmanager
async def syncing(folder: RunDir, cluster: ClusterClient) -> AsyncGenerator[Awaitable[None]]:
    """Serve requests and sync a run, with polling if it has no controller; yields an awaitable for the end."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
    if SyncOptions.of(folder).agent:
        sync = RunSync(folder, cluster, read_cluster_ref(folder))
    else:
        from holdfast.launch.kubernetes.sync.agentless_poller import AgentlessPoller

        sync = AgentlessPoller(folder, cluster, read_cluster_ref(folder))
    server = await asyncio.start_unix_server(sync.handle_client, sock=listen_for_clients(folder))
    write_controller_record(folder)
    async with server:
        running = asyncio.ensure_future(sync.run())
        try:
            yield running
        finally:
            running.cancel()
    folder.delete_secrets()
    folder.control_socket.unlink(missing_ok=True)


async def _sync_until_over(folder: RunDir) -> None:
    from holdfast.launch.kubernetes.client.cluster import ClusterClient

    place = read_cluster_ref(folder)
    async with syncing(folder, ClusterClient(context=place.context, namespace=place.namespace)) as over:
        await over


def main() -> None:
    """Sync the run whose folder is on the command line."""
    parser = argparse.ArgumentParser(prog="holdfast.launch.kubernetes.sync.run_sync")
    parser.add_argument("folder", type=Path)
    folder = RunDir(parser.parse_args().folder)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    if lock_run(folder) is None:
        sys.exit("the run has a sync process already")
    if not folder.remote.exists():
        sys.exit("the run was not started")
    asyncio.run(_sync_until_over(folder))


if __name__ == "__main__":
    main()
