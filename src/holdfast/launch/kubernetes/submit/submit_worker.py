"""An envoy (submit_process.py): makes a run's objects, whole or not at all, and becomes the run's mirror.

    python -m holdfast.launch.kubernetes.submit.submit_worker

It is told where to, by which it connects, and then which, on standard input, and says on standard output what became of
it: nothing, or an error. It goes on once it hears that it may; where whoever sent it has gone before, it undoes what it
has done. It imports little beside the client, because to load that takes as long as all that is done before it is told.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any

import msgspec

from holdfast.launch.controller_supervisor import lock_run
from holdfast.launch.kubernetes.client.api_errors import ApiError, ApiUnavailable, ClusterError, from_dict, to_dict
from holdfast.launch.kubernetes.client.api_paths import can_dry_run_alone, collection_path, object_path
from holdfast.launch.kubernetes.client.cluster import ClusterClient
from holdfast.launch.kubernetes.cluster_ref import ClusterRef, write_cluster_ref
from holdfast.launch.kubernetes.object_names import RUN_LABEL
from holdfast.launch.kubernetes.submit.submit_process import DETACH
from holdfast.launch.kubernetes.submit.submit_request import ClusterAddress, SubmitRequest
from holdfast.run_dir import RunDir

RETRY_S = 0.1
WEBHOOK_LAG_S = 10.0
"""Longest that a webhook may take to see an object that is there."""
ROLL_BACK_S = 20.0
"""How long an API server that is away is asked to undo what was done."""
CREATE_FIRST = ("Secret", "ConfigMap", "ServiceAccount", "Role")
"""What others ask for: pods for what they mount and whose they are, a binding for its Role. The rest comes after it."""
MAX_REQUEST_BYTES = 1 << 26


async def run_worker() -> None:
    """Run the errand that comes on standard input."""
    stdin = await _open_stdin()
    line = await stdin.readline()
    if not line.endswith(b"\n"):
        return  # whoever sent it has thought better of it
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
        sys.exit("the run has a mirror already")
    confirmation = asyncio.ensure_future(stdin.readline())
    making = asyncio.ensure_future(create_objects(cluster, address, request))
    await asyncio.wait((making, confirmation), return_when=asyncio.FIRST_COMPLETED)
    making.cancel()  # in vain where it is done
    try:
        cluster_ref = await making
    except asyncio.CancelledError:
        return
    except ClusterError as error:
        _answer(answer, to_dict(error))
        return
    try:
        write_cluster_ref(folder, cluster_ref)
        from holdfast.launch.kubernetes.sync.run_sync import syncing  # what it brings is not needed before

        async with syncing(folder, cluster) as over:
            _answer(answer, {})
            os.close(answer)
            if await confirmation != DETACH:
                raise _ParentGone
            await over
    except _ParentGone:
        await _roll_back(cluster, (cluster_ref.owner,))


class _ParentGone(Exception):
    """Whoever sent this has gone before it was told to go on."""


async def _open_stdin() -> asyncio.StreamReader:
    reader = asyncio.StreamReader(limit=MAX_REQUEST_BYTES)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    return reader


def _redirect_to_log(folder: RunDir) -> int:
    """Have all that is written from now on go to the run's log; where the answer goes."""
    answer = os.dup(1)
    log = os.open(folder.controller_log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    for standard in (1, 2):
        os.dup2(log, standard)
    os.close(log)
    return answer


def _answer(answer: int, words: Mapping[str, Any]) -> None:
    with contextlib.suppress(BrokenPipeError):  # that nobody hears it is seen by the other pipe
        os.write(answer, json.dumps(words).encode() + b"\n")


async def create_objects(cluster: ClusterClient, address: ClusterAddress, request: SubmitRequest) -> ClusterRef:
    """Make the objects; raises ClusterError, or is cancelled, with none of them left."""
    before, owner, owned = request.prerequisites, request.owner, request.owned
    # Whatever would be refused is refused before anything is there.
    await _gather_all(
        cluster.create(collection_path(each), each, dryRun="All") for each in owned if can_dry_run_alone(each)
    )
    made: list[str] = []
    try:
        for each in before:
            if await _create_if_absent(cluster, each):
                made.append(object_path(each))
        try:
            said = await _create_owner(cluster, owner, made)
        except (ApiUnavailable, asyncio.CancelledError):
            made.append(object_path(owner))  # it may be made though nobody says so
            raise
        made.append(object_path(owner))
        for each in filter(_belongs_to_run, before):
            await cluster.patch(object_path(each), {"metadata": _owner_metadata(said, each)})
        ready = [{**each, "metadata": each["metadata"] | _owner_metadata(said, each)} for each in owned]
        for wave in (True, False):
            await _gather_all(
                cluster.create(collection_path(each), each) for each in ready if (each["kind"] in CREATE_FIRST) == wave
            )
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
        controller=next((each for each in ready if each["kind"] == "ReplicaSet"), None),
    )


async def _roll_back(cluster: ClusterClient, made: Iterable[str]) -> list[str]:
    """Remove what was made; what could not be, though what went wrong was given a while to pass."""
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
    """Make the run's object, as soon as webhooks see what was made for it just before: they look at a copy."""
    deadline = time.monotonic() + WEBHOOK_LAG_S
    while True:
        try:
            return await cluster.create(collection_path(owner), owner)
        except ApiError as refusal:
            if not made or "not found" not in str(refusal) or time.monotonic() > deadline:
                raise
        await asyncio.sleep(RETRY_S)


async def _gather_all(asked: Iterable[Coroutine[None, None, object]]) -> None:
    """Ask for several things at once; raises the first error once all are answered."""
    for answer in await asyncio.gather(*asked, return_exceptions=True):
        if isinstance(answer, BaseException):
            raise answer


async def _create_if_absent(cluster: ClusterClient, thing: Mapping[str, Any]) -> bool:
    """Make what is to be there first, unless it is: a volume's claim that an earlier run has made."""
    try:
        await cluster.create(collection_path(thing), thing)
    except ApiError as refusal:
        if refusal.status != HTTPStatus.CONFLICT:
            raise
        return False
    return True


def _owner_metadata(owner: Mapping[str, Any], one: Mapping[str, Any]) -> Mapping[str, Any]:
    """The metadata that has an object removed with its owner.

    Kueue follows `controller: true` alone: the controller's pods then belong to the run that it has admitted, and are
    not gated as pods that are in no queue (manageJobsWithoutQueueName, or a LocalQueue named `default`).
    """
    meta = owner["metadata"]
    kind = {key: owner[key] for key in ("apiVersion", "kind")}
    reference = {**kind, "name": meta["name"], "uid": meta["uid"], "controller": one["kind"] == "ReplicaSet"}
    return {"ownerReferences": [reference]}


def _belongs_to_run(thing: Mapping[str, Any]) -> bool:
    return RUN_LABEL in thing["metadata"].get("labels", {})


def main() -> None:
    """Be an envoy."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    asyncio.run(run_worker())


if __name__ == "__main__":
    main()
