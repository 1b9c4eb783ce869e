"""Owns turning what a person wrote, in a file, in overrides or in Python, into a Job, with every problem said at once.

Refuses to own what the fields are (spec.py), how YAML is read (source.py) and how refusals are worded (complaints.py).
"""

from __future__ import annotations

import copy
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import msgspec
from pydantic import BaseModel, ValidationError
from pydantic_core import PydanticCustomError

from holdfast.errors import ExitCode, HoldfastError, failure
from holdfast.findings import Finding, Severity
from holdfast.job import rules
from holdfast.job.spec import SHORTHANDS, Job
from holdfast.job.validation_messages import add_validation_findings, finding_at
from holdfast.job.virtual_nodes import as_virtual_nodes
from holdfast.job.yaml_source import (
    MAX_BYTES,
    Data,
    Path,
    SourceLocation,
    YamlSource,
    dotted_path,
    parse,
    printable,
    scalar,
)

M = TypeVar("M", bound=BaseModel)

RESERVED_FIELDS: Mapping[str, str] = {
    "parallel": "how tensors, pipelines and data are split over ranks",
    "placement": "which nodes may stand next to each other",
    "mounts": "folders given to every node",
    "priority": "which job goes first",
    "checks": "which checks run before the start",
    "fabric.on_fallback": "what to do when the fabric is not the one asked for",
    "recovery.quarantine": "keeping bad nodes out",
}
"""Fields that the schema has reserved, and what they will do; refused, so that no job relies on them in vain."""

TEXT_PATHS: tuple[Path, ...] = (("env", "*"), ("fabric", "env", "*"), ("command", "*"))
"""Where `1e-4` and `1.10` are words, not numbers."""

