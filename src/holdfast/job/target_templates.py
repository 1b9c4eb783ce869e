"""The template that a target file extends: where it comes from, its stored copy, and the merge of both.

Nothing here uses the network: launch/fetch_template.py fetches what a platform team published in a cluster.
"""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

from msgspec import Struct

from holdfast.errors import ExitCode, HoldfastError
from holdfast.job.loader import read_text, refuse_large
from holdfast.job.validation_messages import finding_at
from holdfast.job.yaml_source import Data, SourceLocation, YamlSource, parse, printable
from holdfast.job.yaml_source import Path as FieldPath

EXTENDS = "extends"
_CONTEXT = "context"
MAX_PATH = 4096
"""Characters of a path in a message: one that is cut short cannot be opened."""
COPIES = "templates"
"""Folder of stored templates, next to the target files."""

_OBJECT = r"[a-z0-9](?:[-a-z0-9.]{0,251}[a-z0-9])?"
_VERSION = r"[A-Za-z0-9][-._A-Za-z0-9]{0,62}"
_CONFIG_MAP = re.compile(rf"configmap://(?P<namespace>{_OBJECT})/(?P<name>{_OBJECT}):(?P<version>{_VERSION})")
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_HEADER = (
    "# A copy of {source}, stored by `holdfast target fetch`. Change nothing here: override fields in the target.\n"
    "# sha256:{digest}\n"
)
_HEADER_LINES = re.compile(r"# A copy of (?P<source>\S+), [^\n]*\n# sha256:(?P<digest>[0-9a-f]{64})\r?\n")


class TemplateSource(Struct, frozen=True, kw_only=True):
    """A version of a template that a ConfigMap of the cluster holds, under the key `VERSION.yaml`."""

    namespace: str
    name: str
    version: str

    def __str__(self) -> str:
        return f"configmap://{self.namespace}/{self.name}:{self.version}"

    @property
    def key(self) -> str:
        return f"{self.version}.yaml"

    def copy_of(self, target: Path) -> Path:
        """The file that stores it for a target file."""
        return target.parent / COPIES / self.namespace / self.name / self.key


class TemplateUse(Struct, frozen=True, kw_only=True):
    """A target file that extends a published template."""

    target: Path
    source: TemplateSource
    place: SourceLocation
    """The line with `extends`."""
    context: str | None
    """The target's kubeconfig context, if its file names one; a published template cannot."""

    @property
    def copy(self) -> Path:
        return self.source.copy_of(self.target)


def read_target_source(path: Path, *, published: str | None = None) -> YamlSource:
    """The data of a target file, merged over the template that it extends; each value keeps the line where it stands.

    `published` is the text of a published template that is not stored yet. Raises HoldfastError if there is no such
    template, or its stored copy was edited.
    """
    target = _parse_file(path)
    extended = _extended(target)
    if extended is None:
        return target
    use = _use_of(path, target)
    template = _parse_file(_file_template(path, extended, target)) if use is None else _published(use, published)
    if isinstance(template.data, dict) and EXTENDS in template.data:
        remedy = "Write the fields of both templates in one."
        raise _refused(template.location((EXTENDS,)), "template-nested", "a template cannot extend another", remedy)
    if not isinstance(template.data, dict | None):
        what = "the template must be a group of `name: value` lines"
        raise _refused(SourceLocation(where=template.name), "wrong-type", what, "Write the fields of a target.")
    return _merged(template, target)


def template_use(path: Path) -> TemplateUse | None:
    """The published template that a target file extends; None if it extends a file or nothing."""
    return _use_of(path, _parse_file(path))


def copy_text(source: TemplateSource, published: str) -> str:
    """The content of a stored copy: two lines with source and digest, and the template as it was published."""
    return _HEADER.format(source=source, digest=template_digest(published)) + published


def template_digest(published: str) -> str:
    """SHA-256 of a template, whatever its line ends."""
    return hashlib.sha256(published.replace("\r\n", "\n").encode()).hexdigest()


