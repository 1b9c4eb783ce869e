"""Reads target templates that a platform team published as ConfigMaps, with one key per version."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from http import HTTPStatus
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from holdfast.errors import ExitCode, HoldfastError
from holdfast.findings import Finding, Owner, Severity
from holdfast.job.target_templates import TemplateUse, stored_digest, template_digest
from holdfast.launch.kubernetes.client.api_errors import ApiError, as_holdfast_error
from holdfast.launch.kubernetes.client.cluster import ClusterClient

_SUFFIX = ".yaml"


class PublishedTemplate(Struct, frozen=True, kw_only=True):
    """A version of a template as its ConfigMap has it."""

    text: str
    versions: tuple[str, ...]
    """All versions that the ConfigMap has."""


def read_published(use: TemplateUse) -> PublishedTemplate:
    """The published template; raises HoldfastError if the cluster does not have it or does not show it."""
    source = use.source
    with as_holdfast_error():
        found = asyncio.run(_config_map(use))
    versions = tuple(sorted(key.removesuffix(_SUFFIX) for key in found or () if key.endswith(_SUFFIX)))
    if found is not None and source.key in found:
        text = found[source.key].removeprefix("\ufeff")  # a byte order mark counts only at the start of a file
        return PublishedTemplate(text=text, versions=versions)
    where = f"namespace {source.namespace}"
    what = (
        f"there is no ConfigMap {source.name} in {where}"
        if found is None
        else f"ConfigMap {source.name} in {where} has no key {source.key}"
    )
    finding = Finding(
        code="template-not-published",
        what=what,
        where=use.place.where,
        evidence=(f"versions: {', '.join(versions)}",) if versions else (),
        remedy=f"`kubectl get configmap -n {source.namespace}` lists those there are; `extends` names the version.",
        owner=Owner.USER,
    )
    raise HoldfastError((finding,), ExitCode.NOT_FOUND)


def changed_finding(use: TemplateUse, severity: Severity) -> Finding:
    """The finding for a version whose content is no longer that of the stored copy."""
    return Finding(
        code="template-changed",
        severity=severity,
        what=f"{use.source} was changed after it was fetched; runs use the stored copy",
        where=use.place.where,
        evidence=(f"stored copy: {use.copy}",),
        remedy=(
            f"Have the change published as a new version. To use it under this one, remove the stored copy and run "
            f"`holdfast target fetch {use.target.stem}`."
        ),
        owner=Owner.CLUSTER,
    )


def compare_with_published(use: TemplateUse) -> Iterator[Finding]:
    """A warning if the published template is gone or differs from the stored copy."""
    try:
        published = read_published(use)
    except HoldfastError as error:
        for finding in error.findings:
            unknown = finding.code == "not-permitted"
            yield replace(
                finding,
                code="not-checked" if unknown else finding.code,
                severity=Severity.INFO if unknown else Severity.WARNING,
                where=use.place.where,
            )
        return
    if template_digest(published.text) != stored_digest(use):
        yield changed_finding(use, Severity.WARNING)


async def _config_map(use: TemplateUse) -> Mapping[str, str] | None:
    """The ConfigMap's keys and texts; None if it does not exist."""
    cluster = ClusterClient(context=use.context, namespace=use.source.namespace)
    path = f"/api/v1/namespaces/{{namespace}}/configmaps/{use.source.name}"
    try:
        found: Mapping[str, Any] = await cluster.get(path)
    except ApiError as refused:
        if refused.status == HTTPStatus.NOT_FOUND:
            return None
        raise
    return found.get("data", {})
