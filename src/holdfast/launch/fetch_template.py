"""Fetches the published template that a target extends, and stores it next to the target's file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct

from holdfast.errors import ExitCode, HoldfastError, failure, require_extra
from holdfast.fabric.catalog import NAMES
from holdfast.findings import Severity
from holdfast.host.files import atomic_write_shared
from holdfast.job.target_files import target_file
from holdfast.job.target_templates import copy_text, stored_digest, template_digest, template_use
from holdfast.job.targets import read_target
from holdfast.launch.target import TARGET_KINDS


class FetchedTemplate(Struct, frozen=True, kw_only=True):
    """A template as `holdfast target fetch` left it."""

    source: str
    """Such as `configmap://ml-platform/gpu:3`."""
    file: Path
    """Its stored copy."""
    was_stored: bool
    """Whether the copy was there already, with the same content."""
    versions: tuple[str, ...]
    """All published versions."""


def fetch_template(name: str, *, start: Path, environ: Mapping[str, str]) -> FetchedTemplate:
    """Fetch and store the template of a target.

    Raises HoldfastError if the target extends none, if its published content is not that of the stored copy, or if the
    target is invalid with it; then nothing is stored.
    """
    path = target_file(name, start, environ)
    if path is None:
        what = f"there is no target file for `{name}`"
        remedy = "`holdfast target` lists the targets; a file `.holdfast/targets/NAME.yaml` makes one."
        raise failure("unknown-target", what, exit_code=ExitCode.NOT_FOUND, remedy=remedy)
    use = template_use(path)
    if use is None:
        what = f"target {name} extends no published template"
        remedy = "Add `extends: configmap://NAMESPACE/NAME:VERSION`; a template file needs no fetching."
        raise failure("nothing-to-fetch", what, exit_code=ExitCode.USAGE, where=str(path), remedy=remedy)
    require_extra("kubernetes", "kr8s", "fetching a template needs")
    from holdfast.launch.kubernetes.published_template import changed_finding, read_published

    published = read_published(use)
    was_stored = use.copy.exists()
    if was_stored and stored_digest(use) != template_digest(published.text):
        raise HoldfastError((changed_finding(use, Severity.ERROR),), ExitCode.INVALID_JOB)
    text = None if was_stored else published.text
    read_target(path, fabrics=NAMES, kinds=TARGET_KINDS, published=text)
    if text is not None:
        use.copy.parent.mkdir(parents=True, exist_ok=True)
        atomic_write_shared(use.copy, copy_text(use.source, text).encode())
    return FetchedTemplate(source=str(use.source), file=use.copy, was_stored=was_stored, versions=published.versions)
