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
from holdfast.job.complaints import complain, finding_at
from holdfast.job.replicas import divided
from holdfast.job.source import MAX_BYTES, Data, Path, Place, Source, dotted, parse, scalar, shown
from holdfast.job.spec import SHORTHANDS, Job

M = TypeVar("M", bound=BaseModel)

NOT_YET: Mapping[str, str] = {
    "parallel": "how tensors, pipelines and data are split over ranks",
    "placement": "which nodes may stand next to each other",
    "mounts": "folders given to every node",
    "priority": "which job goes first",
    "checks": "which checks run before the start",
    "fabric.on_fallback": "what to do when the fabric is not the one asked for",
    "recovery.quarantine": "keeping bad nodes out",
}
"""Fields that the schema has reserved, and what they will do; refused, so that no job relies on them in vain."""

AS_WRITTEN: tuple[Path, ...] = (("env", "*"), ("fabric", "env", "*"), ("command", "*"))
"""Where `1e-4` and `1.10` are words, not numbers."""

_OVERRIDE = re.compile(r"(?P<key>[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*)=(?P<value>.*)", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A job that is right in itself, what is to be said of it all the same, and where its fields were written."""

    job: Job
    findings: tuple[Finding, ...]
    source: Source

    def placed(self, finding: Finding) -> Finding:
        """A finding about a field, with the line that the field was written on."""
        return placed_in(finding, self.source)


@dataclass(frozen=True, kw_only=True)
class Examined:
    """What came of reading a job: the job, unless something is wrong with it, and all there is to say."""

    job: Job | None
    findings: tuple[Finding, ...]
    source: Source

    def loaded(self) -> Loaded:
        """The job with all there is to say; raises HoldfastError with it when there is an error among it."""
        if self.job is None:
            raise HoldfastError(self.findings, ExitCode.INVALID_JOB)
        return Loaded(job=self.job, findings=self.findings, source=self.source)

    def accepted(self) -> Job:
        """The job; raises HoldfastError with every finding when there is an error among them."""
        return self.loaded().job


def read_job(path: str | os.PathLike[str], overrides: Iterable[str] = (), fabrics: Collection[str] = ()) -> Job:
    """The job that a file describes; raises HoldfastError with every problem."""
    return examine(read_text(path), os.fspath(path), overrides, fabrics).accepted()


def parse_job(text: str, source_name: str, overrides: Iterable[str] = (), fabrics: Collection[str] = ()) -> Job:
    """The job that a text describes; raises HoldfastError with every problem."""
    return examine(text, source_name, overrides, fabrics).accepted()


def make_job(data: Mapping[str, Any], overrides: Iterable[str] = (), fabrics: Collection[str] = ()) -> Job:
    """The job that plain data describes, as from a command line; raises HoldfastError with every problem."""
    return examine_data(data, overrides, fabrics).accepted()


def examine(text: str, source_name: str, overrides: Iterable[str] = (), fabrics: Collection[str] = ()) -> Examined:
    """Read a job file's text and say everything about it, warnings too; `fabrics` are the catalogue's names."""
    return _examine(parse(text, shown(source_name), as_written=AS_WRITTEN), overrides, fabrics)


def examine_data(data: Mapping[str, Any], overrides: Iterable[str] = (), fabrics: Collection[str] = ()) -> Examined:
    """Read a job from plain data and say everything about it, warnings too."""
    return _examine(Source(name="", data=copy.deepcopy(dict(data))), overrides, fabrics)


def read_text(path: str | os.PathLike[str]) -> str:
    """The text of a file of reasonable size; raises HoldfastError."""
    name = shown(os.fspath(path))
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


def validate(source: Source, model: type[M], reserved: Mapping[str, str]) -> M | None:
    """The model that the source describes, or None with the reasons added to the source's findings."""
    try:
        valid = model.model_validate({} if source.data is None else source.data)
    except ValidationError as error:
        complain(error, model, source, reserved)
        return None
    return None if source.findings else valid


def _examine(source: Source, overrides: Iterable[str], fabrics: Collection[str]) -> Examined:
    for override in overrides:
        _set(source, override)
    job = validate(source, Job, NOT_YET)
    findings = [*source.said(), *_between_fields(source, job, fabrics)]
    if any(finding.severity is Severity.ERROR for finding in findings):
        job = None
    return Examined(job=job and divided(job), findings=tuple(sorted(findings, key=_line)), source=source)


def _set(source: Source, override: str) -> None:
    """Put one `key=value` into the data, in place of what is there."""
    match = _OVERRIDE.fullmatch(override)
    if match is None:
        what = f"`{shown(override)}` does not set a field"
        remedy = "Write it as --set recovery.max_restarts=4."
        source.complain((override,), lambda: Finding(code="bad-override", what=what, where="--set", remedy=remedy))
        return
    path: Path = tuple(match["key"].split("."))
    place = Place(where=f"--set {shown(match['key'])}", line=override)
    parent = _group_around(source, path)
    if parent is None:
        what, remedy = f"`{dotted(path[:-1])}` has no fields to set", "See the fields with `holdfast schema`."
        source.complain(path, lambda: finding_at(place, path, code="bad-override", what=what, remedy=remedy))
        return
    parent[str(path[-1])] = _override_value(match["value"], path, source)
    source.places = {known: at for known, at in source.places.items() if known[: len(path)] != path}
    for length in range(1, len(path)):
        source.places.setdefault(path[:length], place)
    source.places[path] = place


def _group_around(source: Source, path: Path) -> dict[str, Data] | None:
    """The group that holds the last key of this path, made where it is missing; a shorthand is written out for it."""
    if source.data is None:
        source.data = {}
    here = source.data
    for depth, key in enumerate(path[:-1], 1):
        if not isinstance(here, dict):
            return None
        below = here.setdefault(str(key), {})
        if not isinstance(below, dict) and dotted(path[:depth]) in SHORTHANDS:
            below = _written_out(below, SHORTHANDS[dotted(path[:depth])])
        here[str(key)] = {} if below is None else below
        here = here[str(key)]
    return here if isinstance(here, dict) else None


def _written_out(value: Data, expand: Callable[[object], object]) -> Data:
    try:
        return cast(Data, expand(value))
    except PydanticCustomError:
        return value


def _override_value(text: str, path: Path, source: Source) -> Data:
    """A scalar as it would read in the file; what starts with a bracket or a quote is YAML."""
    if text[:1] in ("[", "{", '"', "'"):
        value = parse(text, f"--set {dotted(path)}", as_written=[form[1:] for form in AS_WRITTEN if form[:1] == path])
        for finding in value.findings:
            source.complain(path, lambda finding=finding: _of_override(finding, path, value.name))
        return value.data
    as_written = any(len(form) == len(path) and form[:-1] == path[:-1] for form in AS_WRITTEN)
    return text if as_written else scalar(text)


def _of_override(finding: Finding, path: Path, where: str) -> Finding:
    remedy = finding.remedy or "Put the value in quotes."
    quoted = Place(where=where, line="".join(finding.evidence)).quoted(path)
    return msgspec.structs.replace(finding, code="bad-override", where=where, evidence=quoted, remedy=remedy)


def _between_fields(source: Source, job: Job | None, fabrics: Collection[str]) -> Iterator[Finding]:
    """The rules' findings with the place of the field they are about; only errors where some fields are wrong."""
    whole = job is not None
    job = job or _salvaged(source)
    if job is None:
        return
    for finding in rules.check_job(job, fabrics):
        path: Path = tuple(finding.where.split("."))
        if source.is_spoiled(path) or not (whole or finding.severity is Severity.ERROR):
            continue
        yield placed_in(finding, source)


def placed_in(finding: Finding, source: Source) -> Finding:
    """A finding about a field, with the line that it was written on, if somebody wrote it."""
    path: Path = tuple(finding.where.split("."))
    place = source.place(path)
    if not place.line:
        return finding  # nobody wrote that field
    return msgspec.structs.replace(finding, where=place.where, evidence=(*place.quoted(path), *finding.evidence))


def _salvaged(source: Source) -> Job | None:
    """The job without what is wrong in it, so that the rules speak about the rest in the same go."""
    if not isinstance(source.data, dict):
        return None
    data = copy.deepcopy(source.data)
    for path in source.spoiled - {()}:
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
