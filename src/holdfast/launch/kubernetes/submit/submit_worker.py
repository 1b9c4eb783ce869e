"""Creates a run's objects, all or none, and becomes the run's sync process (started by submit_process.py).

python -m holdfast.launch.kubernetes.submit.submit_worker

It reads the cluster address and then the request from standard input, and writes the result to standard output: nothing
or an error. It continues after DETACH; if its parent exits before that, it rolls back. It imports little except the
client, whose import takes as long as all the parent's work before the request.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from holdfast.launch.controller_supervisor import lock_run
from holdfast.launch.kubernetes.client.api_errors import ApiError, ApiUnavailable, ClusterError, from_dict, to_dict
from holdfast.launch.kubernetes.client.api_paths import can_dry_run_alone, collection_path, object_path
from holdfast.launch.kubernetes.client.cluster import ClusterClient
from holdfast.launch.kubernetes.cluster_ref import ClusterRef, write_cluster_ref
from holdfast.launch.kubernetes.object_names import RUN_LABEL
from holdfast.launch.kubernetes.quarantine_object import MANIFEST, PATH, read_quarantine, with_machines_excluded
from holdfast.launch.kubernetes.submit.owned_objects import (
    create_if_absent,
    create_owned,
    gather_all,
    owner_metadata,
)
from holdfast.launch.kubernetes.submit.submit_process import DETACH
from holdfast.launch.kubernetes.submit.submit_request import ClusterAddress, SubmitRequest
from holdfast.run_dir import RunDir

RETRY_S = 0.1
WEBHOOK_LAG_S = 10.0
"""Longest time that a webhook's cache may lag behind a created object."""
ROLL_BACK_S = 20.0
"""Longest time to retry a rollback while the API server is unavailable."""
WORKER_TIMEOUT_S = 5.0
"""Longest time for which a worker cluster that does not answer delays a start."""
MAX_REQUEST_BYTES = 1 << 26


async def run_worker() -> None:
    """Handle the request on standard input."""
    stdin = await _open_stdin()
    line = await stdin.readline()
    if not line.endswith(b"\n"):
        return  # the parent has cancelled
    address = msgspec.json.decode(line, type=ClusterAddress)
    cluster = ClusterClient(context=address.context, namespace=address.namespace)
    connecting = asyncio.ensure_future(cluster.connect())
    line = await stdin.readline()
    if not line.endswith(b"\n"):
        connecting.cancel()
        return
    request = msgspec.json.decode(line, type=SubmitRequest)
    folder = RunDir(Path(request.run_dir))
    answer = _redirect_to_log(folder)
    if lock_run(folder) is None:
        sys.exit("the run has a sync process already")
    confirmation = asyncio.ensure_future(stdin.readline())
    making = asyncio.ensure_future(create_objects(cluster, address, request))
    await asyncio.wait((making, confirmation), return_when=asyncio.FIRST_COMPLETED)
    making.cancel()  # no effect if it is done
    try:
        cluster_ref = await making
    except asyncio.CancelledError:
        return
    except ClusterError as error:
        _answer(answer, to_dict(error))
        return
    try:
        write_cluster_ref(folder, cluster_ref)
        from holdfast.launch.kubernetes.sync.run_sync import syncing  # late: not needed before

        async with syncing(folder, cluster) as over:
            _answer(answer, {})
            os.close(answer)
            if await confirmation != DETACH:
                raise _ParentGone
            await over
    except _ParentGone:
        await _roll_back(cluster, (cluster_ref.owner,))


class _ParentGone(Exception):
    """The parent exited before it sent DETACH."""


async def _open_stdin() -> asyncio.StreamReader:
    reader = asyncio.StreamReader(limit=MAX_REQUEST_BYTES)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    return reader


