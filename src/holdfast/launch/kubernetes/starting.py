"""An envoy (envoy.py): makes a run's objects, whole or not at all, and becomes the run's mirror.

    python -m holdfast.launch.kubernetes.starting

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

from holdfast.folder import RunFolder
from holdfast.launch.keeping import take
from holdfast.launch.kubernetes.cluster import Cluster
from holdfast.launch.kubernetes.envoy import KEPT
from holdfast.launch.kubernetes.errand import Destination, Errand
from holdfast.launch.kubernetes.names import RUN_LABEL
from holdfast.launch.kubernetes.paths import folder_of, judged_alone, path_of
from holdfast.launch.kubernetes.place import Place, record
from holdfast.launch.kubernetes.refusals import ClusterError, RefusedBy, Unanswered, error_of, words_of

LOOK_S = 0.1
SEEN_S = 10.0
"""Longest that a webhook may take to see an object that is there."""
UNDO_S = 20.0
"""How long an API server that is away is asked to undo what was done."""
ASKED = ("Secret", "ConfigMap", "ServiceAccount", "Role")
"""What others ask for: pods for what they mount and whose they are, a binding for its Role. The rest comes after it."""
LONGEST_ERRAND_BYTES = 1 << 26


async def go() -> None:
    """Run the errand that comes on standard input."""
    orders = await _standard_input()
    line = await orders.readline()
    if not line.endswith(b"\n"):
        return  # whoever sent it has thought better of it
    destination = msgspec.json.decode(line, type=Destination)
    cluster = Cluster(context=destination.context, namespace=destination.namespace)
    connecting = asyncio.ensure_future(cluster.connect())
    line = await orders.readline()
    if not line.endswith(b"\n"):
        connecting.cancel()
        return
    errand = msgspec.json.decode(line, type=Errand)
    folder = RunFolder(Path(errand.folder))
    answer = _to_its_log(folder)
    if take(folder) is None:
        sys.exit("the run has a mirror already")
    leave = asyncio.ensure_future(orders.readline())
    making = asyncio.ensure_future(make(cluster, destination, errand))
    await asyncio.wait((making, leave), return_when=asyncio.FIRST_COMPLETED)
    making.cancel()  # in vain where it is done
    try:
        place = await making
    except asyncio.CancelledError:
        return
    except ClusterError as error:
        _say(answer, words_of(error))
        return
    try:
        record(folder, place)
        from holdfast.launch.kubernetes.mirror import mirrored  # what it brings is not needed before

        async with mirrored(folder, cluster) as over:
            _say(answer, {})
            os.close(answer)
            if await leave != KEPT:
                raise _SenderGone
            await over
    except _SenderGone:
        await _undone(cluster, (place.owner,))


class _SenderGone(Exception):
    """Whoever sent this has gone before it was told to go on."""


async def _standard_input() -> asyncio.StreamReader:
    reader = asyncio.StreamReader(limit=LONGEST_ERRAND_BYTES)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    return reader


def _to_its_log(folder: RunFolder) -> int:
    """Have all that is written from now on go to the run's log; where the answer goes."""
    answer = os.dup(1)
    log = os.open(folder.controller_log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    for standard in (1, 2):
        os.dup2(log, standard)
    os.close(log)
    return answer


def _say(answer: int, words: Mapping[str, Any]) -> None:
    with contextlib.suppress(BrokenPipeError):  # that nobody hears it is seen by the other pipe
        os.write(answer, json.dumps(words).encode() + b"\n")


async def make(cluster: Cluster, destination: Destination, errand: Errand) -> Place:
    """Make the objects; raises ClusterError, or is cancelled, with none of them left."""
    before, owner, owned = errand.before, errand.owner, errand.owned
    # Whatever would be refused is refused before anything is there.
    await _all(cluster.make(folder_of(each), each, dryRun="All") for each in owned if judged_alone(each))
    made: list[str] = []
    try:
        for each in before:
            if await _made(cluster, each):
                made.append(path_of(each))
        try:
            said = await _made_after(cluster, owner, made)
        except (Unanswered, asyncio.CancelledError):
            made.append(path_of(owner))  # it may be made though nobody says so
            raise
        made.append(path_of(owner))
        for each in filter(_is_runs_own, before):
            await cluster.change(path_of(each), {"metadata": _owned_by(said, each)})
        ready = [{**each, "metadata": each["metadata"] | _owned_by(said, each)} for each in owned]
        for wave in (True, False):
            await _all(cluster.make(folder_of(each), each) for each in ready if (each["kind"] in ASKED) == wave)
    except BaseException as error:
        left = await _undone(cluster, reversed(made))
        if left and isinstance(error, ClusterError):
            names = ", ".join("/".join(path.rsplit("/", 2)[1:]) for path in left)
            raise error_of({**words_of(error), "said": f"{error.said}; not removed: {names}"}) from error
        raise
    return Place(
        context=destination.context,
        namespace=destination.namespace,
        owner=path_of(owner),
        controller=next((each for each in ready if each["kind"] == "ReplicaSet"), None),
    )


async def _undone(cluster: Cluster, made: Iterable[str]) -> list[str]:
    """Remove what was made; what could not be, though what went wrong was given a while to pass."""
    deadline, left = time.monotonic() + UNDO_S, list[str]()
    for path in made:
        while True:
            try:
                await cluster.remove(path)
                break
            except Unanswered:
                if time.monotonic() > deadline:
                    left.append(path)
                    break
                await asyncio.sleep(LOOK_S)
            except ClusterError:
                left.append(path)
                break
    return left


async def _made_after(cluster: Cluster, owner: Mapping[str, Any], made: Sequence[str]) -> Mapping[str, Any]:
    """Make the run's object, as soon as webhooks see what was made for it just before: they look at a copy."""
    deadline = time.monotonic() + SEEN_S
    while True:
        try:
            return await cluster.make(folder_of(owner), owner)
        except RefusedBy as refusal:
            if not made or "not found" not in str(refusal) or time.monotonic() > deadline:
                raise
        await asyncio.sleep(LOOK_S)


async def _all(asked: Iterable[Coroutine[None, None, object]]) -> None:
    """Ask for several things at once; raises the first error once all are answered."""
    for answer in await asyncio.gather(*asked, return_exceptions=True):
        if isinstance(answer, BaseException):
            raise answer


async def _made(cluster: Cluster, thing: Mapping[str, Any]) -> bool:
    """Make what is to be there first, unless it is: a volume's claim that an earlier run has made."""
    try:
        await cluster.make(folder_of(thing), thing)
    except RefusedBy as refusal:
        if refusal.status != HTTPStatus.CONFLICT:
            raise
        return False
    return True


def _owned_by(owner: Mapping[str, Any], one: Mapping[str, Any]) -> Mapping[str, Any]:
    """The metadata that has an object removed with its owner.

    Kueue follows `controller: true` alone: the controller's pods then belong to the run that it has admitted, and are
    not gated as pods that are in no queue (manageJobsWithoutQueueName, or a LocalQueue named `default`).
    """
    meta = owner["metadata"]
    kind = {key: owner[key] for key in ("apiVersion", "kind")}
    reference = {**kind, "name": meta["name"], "uid": meta["uid"], "controller": one["kind"] == "ReplicaSet"}
    return {"ownerReferences": [reference]}


def _is_runs_own(thing: Mapping[str, Any]) -> bool:
    return RUN_LABEL in thing["metadata"].get("labels", {})


def main() -> None:
    """Be an envoy."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    asyncio.run(go())


if __name__ == "__main__":
    main()
