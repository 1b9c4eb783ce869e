"""Loads a Job from a file, overrides or Python data, and collects every problem in one pass.

spec.py defines the fields, yaml_source.py parses YAML, validation_messages.py words the errors.
"""

from __future__ import annotations

import copy
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, TypeVar, cast

import msgspec
from msgspec import Struct
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
    "mounts": "folders given to every node",
    "recovery.quarantine": "keeping bad nodes out",
}
"""Reserved fields and what they will do; rejected, so that no job relies on them."""

NOTHING: Mapping[str, str] = {}

TEXT_PATHS: tuple[Path, ...] = (("env", "*"), ("fabric", "env", "*"), ("command", "*"))
"""Paths where `1e-4` and `1.10` are text, not numbers."""

_OVERRIDE = re.compile(r"(?P<key>[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*)=(?P<value>.*)", re.DOTALL)


class LoadedJob(Struct, frozen=True, kw_only=True):
    """A valid job, its warnings, and the source location of each field."""

    job: Job
    findings: tuple[Finding, ...]
    source: YamlSource

    def located(self, finding: Finding) -> Finding:
        """The finding, with the line of the field it is about."""
        return located_in(finding, self.source)


class ValidationResult(Struct, frozen=True, kw_only=True):
    """The result of loading: the job, or None if it has errors, and all findings."""

    job: Job | None
    findings: tuple[Finding, ...]
    source: YamlSource

    def loaded_or_raise(self) -> LoadedJob:
        """The job with its findings; raises HoldfastError with all of them if one is an error."""
        if self.job is None:
            raise HoldfastError(self.findings, ExitCode.INVALID_JOB)
        return LoadedJob(job=self.job, findings=self.findings, source=self.source)


def validate_text(
    text: str, source_name: str, overrides: Iterable[str] = (), fabrics: Collection[str] = ()
) -> ValidationResult:
    """Validate a job file's text; returns errors and warnings. `fabrics` are the catalogue's names."""
    return _validate_source(parse(text, printable(source_name), keep_as_text=TEXT_PATHS), overrides, fabrics)


def validate_data(
    data: Mapping[str, Any], overrides: Iterable[str] = (), fabrics: Collection[str] = ()
) -> ValidationResult:
    """Validate plain job data; returns errors and warnings."""
    return _validate_source(YamlSource(name="", data=copy.deepcopy(dict(data))), overrides, fabrics)


def read_text(path: str | os.PathLike[str]) -> str:
    """The text of a file of at most MAX_BYTES; raises HoldfastError."""
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
    refuse_large(len(content), name)
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        where = f"{name}:{content[: error.start].count(10) + 1}"
        what = f"byte {error.start} of {name} ({content[error.start]:#04x}) is not UTF-8 text"
        remedy = "Save the file as UTF-8."
        raise failure("not-text", what, exit_code=ExitCode.INVALID_JOB, where=where, remedy=remedy) from None


def refuse_large(size_bytes: int, name: str) -> None:
    """Raise HoldfastError if a job or target has more than MAX_BYTES."""
    if size_bytes > MAX_BYTES:
        what = f"{name} has more than {MAX_BYTES // 1024} KiB, which no job file needs"
        remedy = "Check that it is a job file; move data of the program to separate files."
        raise failure("file-too-large", what, exit_code=ExitCode.INVALID_JOB, where=name, remedy=remedy)


def validate_model(
    source: YamlSource,
    model: type[M],
    *,
    reserved: Mapping[str, str] = NOTHING,
    hints: Mapping[str, str] = NOTHING,
) -> M | None:
    """The model that the source describes; None if invalid, with the reasons added to the source's findings.

    `reserved` maps planned fields to what they will do, `hints` names that are no fields to the right field.
    """
    try:
        valid = model.model_validate({} if source.data is None else source.data)
    except ValidationError as error:
        add_validation_findings(error, model, source, reserved=reserved, hints=hints)
        return None
    return None if source.findings else valid


def _validate_source(source: YamlSource, overrides: Iterable[str], fabrics: Collection[str]) -> ValidationResult:
    for override in overrides:
        _apply_override(source, override)
    job = validate_model(source, Job, reserved=RESERVED_FIELDS)
    findings = [*source.all_findings(), *_rule_findings(source, job, fabrics)]
    if any(finding.severity is Severity.ERROR for finding in findings):
        job = None
    return ValidationResult(
        job=job and as_virtual_nodes(job), findings=tuple(sorted(findings, key=_line)), source=source
    )


def _apply_override(source: YamlSource, override: str) -> None:
    """Apply one `key=value` to the data."""
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
    """The group that holds the last key of this path; creates it if missing and expands a shorthand."""
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
    """Parse an override like a scalar in the file; text that starts with a bracket or a quote is YAML."""
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
    """The rules' findings, located at their fields; only errors if some fields are invalid."""
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
    """The finding, with the line of its field if the source contains the field."""
    path: Path = tuple(finding.where.split("."))
    path = next((known for known in source.locations if dotted_path(known) == finding.where), path)
    place = source.location(path)
    if not place.line:
        return finding  # the source does not contain that field
    return msgspec.structs.replace(finding, where=place.where, evidence=(*place.quoted(path), *finding.evidence))


def _valid_part(source: YamlSource) -> Job | None:
    """The job without its invalid fields, so that the rules can check the rest in the same pass."""
    if not isinstance(source.data, dict):
        return None
    data = copy.deepcopy(source.data)
    for path in source.invalid_paths - {()}:
        _remove(data, path)
    try:
        return Job.model_validate({"command": ["true"], **data})
    except ValidationError as error:  # a group that now lacks a required field is removed as a whole
        wrong = {str(detail["loc"][0]) for detail in error.errors() if detail["loc"]}
    try:
        return Job.model_validate({"command": ["true"], **{key: data[key] for key in data.keys() - wrong}})
    except ValidationError:
        return None


def _remove(data: dict[str, Data], path: Path) -> None:
    """Remove the value at this path; if it is inside a scalar or a list, remove that whole value."""
    first, *rest = map(str, path)
    below = data.get(first)
    if rest and isinstance(below, dict):
        _remove(below, tuple(rest))
    else:
        data.pop(first, None)


def _line(finding: Finding) -> int:
    """The line number of a finding; findings without one sort last."""
    line = finding.where.rpartition(":")[2]
    return int(line) if line.isdecimal() and len(line) < 10 else sys.maxsize