_OVERRIDE = re.compile(r"(?P<key>[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*)=(?P<value>.*)", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class LoadedJob:
    """A job that is right in itself, what is to be said of it all the same, and where its fields were written."""

    job: Job
    findings: tuple[Finding, ...]
    source: YamlSource

    def located(self, finding: Finding) -> Finding:
        """A finding about a field, with the line that the field was written on."""
        return located_in(finding, self.source)


@dataclass(frozen=True, kw_only=True)
class ValidationResult:
    """What came of reading a job: the job, unless something is wrong with it, and all there is to say."""

    job: Job | None
    findings: tuple[Finding, ...]
    source: YamlSource

    def loaded_or_raise(self) -> LoadedJob:
        """The job with all there is to say; raises HoldfastError with it when there is an error among it."""
        if self.job is None:
            raise HoldfastError(self.findings, ExitCode.INVALID_JOB)
        return LoadedJob(job=self.job, findings=self.findings, source=self.source)

    def job_or_raise(self) -> Job:
        """The job; raises HoldfastError with every finding when there is an error among them."""
        return self.loaded_or_raise().job


def read_job(path: str | os.PathLike[str], overrides: Iterable[str] = (), fabrics: Collection[str] = ()) -> Job:
    """The job that a file describes; raises HoldfastError with every problem."""
    return validate_text(read_text(path), os.fspath(path), overrides, fabrics).job_or_raise()


def parse_job(text: str, source_name: str, overrides: Iterable[str] = (), fabrics: Collection[str] = ()) -> Job:
    """The job that a text describes; raises HoldfastError with every problem."""
    return validate_text(text, source_name, overrides, fabrics).job_or_raise()


def make_job(data: Mapping[str, Any], overrides: Iterable[str] = (), fabrics: Collection[str] = ()) -> Job:
    """The job that plain data describes, as from a command line; raises HoldfastError with every problem."""
    return validate_data(data, overrides, fabrics).job_or_raise()


def validate_text(
    text: str, source_name: str, overrides: Iterable[str] = (), fabrics: Collection[str] = ()
) -> ValidationResult:
    """Read a job file's text and say everything about it, warnings too; `fabrics` are the catalogue's names."""
    return _validate_source(parse(text, printable(source_name), keep_as_text=TEXT_PATHS), overrides, fabrics)


def validate_data(
    data: Mapping[str, Any], overrides: Iterable[str] = (), fabrics: Collection[str] = ()
) -> ValidationResult:
    """Read a job from plain data and say everything about it, warnings too."""
    return _validate_source(YamlSource(name="", data=copy.deepcopy(dict(data))), overrides, fabrics)


def read_text(path: str | os.PathLike[str]) -> str:
    """The text of a file of reasonable size; raises HoldfastError."""
    name = printable(os.fspath(path))
    try:
        with open(path, "rb") as file:
            content = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        what = f"there is no file {name}"
        remedy = "Write one with `holdfast init`."
        raise failure("no-such-file", what, exit_code=ExitCode.NOT_FOUND, where=name, remedy=remedy) from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else None
        what = f"{name} cannot be read: {reason or 'it is not a path'}"
        remedy = f"Give a file that you may read: `ls -ld {name}`."
        raise failure("unreadable-file", what, exit_code=ExitCode.INVALID_JOB, where=name, remedy=remedy) from None
    if len(content) > MAX_BYTES:
        what = f"{name} has more than {MAX_BYTES // 1024} KiB, which no job file needs"
        remedy = "See whether it is one; what a program needs beside it goes into files of its own."
        raise failure("file-too-large", what, exit_code=ExitCode.INVALID_JOB, where=name, remedy=remedy)
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        where = f"{name}:{content[: error.start].count(10) + 1}"
        what = f"byte {error.start} of {name} ({content[error.start]:#04x}) is not UTF-8 text"
        remedy = "Save the file as UTF-8."
        raise failure("not-text", what, exit_code=ExitCode.INVALID_JOB, where=where, remedy=remedy) from None


def validate_model(source: YamlSource, model: type[M], reserved: Mapping[str, str]) -> M | None:
    """The model that the source describes, or None with the reasons added to the source's findings."""
    try:
        valid = model.model_validate({} if source.data is None else source.data)
    except ValidationError as error:
        add_validation_findings(error, model, source, reserved)
        return None
    return None if source.findings else valid


def _validate_source(source: YamlSource, overrides: Iterable[str], fabrics: Collection[str]) -> ValidationResult:
    for override in overrides:
        _apply_override(source, override)
    job = validate_model(source, Job, RESERVED_FIELDS)
    findings = [*source.all_findings(), *_rule_findings(source, job, fabrics)]
    if any(finding.severity is Severity.ERROR for finding in findings):
        job = None
    return ValidationResult(
        job=job and as_virtual_nodes(job), findings=tuple(sorted(findings, key=_line)), source=source
    )


def _apply_override(source: YamlSource, override: str) -> None:
    """Put one `key=value` into the data, in place of what is there."""
    match = _OVERRIDE.fullmatch(override)
    if match is None:
        what = f"`{printable(override)}` does not set a field"
        remedy = "Write it as --set recovery.max_restarts=4."
        source.add_finding((override,), lambda: Finding(code="bad-override", what=what, where="--set", remedy=remedy))
        return
    path: Path = tuple(match["key"].split("."))
    place = SourceLocation(where=f"--set {printable(match['key'])}", line=override)
    parent = _group_around(source, path)
    if parent is None:
        what, remedy = f"`{dotted_path(path[:-1])}` has no fields to set", "See the fields with `holdfast schema`."
        source.add_finding(path, lambda: finding_at(place, path, code="bad-override", what=what, remedy=remedy))
        return
    parent[str(path[-1])] = _override_value(match["value"], path, source)
    source.locations = {known: at for known, at in source.locations.items() if known[: len(path)] != path}
    for length in range(1, len(path)):
        source.locations.setdefault(path[:length], place)
    source.locations[path] = place


def _group_around(source: YamlSource, path: Path) -> dict[str, Data] | None:
    """The group that holds the last key of this path, made where it is missing; a shorthand is written out for it."""
    if source.data is None:
        source.data = {}
    here = source.data
    for depth, key in enumerate(path[:-1], 1):
        if not isinstance(here, dict):
            return None
        below = here.setdefault(str(key), {})
        if not isinstance(below, dict) and dotted_path(path[:depth]) in SHORTHANDS:
            below = _expand_shorthand(below, SHORTHANDS[dotted_path(path[:depth])])
        here[str(key)] = {} if below is None else below
        here = here[str(key)]
    return here if isinstance(here, dict) else None


def _expand_shorthand(value: Data, expand: Callable[[object], object]) -> Data:
    try:
        return cast(Data, expand(value))
    except PydanticCustomError:
        return value


def _override_value(text: str, path: Path, source: YamlSource) -> Data:
    """A scalar as it would read in the file; what starts with a bracket or a quote is YAML."""
    if text[:1] in ("[", "{", '"', "'"):
        value = parse(
            text, f"--set {dotted_path(path)}", keep_as_text=[form[1:] for form in TEXT_PATHS if form[:1] == path]
        )
        for finding in value.findings:
            source.add_finding(path, lambda finding=finding: _override_finding(finding, path, value.name))
        return value.data
    as_written = any(len(form) == len(path) and form[:-1] == path[:-1] for form in TEXT_PATHS)
    return text if as_written else scalar(text)


def _override_finding(finding: Finding, path: Path, where: str) -> Finding:
    remedy = finding.remedy or "Put the value in quotes."
    quoted = SourceLocation(where=where, line="".join(finding.evidence)).quoted(path)
    return msgspec.structs.replace(finding, code="bad-override", where=where, evidence=quoted, remedy=remedy)


def _rule_findings(source: YamlSource, job: Job | None, fabrics: Collection[str]) -> Iterator[Finding]:
    """The rules' findings with the place of the field they are about; only errors where some fields are wrong."""
    whole = job is not None
    job = job or _valid_part(source)
    if job is None:
        return
    for finding in rules.check_job(job, fabrics):
        path: Path = tuple(finding.where.split("."))
        if source.is_invalid(path) or not (whole or finding.severity is Severity.ERROR):
            continue
        yield located_in(finding, source)


def located_in(finding: Finding, source: YamlSource) -> Finding:
    """A finding about a field, with the line that it was written on, if somebody wrote it."""
    path: Path = tuple(finding.where.split("."))
    place = source.location(path)
    if not place.line:
        return finding  # nobody wrote that field
    return msgspec.structs.replace(finding, where=place.where, evidence=(*place.quoted(path), *finding.evidence))


def _valid_part(source: YamlSource) -> Job | None:
    """The job without what is wrong in it, so that the rules speak about the rest in the same go."""
    if not isinstance(source.data, dict):
        return None
    data = copy.deepcopy(source.data)
    for path in source.invalid_paths - {()}:
        _remove(data, path)
    try:
        return Job.model_validate({"command": ["true"], **data})
    except ValidationError as error:  # what is left of a group may lack a field; then the whole group goes
        wrong = {str(detail["loc"][0]) for detail in error.errors() if detail["loc"]}
    try:
        return Job.model_validate({"command": ["true"], **{key: data[key] for key in data.keys() - wrong}})
    except ValidationError:
        return None


def _remove(data: dict[str, Data], path: Path) -> None:
    """Remove what lies at this path; where it lies inside a scalar or a list, the whole of that."""
    first, *rest = map(str, path)
    below = data.get(first)
    if rest and isinstance(below, dict):
        _remove(below, tuple(rest))
    else:
        data.pop(first, None)


def _line(finding: Finding) -> int:
    """The line a finding is about; those without one come last."""
    line = finding.where.rpartition(":")[2]
    return int(line) if line.isdecimal() and len(line) < 10 else sys.maxsize
