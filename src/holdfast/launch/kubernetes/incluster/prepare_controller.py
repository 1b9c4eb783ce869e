"""Collects a controller's inputs in its pod, for a run from a tree of manifests: the tree has no key of the run in it.

The first pod generates the keys and stores them in the run's Secrets, where later pods and the nodes find them.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import gzip
import hashlib
import json
import sys
import time
from collections.abc import Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any

from holdfast.host.files import atomic_write
from holdfast.job.run_spec import RunSpec
from holdfast.launch.kubernetes.client.api_errors import ApiError, ClusterError
from holdfast.launch.kubernetes.client.api_paths import NAMESPACE_PATH
from holdfast.launch.kubernetes.client.cluster import ClusterClient
from holdfast.launch.kubernetes.object_names import CODE_KEY, JOB_KEY, METRICS_TOKEN_KEY, ObjectNames
from holdfast.launch.kubernetes.tree_job import COMPRESSED_CODE_KEY, dated_job
from holdfast.run_dir import RunDir
from holdfast.security.tls import make_identity
from holdfast.security.tokens import TokenIssuer, new_token

RETRY_S = 0.5
APPLY_S = 60.0
"""Longest time to wait for the rest of the tree, and for the API server to know the account's permissions."""
SECRETS_PATH = f"{NAMESPACE_PATH}/secrets"


async def prepare(run: str, into: Path, *, secrets: Path, code: Path) -> None:
    """Write the job, its secrets and code, and the run's keys into a folder; raises ClusterError and OSError."""
    cluster, names = ClusterClient(), ObjectNames(run)
    stored = await _get(cluster, f"{NAMESPACE_PATH}/configmaps/{names.name}")
    text = dated_job(stored)
    accepted = RunSpec.model_validate_json(text)
    folder = RunDir(into, secrets_dir=into)
    owner = await _provide_keys(cluster, names, folder)
    await _provide_tokens(cluster, names, accepted.job.nodes.max, folder, owner)
    values = {name: (secrets / name).read_text() for name in accepted.job.secrets}
    atomic_write(folder.secrets, json.dumps({"environ": {}, "secrets": values}).encode())
    if accepted.code is not None:
        archive = gzip.decompress((code / COMPRESSED_CODE_KEY).read_bytes())
        if hashlib.sha256(archive).hexdigest() != accepted.code.digest:
            sys.exit(f"configmap/{names.code} has other code than configmap/{names.name} names: render the tree again")
        atomic_write(into / CODE_KEY, archive)
    atomic_write(into / JOB_KEY, text.encode())


async def _provide_keys(cluster: ClusterClient, names: ObjectNames, folder: RunDir) -> Mapping[str, Any]:
    """Write the controller's keys, from its Secret if they are there already; returns the Secret as it was before."""
    files = {path.name: path for path in (folder.token, folder.ca, folder.identity)}
    while True:
        known = await _get(cluster, f"{SECRETS_PATH}/{names.controller}")
        data: Mapping[str, str] = known.get("data") or {}
        if files.keys() <= data.keys():
            for name, path in files.items():
                atomic_write(path, base64.b64decode(data[name]))
            return known
        atomic_write(folder.token, new_token().encode())
        make_identity(folder.ca, folder.identity)
        version = {"resourceVersion": known["metadata"]["resourceVersion"]}
        generated = {name: _encoded(path.read_bytes()) for name, path in files.items()}
        try:
            await cluster.patch(f"{SECRETS_PATH}/{names.controller}", {"metadata": version, "data": generated})
        except ApiError as refused:
            if refused.status != HTTPStatus.CONFLICT:  # a concurrent pod was first
                raise
        else:
            return known


async def _provide_tokens(
    cluster: ClusterClient, names: ObjectNames, nodes: int, folder: RunDir, owner: Mapping[str, Any]
) -> None:
    """Create the Secret of the nodes' tokens, for which their pods wait, unless an earlier pod has."""
    keys = TokenIssuer(folder.token.read_text())
    tokens = {f"node{node}": keys.unassigned_node_token(node) for node in range(nodes)}
    tokens |= {METRICS_TOKEN_KEY: keys.metrics_token()}
    reference = {"apiVersion": "v1", "kind": "Secret", "name": names.controller, "uid": owner["metadata"]["uid"]}
    secret = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": names.keys, "labels": names.labels(), "ownerReferences": [reference]},
        "type": "Opaque",
        "data": {
            "ca.pem": _encoded(folder.ca.read_bytes()),
            **{name: _encoded(token.encode()) for name, token in tokens.items()},
        },
    }
    deadline = time.monotonic() + APPLY_S
    while True:
        try:
            await cluster.create(SECRETS_PATH, secret)
            return
        except ApiError as refused:
            if refused.status != HTTPStatus.CONFLICT:
                raise
        if owner.get("data"):  # an earlier pod generated the keys, and created this Secret
            return
        if time.monotonic() > deadline:
            sys.exit(f"secret/{names.keys} is of an earlier run with this id: delete it")
        await asyncio.sleep(RETRY_S)


async def _get(cluster: ClusterClient, path: str) -> Mapping[str, Any]:
    """An object of the tree, as soon as it has been applied and may be read."""
    deadline = time.monotonic() + APPLY_S
    while True:
        try:
            return await cluster.get(path)
        except ClusterError:
            if time.monotonic() > deadline:
                raise
        await asyncio.sleep(RETRY_S)


def _encoded(content: bytes) -> str:
    return base64.b64encode(content).decode()


def main() -> None:
    """Prepare the controller of the run on the command line; the kubelet tries again after an error."""
    parser = argparse.ArgumentParser(prog="holdfast.launch.kubernetes.incluster.prepare_controller")
    parser.add_argument("run")
    parser.add_argument("into", type=Path)
    parser.add_argument("--secrets", type=Path, required=True, help="folder of the job's secrets")
    parser.add_argument("--code", type=Path, required=True, help="folder of the job's code")
    options = parser.parse_args()
    try:
        asyncio.run(prepare(options.run, options.into, secrets=options.secrets, code=options.code))
    except (ClusterError, OSError, ValueError) as error:  # ValueError: the job's ConfigMap was damaged
        sys.exit(f"the controller of {options.run} cannot start yet: {error}")


if __name__ == "__main__":
    main()
