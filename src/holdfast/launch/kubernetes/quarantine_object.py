"""Stores the quarantine of a namespace in a ConfigMap that outlives runs, and keeps pods off quarantined machines."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, cast

import msgspec

from holdfast.findings import Finding, Owner, Severity
from holdfast.job.quarantine import Quarantine, decode
from holdfast.launch.kubernetes.client.api_errors import ApiError
from holdfast.launch.kubernetes.object_names import NODE, PART_LABEL

if TYPE_CHECKING:
    from holdfast.launch.kubernetes.client.cluster import ClusterClient

NAME = "holdfast-quarantine"
CONFIG_MAPS = "/api/v1/namespaces/{namespace}/configmaps"
PATH = f"{CONFIG_MAPS}/{NAME}"
KEY, DAMAGED_KEY = "quarantine.json", "damaged"
ANNOTATION = "holdfast/quarantine"
"""On a machine that a run cordoned: why, and until when later runs avoid it."""
_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
MANIFEST: Mapping[str, Any] = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": NAME}}


class QuarantineObject:
    """The ConfigMap of the client's namespace."""

    def __init__(self, cluster: ClusterClient) -> None:
        self._cluster = cluster

    async def read(self) -> tuple[Quarantine, tuple[Finding, ...]]:
        """What it holds; without one, nothing. A damaged one counts as empty, with a finding. Raises ClusterError."""
        try:
            return read_quarantine(await self._cluster.get(PATH))
        except ApiError as refused:
            if refused.status != HTTPStatus.NOT_FOUND:
                raise
            return Quarantine(), ()

    async def change(self, change: Callable[[Quarantine], Quarantine]) -> tuple[Finding, ...]:
        """Replace it with what `change` returns, again if another process was quicker; damaged content is kept.

        Raises ClusterError.
        """
        while True:
            known = await self._get_or_create()
            before, findings = read_quarantine(known)
            after = change(before)
            if after == before and not findings:
                return ()
            data = {KEY: msgspec.json.encode(after).decode()}
            if findings:
                data[f"{DAMAGED_KEY}-{int(time.time())}"] = known["data"][KEY]
            version = {"resourceVersion": known["metadata"]["resourceVersion"]}
            try:
                await self._cluster.patch(PATH, {"metadata": version, "data": data})
            except ApiError as refused:
                if refused.status != HTTPStatus.CONFLICT:
                    raise
            else:
                return findings

    async def _get_or_create(self) -> Mapping[str, Any]:
        while True:
            try:
                return await self._cluster.get(PATH)
            except ApiError as refused:
                if refused.status != HTTPStatus.NOT_FOUND:
                    raise
            try:
                return await self._cluster.create(CONFIG_MAPS, MANIFEST)
            except ApiError as refused:
                if refused.status != HTTPStatus.CONFLICT:
                    raise


def read_quarantine(config_map: Mapping[str, Any]) -> tuple[Quarantine, tuple[Finding, ...]]:
    """What the ConfigMap holds; a damaged one counts as empty, with a finding."""
    data: Mapping[str, str] = config_map.get("data") or {}
    if (text := data.get(KEY)) is None:
        return Quarantine(), ()
    try:
        return decode(text), ()
    except ValueError as error:
        damaged = Finding(
            code="quarantine-unreadable",
            severity=Severity.WARNING,
            what=f"the quarantined machines cannot be read: they count as none; a change keeps the old content as "
            f"{DAMAGED_KEY}-TIME",
            where=f"configmap/{NAME}",
            evidence=(" ".join(str(error).split())[:300],),
            remedy="Correct the old content and put it back, or let the quarantine begin anew.",
            owner=Owner.CLUSTER,
        )
        return Quarantine(), (damaged,)


def with_machines_excluded(thing: Mapping[str, Any], machines: Sequence[str]) -> dict[str, Any]:
    """An object of a run whose nodes' pods are not scheduled on these machines."""
    changed = copy.deepcopy(dict(thing))
    if machines:
        for spec in _node_pod_specs(changed):
            affinity: Mapping[str, Any] = spec.get("affinity") or {}
            spec["affinity"] = {**affinity, "nodeAffinity": _away_from(machines, affinity.get("nodeAffinity") or {})}
    return changed


def _away_from(machines: Sequence[str], wanted: Mapping[str, Any]) -> Mapping[str, Any]:
    """The node affinity that is wanted, without these machines: each of its terms suffices, so each excludes them."""
    fields = [{"key": "metadata.name", "operator": "NotIn", "values": [machine]} for machine in machines]
    terms: Sequence[Mapping[str, Any]] = wanted.get(_REQUIRED, {}).get("nodeSelectorTerms") or [{}]
    excluding = [{**term, "matchFields": [*term.get("matchFields", ()), *fields]} for term in terms]
    return {**wanted, _REQUIRED: {"nodeSelectorTerms": excluding}}


def _node_pod_specs(part: Any) -> list[dict[str, Any]]:
    """The pod templates' specs of a run's nodes, wherever the kind of object has them."""
    match part:
        case {"metadata": {"labels": {}}, "spec": {"containers": [*_]}} if (
            part["metadata"]["labels"].get(PART_LABEL) == NODE
        ):
            return [part["spec"]]
        case dict():
            return [spec for each in cast("dict[str, Any]", part).values() for spec in _node_pod_specs(each)]
        case list():
            return [spec for each in cast("list[Any]", part) for spec in _node_pod_specs(each)]
        case _:
            return []