def stored_digest(use: TemplateUse) -> str:
    """The digest of the template as it was fetched; raises HoldfastError if it was not, or its copy was edited."""
    if not use.copy.is_file():
        what = f"the template {use.source} has not been fetched"
        remedy = f"Fetch it with `holdfast target fetch {use.target.stem}`, and commit {use.copy}."
        raise _refused(use.place, "template-not-fetched", what, remedy, ExitCode.NOT_FOUND)
    text = read_text(use.copy)
    header = _HEADER_LINES.match(text)
    digest = header["digest"] if header else ""
    if header is None or header["source"] != str(use.source) or template_digest(text[header.end() :]) != digest:
        what = f"the stored copy of {use.source} was edited"
        remedy = (
            f"Write the change in the target, which overrides the template; then remove {use.copy} and fetch it with "
            f"`holdfast target fetch {use.target.stem}`."
        )
        raise _refused(SourceLocation(where=printable(str(use.copy), MAX_PATH)), "template-edited", what, remedy)
    return digest


def _use_of(path: Path, source: YamlSource) -> TemplateUse | None:
    extended = _extended(source)
    if extended is None or not _URL.match(extended):
        return None
    match = _CONFIG_MAP.fullmatch(extended)
    if match is None:
        what = f"`{printable(extended)}` is no template that holdfast can fetch"
        remedy = (
            "Write `configmap://NAMESPACE/NAME:VERSION`, or the path of a file. A template from elsewhere, such as an "
            "OCI registry, becomes a file with its own client."
        )
        raise _refused(source.location((EXTENDS,)), "unknown-template-source", what, remedy)
    context = source.data.get(_CONTEXT) if isinstance(source.data, dict) else None
    return TemplateUse(
        target=path,
        source=TemplateSource(**match.groupdict()),
        place=source.location((EXTENDS,)),
        context=context if isinstance(context, str) else None,
    )


def _published(use: TemplateUse, text: str | None) -> YamlSource:
    """A published template, from its text or its stored copy."""
    if text is None:
        stored_digest(use)
        template = _parse_file(use.copy)
    else:
        name = printable(str(use.source))
        refuse_large(len(copy_text(use.source, text).encode()), name)
        template = parse(text, name)
    if isinstance(template.data, dict) and _CONTEXT in template.data:
        what = "a published template cannot name a context, which is a name in the kubeconfig of one user"
        raise _refused(template.location((_CONTEXT,)), "template-names-context", what, "Write `context` in the target.")
    return template


def _file_template(path: Path, extended: str, target: YamlSource) -> Path:
    """The template file at a path relative to the target file."""
    file = path.parent / extended
    if not os.path.isfile(file):  # unlike Path.is_file, without an error for a name that is too long
        what = f"there is no template {printable(extended)}"
        remedy = f"The path is relative to the folder of the target file: `ls {printable(str(file), MAX_PATH)}`."
        raise _refused(target.location((EXTENDS,)), "template-missing", what, remedy, ExitCode.NOT_FOUND)
    return file


def _parse_file(path: Path) -> YamlSource:
    return parse(read_text(path), printable(str(path), MAX_PATH))


def _extended(target: YamlSource) -> str | None:
    """The value of `extends`; anything but text is refused with the other fields."""
    value = target.data.get(EXTENDS) if isinstance(target.data, dict) else None
    return value if isinstance(value, str) and value else None


def _merged(template: YamlSource, target: YamlSource) -> YamlSource:
    locations = dict(template.locations)
    data = _merge(template.data, target.data, (), locations)
    return YamlSource(
        name=target.name,
        data=data,
        locations=locations | target.locations,
        findings=[*template.findings, *target.findings],
        invalid_paths=template.invalid_paths | target.invalid_paths,
        omitted=template.omitted + target.omitted,
    )


def _merge(below: Data, above: Data, path: FieldPath, locations: dict[FieldPath, SourceLocation]) -> Data:
    """`above` over `below`: mappings are merged, lists and scalars replaced; `locations` loses what is replaced."""
    if isinstance(below, dict) and isinstance(above, dict):
        merged = dict(below)
        for key, value in above.items():
            merged[key] = _merge(below[key], value, (*path, key), locations) if key in below else value
        return merged
    for known in [known for known in locations if known[: len(path)] == path]:
        del locations[known]
    return above


def _refused(
    place: SourceLocation, code: str, what: str, remedy: str, exit_code: ExitCode = ExitCode.INVALID_JOB
) -> HoldfastError:
    return HoldfastError((finding_at(place, (EXTENDS,), code=code, what=what, remedy=remedy),), exit_code)
