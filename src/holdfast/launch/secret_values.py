"""Reads the values of a job's secrets on the machine that starts the run, and reports missing ones."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from holdfast.findings import Finding
from holdfast.job.notify import Notification
from holdfast.job.spec import Job, SecretRef


def missing_secrets(
    job: Job, base: Path, environ: Mapping[str, str], notify: Sequence[Notification] = ()
) -> Iterator[Finding]:
    """A finding for every secret that cannot be read now; files are relative to `base`."""
    for name, ref in job.secrets.items():
        yield from _missing(name, ref, f"secrets.{name}", base, environ)
    for place, receiver in enumerate(notify):
        if receiver.secret is not None:
            yield from _missing("the receiver's secret", receiver.secret, f"target: notify.{place}", base, environ)


def _missing(name: str, ref: SecretRef, where: str, base: Path, environ: Mapping[str, str]) -> Iterator[Finding]:
    if ref.env is not None and ref.env not in environ:
        what = f"the variable {ref.env}, from which `{name}` comes, is not set"
        yield Finding(code="missing-secret", what=what, where=where, remedy=f"Run `export {ref.env}=...` first.")
    if ref.file is not None:
        path = ref.path(base)
        if not (path.is_file() and os.access(path, os.R_OK)):
            what = f"the file {path}, from which `{name}` comes, cannot be read"
            remedy = "Write the secret there, readable by you alone."
            yield Finding(code="missing-secret", what=what, where=where, remedy=remedy)


def read_secrets(job: Job, base: Path, environ: Mapping[str, str]) -> Mapping[str, str]:
    """The value of each secret by its name; raises KeyError or OSError for one that is missing."""
    return {name: secret.read(base, environ) for name, secret in job.secrets.items()}


def read_notify_secrets(notify: Sequence[Notification], base: Path, environ: Mapping[str, str]) -> Mapping[str, str]:
    """The secret of each receiver that has one, by its place; raises KeyError or OSError for one that is missing."""
    return {str(place): ref.read(base, environ) for place, each in enumerate(notify) if (ref := each.secret)}
