"""Owns what an envoy is told: a run's objects with the values of its secrets, which nobody else has ever seen.

Refuses to own what the objects are (render.py), how they are made (starting.py) and who follows the run from there on
(mirror.py).
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import Any

import msgspec

from holdfast.errors import ExitCode, failure
from holdfast.findings import Fault
from holdfast.folder import RunFolder
from holdfast.guard.keys import Keys
from holdfast.guard.tls import make_identity
from holdfast.host.files import read_line
from holdfast.launch.code.archive import archive_path
from holdfast.launch.kubernetes.delivery import in_secret
from holdfast.launch.kubernetes.envoy import sent
from holdfast.launch.kubernetes.errand import Errand
from holdfast.launch.kubernetes.manifest import plain
from holdfast.launch.kubernetes.names import CODE
from holdfast.launch.kubernetes.refusals import error_of, told
from holdfast.launch.kubernetes.render import render
from holdfast.launch.kubernetes.submission import Submission


def send(folder: RunFolder, asked: Submission, secrets: Mapping[str, str]) -> None:
    """Have a run's objects made by the envoy that knows where to, and the run followed from then on.

    They have the values of its job's secrets.

    Raises HoldfastError where the cluster does not take them. Then, or where this is interrupted, nothing of them is
    left.
    """
    envoy = sent()
    try:
        answer = envoy.ask(msgspec.json.encode(_errand(folder, asked, _values(folder, asked, secrets))))
        if answer is None:
            raise failure(
                "start-failed",
                f"{folder.run} could not be started: what was to make its objects ended at once",
                exit_code=ExitCode.UNAVAILABLE,
                evidence=(*envoy.recall(), *folder.last_words()),
                remedy="Mend what its last words say, and try again.",
                fault=Fault.HOLDFAST,
            )
        if answer:
            with told():
                raise error_of(answer)
        envoy.keep()
    except BaseException:
        envoy.recall()
        raise


def _errand(folder: RunFolder, asked: Submission, values: Mapping[str, Mapping[str, bytes]]) -> Errand:
    rendering = render(asked)
    return Errand(
        folder=str(folder.path),
        before=tuple(plain(each) for each in rendering.before),
        owner=plain(rendering.owner),
        owned=tuple(_filled(plain(each), values) for each in rendering.owned),
    )


def _values(folder: RunFolder, asked: Submission, secrets: Mapping[str, str]) -> Mapping[str, Mapping[str, bytes]]:
    """What each Secret holds, by its name; of the controller's own key nothing is kept here."""
    if not asked.profile.agent:
        return {asked.names.secrets: {name: value.encode() for name, value in secrets.items()}}
    token = read_line(folder.token)
    make_identity(folder.ca, folder.identity)
    ca = folder.ca.read_bytes()
    own = {"token": token.encode(), "ca.pem": ca, "identity.pem": folder.identity.read_bytes()}
    folder.identity.unlink()
    own["secrets.json"] = json.dumps({"environ": {}, "secrets": dict(secrets)}).encode()
    if (code := asked.accepted.code) is not None and in_secret(code.bytes):
        own[CODE] = archive_path(folder.code, code.digest).read_bytes()
    keys = Keys(token)
    nodes = {f"node{node}": keys.of_newcomer(node).encode() for node in range(asked.job.nodes.max)}
    return {asked.names.controller: own, asked.names.keys: {"ca.pem": ca, **nodes}}


def _filled(thing: dict[str, Any], values: Mapping[str, Mapping[str, bytes]]) -> dict[str, Any]:
    """A Secret with its values; anything else as it is."""
    if thing["kind"] != "Secret":
        return thing
    data = {name: base64.b64encode(value).decode() for name, value in values[thing["metadata"]["name"]].items()}
    return {**{key: value for key, value in thing.items() if key != "stringData"}, "data": data}
