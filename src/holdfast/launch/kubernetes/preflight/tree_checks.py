"""Checks what a tree of manifests cannot have in it, and packs the code that it has."""

from __future__ import annotations

import gzip
import re
from collections.abc import Iterator
from pathlib import Path

from holdfast.findings import Finding, Owner, Severity
from holdfast.job.run_spec import CodeArchive
from holdfast.job.spec import JOB_NAME_PATTERN
from holdfast.launch.code.archive import archive_path
from holdfast.launch.kubernetes.manifests.render_context import RenderContext
from holdfast.launch.kubernetes.preflight.pod_checks import TARGET_PREFIX
from holdfast.launch.kubernetes.tree_job import MAX_COMPRESSED_CODE_BYTES

DEFAULT_QUEUE = "default"
"""Name of the LocalQueue into which Kueue puts every pod of its namespace that has no queue."""


def compressed_code(archives: Path, code: CodeArchive | None) -> bytes:
    """The code's archive, compressed to the same bytes each time; empty without code."""
    if code is None:
        return b""
    return gzip.compress(archive_path(archives, code.digest).read_bytes(), mtime=0)


def check_tree(ctx: RenderContext, packed: bytes) -> Iterator[Finding]:
    """Errors that prevent rendering a tree, and what must be in the cluster besides it."""
    run, volume = ctx.names.name, ctx.target.volume
    if not re.fullmatch(JOB_NAME_PATTERN, run):
        yield Finding(
            code="bad-run-id",
            what=f"{run!r} cannot be a run's id, from which the names of its objects are made",
            where="--tree",
            remedy="Write lower-case letters, digits and hyphens, starting with a letter, at most 40.",
        )
    if len(packed) > MAX_COMPRESSED_CODE_BYTES:
        yield Finding(
            code="code-too-large-for-tree",
            what=f"the code has {len(packed) >> 10} KiB compressed, and a tree holds {MAX_COMPRESSED_CODE_BYTES >> 10}",
            where="code",
            remedy="Put the code into the image and name its folder there: `workdir: /app`. Or exclude files with "
            "`code.ignore`.",
        )
    if ctx.queue == DEFAULT_QUEUE and ctx.target.agent and ctx.target.controller.queue is None:
        yield Finding(
            code="controller-held-by-queue",
            severity=Severity.WARNING,
            what=f"Kueue puts the controller's pod into the queue `{DEFAULT_QUEUE}` too, where it may wait for quota "
            "that the run's own nodes hold",
            where=f"{TARGET_PREFIX}controller",
            remedy="Name a queue with room for all controllers: `controller: {queue: NAME}`.",
            owner=Owner.CLUSTER,
        )
    if ctx.job.secrets:
        yield Finding(
            code="not-in-tree",
            severity=Severity.WARNING,
            what=f"the run's pods wait for the Secret {ctx.names.secrets}, which is not in the tree",
            where="secrets",
            evidence=(f"keys: {', '.join(ctx.job.secrets)}",),
            remedy=f"Create it in the namespace {ctx.target.namespace}, for example with External Secrets.",
        )
    if volume is not None and volume.size is not None:
        yield Finding(
            code="not-in-tree",
            severity=Severity.WARNING,
            what=f"the run's pods wait for the claim {volume.claim}, which is not in the tree: it outlives the run",
            where=f"{TARGET_PREFIX}volume",
            remedy=f"Create it once in the namespace {ctx.target.namespace}, apart from the tree.",
            owner=Owner.CLUSTER,
        )