def _redirect_to_log(folder: RunDir) -> int:
    """Redirect standard output and error to the run's log; returns the descriptor for the result."""
    answer = os.dup(1)
    log = os.open(folder.controller_log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    for standard in (1, 2):
        os.dup2(log, standard)
    os.close(log)
    return answer


def _answer(answer: int, words: Mapping[str, Any]) -> None:
    with contextlib.suppress(BrokenPipeError):  # standard input shows that the parent is gone
        os.write(answer, json.dumps(words).encode() + b"\n")


async def create_objects(cluster: ClusterClient, address: ClusterAddress, request: SubmitRequest) -> ClusterRef:
    """Create the objects; after a ClusterError or cancellation none of them is left."""
    owned = request.owned
    # Dry-run first, so that a rejection leaves nothing behind.
    trials = (cluster.create(collection_path(each), each, dryRun="All") for each in owned if can_dry_run_alone(each))
    there = (_quarantined_in_worker(each, address.namespace) for each in request.workers.values())
    _, here, *of_workers = await asyncio.gather(gather_all(trials), _quarantined(cluster), *there)
    machines = tuple(machine for known in (here, *of_workers) for machine in known or ())
    owner = with_machines_excluded(request.owner, machines)
    before = [
        with_machines_excluded(each, machines)
        for each in request.prerequisites
        if here is None or object_path(each) != object_path(MANIFEST)
    ]
    made: list[str] = []
    try:
        for each in before:
            is_new = await create_if_absent(cluster, each)
            if is_new and object_path(each) != object_path(MANIFEST):  # other runs may have written to it
                made.append(object_path(each))
        try:
            created = await _create_owner(cluster, owner, made)
        except (ApiUnavailable, asyncio.CancelledError):
            made.append(object_path(owner))  # it may exist although no response came
            raise
        made.append(object_path(owner))
        for each in filter(_belongs_to_run, before):
            await cluster.patch(object_path(each), {"metadata": owner_metadata(created, each)})
        ready = await create_owned(cluster, created, owned)
    except BaseException as error:
        left = await _roll_back(cluster, reversed(made))
        if left and isinstance(error, ClusterError):
            names = ", ".join("/".join(path.rsplit("/", 2)[1:]) for path in left)
            raise from_dict({**to_dict(error), "message": f"{error.message}; not removed: {names}"}) from error
        raise
    return ClusterRef(
        context=address.context,
        namespace=address.namespace,
        owner=object_path(owner),
        controller=None if request.workers else next((each for each in ready if each["kind"] == "ReplicaSet"), None),
        gateway=request.gateway,
        workers=request.workers,
    )


async def _quarantined(cluster: ClusterClient) -> tuple[str, ...] | None:
    """The machines that the run is to avoid; None if the namespace has no quarantine, or this user may not read it.

    Its controller reads it again, and reports what is wrong with it.
    """
    try:
        known = await cluster.get(PATH)
    except ApiError:
        return None
    return tuple(row.machine for row in read_quarantine(known)[0].active(time.time()))


async def _quarantined_in_worker(context: str, namespace: str) -> tuple[str, ...] | None:
    """The same of a worker cluster; None if it does not answer, because another may take the run."""
    try:
        return await _quarantined(ClusterClient(context=context, namespace=namespace, timeout_s=WORKER_TIMEOUT_S))
    except ClusterError:
        return None


async def _roll_back(cluster: ClusterClient, made: Iterable[str]) -> list[str]:
    """Delete what was created, with retries for ROLL_BACK_S; returns what could not be deleted."""
    deadline, left = time.monotonic() + ROLL_BACK_S, list[str]()
    for path in made:
        while True:
            try:
                await cluster.delete(path)
                break
            except ApiUnavailable:
                if time.monotonic() > deadline:
                    left.append(path)
                    break
                await asyncio.sleep(RETRY_S)
            except ClusterError:
                left.append(path)
                break
    return left


async def _create_owner(cluster: ClusterClient, owner: Mapping[str, Any], made: Sequence[str]) -> Mapping[str, Any]:
    """Create the owner object; retries until webhooks, which read from a cache, see its prerequisites."""
    deadline = time.monotonic() + WEBHOOK_LAG_S
    while True:
        try:
            return await cluster.create(collection_path(owner), owner)
        except ApiError as refusal:
            if not made or "not found" not in str(refusal) or time.monotonic() > deadline:
                raise
        await asyncio.sleep(RETRY_S)


def _belongs_to_run(thing: Mapping[str, Any]) -> bool:
    return RUN_LABEL in thing["metadata"].get("labels", {})


def main() -> None:
    """Run the submit worker."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    asyncio.run(run_worker())


if __name__ == "__main__":
    main()
