"""Submits a run: generates its keys, fills in the secret values, and has the submit worker create the objects."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import Any

import msgspec

from holdfast.errors import ExitCode, failure
from holdfast.findings import Owner
from holdfast.host.files import read_line
from holdfast.launch.code.archive import archive_path
from holdfast.launch.kubernetes.client.api_errors import as_holdfast_error, from_dict
from holdfast.launch.kubernetes.client.gateway_port import GatewayRoute
from holdfast.launch.kubernetes.manifests.render_context import RenderContext
from holdfast.launch.kubernetes.manifests.run_manifests import render
from holdfast.launch.kubernetes.manifests.yaml_writer import to_plain
from holdfast.launch.kubernetes.object_names import CODE_KEY, METRICS_TOKEN_KEY
from holdfast.launch.kubernetes.submit.submit_process import take_process
from holdfast.launch.kubernetes.submit.submit_request import SubmitRequest
from holdfast.launch.kubernetes.sync.code_upload import fits_in_secret
from holdfast.run_dir import RunDir
from holdfast.security.tls import make_identity
from holdfast.security.tokens import TokenIssuer


def submit(folder: RunDir, ctx: RenderContext, secrets: Mapping[str, str], notify: Mapping[str, str]) -> None:
    """Make the submit worker create a run's objects, with the values of its secrets, and then sync the run.

    Raises HoldfastError if the cluster rejects them. After an error or an interrupt all created objects are deleted.
    """
    process = take_process()
    try:
        answer = process.request(
            msgspec.json.encode(_submit_request(folder, ctx, _secret_values(folder, ctx, secrets, notify)))
        )
        if answer is None:
            raise failure(
                "start-failed",
                f"{folder.run_id} could not be started: the process that creates its objects exited early",
                exit_code=ExitCode.UNAVAILABLE,
                evidence=(*process.roll_back(), *folder.controller_log_tail()),
                remedy="Fix the problem that its last output shows, and try again.",
                owner=Owner.HOLDFAST,
            )
        if answer:
            with as_holdfast_error():
                raise from_dict(answer)
        process.detach()
    except BaseException:
        process.roll_back()
        raise


def _submit_request(folder: RunDir, ctx: RenderContext, values: Mapping[str, Mapping[str, bytes]]) -> SubmitRequest:
    rendering = render(ctx)
    return SubmitRequest(
        run_dir=str(folder.path),
        prerequisites=tuple(to_plain(each) for each in rendering.prerequisites),
        owner=to_plain(rendering.owner),
        owned=tuple(_fill_secret(to_plain(each), values) for each in rendering.owned),
        gateway=GatewayRoute.of(ctx.target.controller.gateway, ctx.names.name),
        workers=ctx.target.multikueue,
    )


def _secret_values(
    folder: RunDir, ctx: RenderContext, secrets: Mapping[str, str], notify: Mapping[str, str]
) -> Mapping[str, Mapping[str, bytes]]:
    """Values of each Secret by name; this machine keeps no copy of the controller's private key."""
    if not ctx.target.agent:
        return {ctx.names.secrets: {name: value.encode() for name, value in secrets.items()}}
    token = read_line(folder.token)
    make_identity(folder.ca, folder.identity)
    ca = folder.ca.read_bytes()
    own = {"token": token.encode(), "ca.pem": ca, "identity.pem": folder.identity.read_bytes()}
    folder.identity.unlink()
    own["secrets.json"] = json.dumps({"environ": {}, "secrets": dict(secrets), "notify": dict(notify)}).encode()
    if (code := ctx.accepted.code) is not None and fits_in_secret(code.bytes):
        own[CODE_KEY] = archive_path(folder.code, code.digest).read_bytes()
    keys = TokenIssuer(token)
    nodes = {f"node{node}": keys.unassigned_node_token(node).encode() for node in range(ctx.job.nodes.max)}
    monitor = {METRICS_TOKEN_KEY: keys.metrics_token().encode()}
    return {ctx.names.controller: own, ctx.names.keys: {"ca.pem": ca, **monitor, **nodes}}


def _fill_secret(thing: dict[str, Any], values: Mapping[str, Mapping[str, bytes]]) -> dict[str, Any]:
    """Fill in a Secret's values; other objects are unchanged."""
    if thing["kind"] != "Secret":
        return thing
    data = {name: base64.b64encode(value).decode() for name, value in values[thing["metadata"]["name"]].items()}
    return {**{key: value for key, value in thing.items() if key != "stringData"}, "data": data}
