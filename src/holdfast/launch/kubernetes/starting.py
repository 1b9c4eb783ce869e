"""Owns the making of a run's objects: whole or not at all, with secrets that nobody else has ever seen.

Refuses to own what they are (render.py) and who follows the run from here (mirror.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Coroutine, Generator, Iterable, Mapping, Sequence
from typing import Any

from holdfast.folder import RunFolder
from holdfast.guard.keys import Keys
from holdfast.guard.tls import make_identity
from holdfast.launch.kubernetes.access import judged_alone
from holdfast.launch.kubernetes.cluster import CONFLICT, Cluster
from holdfast.launch.kubernetes.delivery import controllers_pod, deliver
from holdfast.launch.kubernetes.execution import CommandFailed
from holdfast.launch.kubernetes.manifest import plain
from holdfast.launch.kubernetes.names import RUN_LABEL
from holdfast.launch.kubernetes.paths import folder_of, path_of
from holdfast.launch.kubernetes.place import Place, record
from holdfast.launch.kubernetes.refusals import ClusterError, RefusedBy, told
from holdfast.launch.kubernetes.render import render
from holdfast.launch.kubernetes.submission import Submission

AT_ONCE_S = 3.0
"""Longest that a start waits for the controller's pod: to bring it the code itself is quickest."""
LOOK_S = 0.1
SEEN_S = 10.0
"""Longest that a webhook may take to see an object that is there."""


@contextlib.contextmanager
def started(folder: RunFolder, asked: Submission, secrets: Mapping[str, str]) -> Generator[None]:
    """Make a run's objects, with the values of its job's secrets, and write down in its folder where they are.

    Raises HoldfastError where the cluster does not take them. Then, or where what is done with them fails, nothing of
    them is left.
    """
    cluster = Cluster(context=asked.profile.context, namespace=asked.profile.namespace)
    with told():
        place = asyncio.run(_begin(cluster, folder, asked, _values(folder, asked, secrets)))
    try:
        yield
    except BaseException:
        # Of another event loop than the first, hence another connection.
        cluster = Cluster(context=place.context, namespace=place.namespace)
        with contextlib.suppress(Exception):  # what went wrong first is what is told
            asyncio.run(cluster.remove(place.owner))
        raise


def _values(folder: RunFolder, asked: Submission, secrets: Mapping[str, str]) -> Mapping[str, Mapping[str, str]]:
    """What each Secret holds, by its name; of the controller's own key nothing is kept here."""
    if not asked.profile.agent:
        return {asked.names.secrets: secrets}
    token = folder.token.read_text().strip()
    make_identity(folder.ca, folder.identity)
    ca, identity = folder.ca.read_text(), folder.identity.read_text()
    folder.identity.unlink()
    own = {"token": token, "ca.pem": ca, "identity.pem": identity}
    if secrets:
        own["secrets.json"] = json.dumps(dict(secrets))
    keys = Keys(token)
    nodes = {f"node{node}": keys.of_newcomer(node) for node in range(asked.job.nodes.max)}
    return {asked.names.controller: own, asked.names.keys: {"ca.pem": ca, **nodes}}


async def _begin(
    cluster: Cluster, folder: RunFolder, asked: Submission, values: Mapping[str, Mapping[str, str]]
) -> Place:
    """Make the objects, and bring the code to the controller's pod if that comes at once; else its mirror will."""
    place = await _make(cluster, asked, values)
    try:
        record(folder, place)
        if asked.accepted.code is not None:
            with contextlib.suppress(ClusterError, CommandFailed, TimeoutError):
                async with asyncio.timeout(AT_ONCE_S):
                    await deliver(cluster, await _running_controller(cluster, folder), folder, asked.accepted.code)
    except BaseException:
        with contextlib.suppress(Exception):  # what went wrong first is what is told
            await cluster.remove(place.owner)
        raise
    return place


async def _running_controller(cluster: Cluster, folder: RunFolder) -> str:
    while (pod := await controllers_pod(cluster, folder.run)) is None:  # noqa: ASYNC110 - only asking tells
        await asyncio.sleep(LOOK_S)
    return pod


async def _make(cluster: Cluster, asked: Submission, values: Mapping[str, Mapping[str, str]]) -> Place:
    rendering = render(asked)
    before, owner = [plain(each) for each in rendering.before], plain(rendering.owner)
    owned = [_filled(plain(each), values) for each in rendering.owned]
    # Whatever would be refused is refused before anything is there.
    await _all(cluster.make(folder_of(each), each, dryRun="All") for each in owned if judged_alone(each))
    made: list[str] = []
    try:
        for each in before:
            if await _made(cluster, each):
                made.append(path_of(each))
        said = await _made_after(cluster, owner, made)
        made.append(path_of(owner))
        owners = {"ownerReferences": [_reference(said)]}
        for each in filter(_is_runs_own, before):
            await cluster.change(path_of(each), {"metadata": owners})
        for wave in (True, False):
            ready = ({**each, "metadata": each["metadata"] | owners} for each in owned if _asks_nothing(each) == wave)
            await _all(cluster.make(folder_of(each), each) for each in ready)
    except BaseException:
        for path in reversed(made):
            with contextlib.suppress(Exception):  # what went wrong first is what is told
                await cluster.remove(path)
        raise
    return Place(context=asked.profile.context, namespace=asked.profile.namespace, owner=path_of(owner))


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


def _asks_nothing(thing: Mapping[str, Any]) -> bool:
    """Whether an object can be made before the others: a binding asks for its Role, a Job's pod for all else."""
    return judged_alone(thing) and thing["kind"] != "Job"


async def _made(cluster: Cluster, thing: Mapping[str, Any]) -> bool:
    """Make what is to be there first, unless it is: a volume's claim that an earlier run has made."""
    try:
        await cluster.make(folder_of(thing), thing)
    except RefusedBy as refusal:
        if refusal.status != CONFLICT:
            raise
        return False
    return True


def _reference(owner: Mapping[str, Any]) -> Mapping[str, Any]:
    """What has an object removed with its owner, which does not take it for a part of its own."""
    meta = owner["metadata"]
    kind = {key: owner[key] for key in ("apiVersion", "kind")}
    return {**kind, "name": meta["name"], "uid": meta["uid"], "controller": False}


def _is_runs_own(thing: Mapping[str, Any]) -> bool:
    return RUN_LABEL in thing["metadata"].get("labels", {})


def _filled(thing: dict[str, Any], values: Mapping[str, Mapping[str, str]]) -> dict[str, Any]:
    """A Secret with its values; anything else as it is."""
    if thing["kind"] != "Secret":
        return thing
    return {**thing, "stringData": dict(values[thing["metadata"]["name"]])}
