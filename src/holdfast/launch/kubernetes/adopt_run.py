"""Creates the local folder of a run that another machine started, from the run's objects.

Of a run with agents these are the ConfigMap with the job, the controller's Secret with the run's token and CA, and the
controller's ReplicaSet; without agents the job alone. The process that mirrors the run fetches the rest.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, NamedTuple

from holdfast.errors import ExitCode, HoldfastError, failure
from holdfast.host.files import atomic_write
from holdfast.job.run_spec import RunSpec
from holdfast.job.targets import TargetSpec
from holdfast.launch.cluster_contact import ClusterContact
from holdfast.launch.kubernetes.client.api_errors import ApiError, as_holdfast_error
from holdfast.launch.kubernetes.client.api_paths import NAMESPACE_PATH
from holdfast.launch.kubernetes.client.cluster import ClusterClient
from holdfast.launch.kubernetes.client.gateway_port import GatewayRoute
from holdfast.launch.kubernetes.cluster_ref import ClusterRef, pods_command, write_cluster_ref
from holdfast.launch.kubernetes.object_names import CONTROLLER, PART_LABEL, RUN_LABEL, ObjectNames
from holdfast.launch.kubernetes.tree_job import dated_job
from holdfast.launch.kubernetes.workload_catalog import CATALOG
from holdfast.launch.new_run import unwritable_folder
from holdfast.launch.target_runs import NOTHING_ARRIVED
from holdfast.run_dir import RunDir, runs_root
from holdfast.security.tokens import new_token

_KEPT_METADATA = ("name", "namespace", "labels", "ownerReferences")
"""Metadata with which a deleted ReplicaSet is created again."""


class ClientKeys(NamedTuple):
    """What a client needs to reach a run's controller."""

    token: bytes
    ca: bytes
    """The CA that signed the controller's certificate (PEM); empty for a run without agents."""


def adopt_run(spec: TargetSpec, run: str) -> RunDir:
    """Create the folder of a run on this machine; raises HoldfastError if objects are missing or may not be read."""
    cluster = ClusterClient(context=spec.context, namespace=spec.namespace)
    with as_holdfast_error():
        job, accepted, keys, controller = asyncio.run(_read_objects(cluster, run))
    where = ClusterRef(
        context=spec.context,
        namespace=spec.namespace,
        owner=f"{CATALOG[accepted.workload].path}/{run}",
        controller=None if spec.multikueue else controller,
        workers=spec.multikueue,
        adopted=True,
        gateway=GatewayRoute.of(spec.controller.gateway, run),
    )
    try:
        return _write_folder(accepted, job, where, keys, run)
    except OSError as error:
        raise unwritable_folder(error) from error


async def _read_objects(cluster: ClusterClient, run: str) -> tuple[str, RunSpec, ClientKeys, dict[str, Any] | None]:
    """The job as stored and as read, the run's keys, and the controller's ReplicaSet.

    A run without agents has neither of the last two; its commands on this machine need a token, but any will do.
    """
    names = ObjectNames(run)
    try:
        stored = await cluster.get(f"{NAMESPACE_PATH}/configmaps/{names.name}")
    except ApiError as refused:
        if refused.status != HTTPStatus.NOT_FOUND:
            raise
        raise _without_job(run, str(refused)) from refused
    job, accepted = _read_job(stored, run)
    if not accepted.agent:
        return job, accepted, ClientKeys(new_token().encode(), b""), None
    secret, controller = await asyncio.gather(
        cluster.get(f"{NAMESPACE_PATH}/secrets/{names.controller}"), _controller(cluster, names)
    )
    data: Mapping[str, str] = secret.get("data") or {}
    if "token" not in data or "ca.pem" not in data:
        raise _without_keys(run, names)
    keys = ClientKeys(*(base64.b64decode(data[name]) for name in ("token", "ca.pem")))
    return job, accepted, keys, controller


async def _controller(cluster: ClusterClient, names: ObjectNames) -> dict[str, Any] | None:
    """The manifest with which the controller's ReplicaSet can be created again; None if it may not be read."""
    try:
        known = await cluster.get(f"/apis/apps/v1/namespaces/{{namespace}}/replicasets/{names.controller}")
    except ApiError:
        return None
    metadata = {key: value for key, value in known["metadata"].items() if key in _KEPT_METADATA}
    return {
        "apiVersion": "apps/v1",
        "kind": "ReplicaSet",
        "metadata": metadata,
        "spec": {**known["spec"], "replicas": 1},
    }


def _read_job(stored: Mapping[str, Any], run: str) -> tuple[str, RunSpec]:
    try:
        text = dated_job(stored)
        return text, RunSpec.model_validate_json(text)
    except ValueError as error:
        raise _without_job(run, " ".join(str(error).split())[:500]) from error


def _without_job(run: str, evidence: str) -> HoldfastError:
    return failure(
        "run-not-adoptable",
        f"{run} is on the cluster, and its job cannot be read there by this version of holdfast",
        exit_code=ExitCode.CANNOT_RUN_HERE,
        where=f"configmap/{run}",
        evidence=(evidence,),
        remedy="Use the version of holdfast that started the run, or the machine that started it.",
    )


def _without_keys(run: str, names: ObjectNames) -> HoldfastError:
    return failure(
        "run-has-no-keys",
        f"the controller of {run} has not generated the run's keys yet, with which commands reach it",
        exit_code=ExitCode.UNAVAILABLE,
        where=f"secret/{names.controller}",
        remedy=f"Try again. `kubectl describe pods -l {RUN_LABEL}={run},{PART_LABEL}={CONTROLLER}` shows why.",
    )


def _write_folder(accepted: RunSpec, job: str, where: ClusterRef, keys: ClientKeys, run: str) -> RunDir:
    """Write the folder; two processes that do this at a time write the same."""
    folder = RunDir(runs_root() / run)
    runs_root().mkdir(parents=True, exist_ok=True, mode=0o700)
    folder.path.mkdir(exist_ok=True, mode=0o700)
    write_cluster_ref(folder, where)
    if keys.ca:
        atomic_write(folder.ca, keys.ca)
    if not folder.token.exists():
        atomic_write(folder.token, keys.token)
    atomic_write(folder.secrets, json.dumps({"environ": dict(os.environ), "secrets": {}}).encode())
    atomic_write(folder.job, job.encode())
    os.utime(folder.job, (accepted.created_at, accepted.created_at))  # runs are listed by it
    ClusterContact(folder, pods_command(folder, where)).on_contact_lost(NOTHING_ARRIVED)
    return folder
