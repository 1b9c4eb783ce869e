"""Parses a manifest file to its objects, with the line of every value.

Unlike job files, manifests have several documents, anchors and merge keys, and YAML 1.1's booleans, as kubectl reads
them. Size, depth and expanded aliases are limited. For any text it returns objects and findings; it never raises.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import yaml
from msgspec import Struct, field

from holdfast.findings import Finding
from holdfast.job.yaml_source import Data, Path, SourceLocation, dotted_path, printable, scalar

MAX_DEPTH = 40
"""A pod template within a TrainJob's patches is 20 levels deep."""
MAX_VALUES = 100_000
"""Values of a document after expanding its aliases; short text can otherwise expand to gigabytes."""

_BOOLEANS = {"y": True, "yes": True, "on": True, "n": False, "no": False, "off": False}
"""Words that kubectl's parser, of YAML 1.1, reads as booleans as well."""
_MANIFEST = re.compile(r"""^\{?\s*["']?apiVersion["']?\s*:""", re.MULTILINE)
_TEMPLATE = re.compile(r"\{\{|\{%")
_JSON_START = re.compile(r"\s*\{")


def is_manifest(text: str) -> bool:
    """Whether a file's text is a Kubernetes manifest rather than a job file, which has no `apiVersion`."""
    lines = text if _JSON_START.match(text) else "\n".join(line for line in text.splitlines() if not line[:1].isspace())
    return _MANIFEST.search(lines) is not None


class ManifestObject(Struct, frozen=True, kw_only=True):
    """One object of a manifest file."""

    file: str
    data: dict[str, Data]
    locations: Mapping[Path, SourceLocation]

    @property
    def kind(self) -> str:
        return as_text(self.data.get("kind"))

    @property
    def api_version(self) -> str:
        return as_text(self.data.get("apiVersion"))

    @property
    def api_group(self) -> str:
        """The API group without the version; empty for the core group."""
        return self.api_version.rpartition("/")[0]

    @property
    def name(self) -> str:
        """The object's name, or its `generateName` without the final hyphen."""
        metadata = as_mapping(self.data.get("metadata"))
        return as_text(metadata.get("name")) or as_text(metadata.get("generateName")).rstrip("-")

    def at(self, path: Path) -> Data:
        """The value at a path; None if there is none."""
        here: Data = self.data
        for key in path:
            if isinstance(here, dict):
                here = here.get(str(key))
            elif isinstance(here, list) and isinstance(key, int) and key < len(here):
                here = here[key]
            else:
                return None
        return here

    def location(self, path: Path) -> SourceLocation:
        """Location of the value at this path, or of its nearest parent."""
        for length in range(len(path), -1, -1):
            if path[:length] in self.locations:
                return self.locations[path[:length]]
        return SourceLocation(where=self.file)


class ManifestFile(Struct, kw_only=True):
    """The objects of a file, and what prevents reading the rest."""

    objects: list[ManifestObject] = field(default_factory=list[ManifestObject])
    findings: list[Finding] = field(default_factory=list[Finding])


def as_mapping(value: Data) -> dict[str, Data]:
    """The value if it is a mapping, else an empty one."""
    return value if isinstance(value, dict) else {}


def as_list(value: Data) -> list[Data]:
    """The value if it is a list, else an empty one."""
    return value if isinstance(value, list) else []


def as_text(value: Data) -> str:
    """The value if it is text, else an empty text."""
    return value if isinstance(value, str) else ""


def as_count(value: Data) -> int | None:
    """The value if it is a whole number, also one written as text; None for a placeholder such as `$NODES`."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value
    return int(value) if isinstance(value, str) and re.fullmatch(r"[0-9]{1,9}", value) else None


def parse_manifest(text: str, file: str) -> ManifestFile:
    """Parse all objects of a manifest file; objects before an error are kept. A `List` gives its items."""
    found = ManifestFile()
    lines = text.splitlines()
    try:
        for data, locations in _Reader(file, lines, yaml.parse(text, Loader=yaml.SafeLoader)).documents():
            found.objects += _objects(file, data, locations)
    except yaml.reader.ReaderError as error:
        _refuse(found, file, lines, text.count("\n", 0, error.position), str(error.reason))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        _refuse(found, file, lines, mark.line if mark else 0, " ".join(filter(None, (error.context, error.problem))))
    except _UnreadableYaml as error:
        _refuse(found, file, lines, error.line, str(error))
    except (ValueError, OverflowError):  # PyYAML does not catch chr() for an escape such as "\U00110000"
        _refuse(found, file, lines, 0, "an escape in double quotes names a character that does not exist")
    return found


def _objects(file: str, data: Data, locations: dict[Path, SourceLocation]) -> Iterator[ManifestObject]:
    if not isinstance(data, dict):
        return
    if data.get("kind") != "List":
        yield ManifestObject(file=file, data=data, locations=locations)
        return
    for number, item in enumerate(as_list(data.get("items"))):
        start: Path = ("items", number)
        below = {path[2:]: place for path, place in locations.items() if path[:2] == start}
        yield from _objects(file, item, below)


def _refuse(found: ManifestFile, file: str, lines: list[str], line: int, problem: str) -> None:
    text = lines[line].strip() if line < len(lines) else ""
    remedy = (
        "Render the template first: `helm template` or `kustomize build`."
        if _TEMPLATE.search(text)
        else "Check the indentation and the quotes around this line."
    )
    what = f"this is not YAML that holdfast reads: {printable(problem, 200)}"
    evidence = (printable(text),) if text else ()
    where = f"{printable(file)}:{line + 1}"
    found.findings.append(Finding(code="bad-yaml", what=what, where=where, evidence=evidence, remedy=remedy))


class _UnreadableYaml(Exception):
    def __init__(self, line: int, problem: str) -> None:
        super().__init__(problem)
        self.line = line


class _Anchored(Struct, frozen=True):
    value: Data
    size: int


class _Reader:
    """Builds data from parser events; recursion follows the document's depth, which is limited."""

    def __init__(self, file: str, lines: list[str], events: Iterator[yaml.Event]) -> None:
        self._file = file
        self._lines = lines
        self._events = events
        self._locations: dict[Path, SourceLocation] = {}
        self._anchors: dict[str, _Anchored | None] = {}
        self._size = 0

    def documents(self) -> Iterator[tuple[Data, dict[Path, SourceLocation]]]:
        for event in self._events:
            if isinstance(event, yaml.DocumentStartEvent):
                self._locations, self._anchors, self._size = {}, {}, 0
                yield self._value(next(self._events), ()), self._locations

    def _value(self, event: yaml.Event, path: Path) -> Data:
        line = event.start_mark.line if event.start_mark else 0
        if path not in self._locations:
            text = self._lines[line].strip() if line < len(self._lines) else ""
            self._locations[path] = SourceLocation(where=f"{printable(self._file)}:{line + 1}", line=text)
        if len(path) > MAX_DEPTH:
            raise _UnreadableYaml(line, f"nested more than {MAX_DEPTH} levels deep")
        if isinstance(event, yaml.AliasEvent):
            anchored = self._anchors.get(str(event.anchor))
            if anchored is None:
                raise _UnreadableYaml(line, f"`*{printable(str(event.anchor), 60)}` names no value before it")
            self._grow(line, anchored.size)
            return anchored.value
        before = self._size
        anchor = str(event.anchor) if isinstance(event, yaml.NodeEvent) and event.anchor else None
        if anchor is not None:
            self._anchors[anchor] = None  # an alias within its own value
        self._grow(line, 1)
        value = self._content(event, path)
        if anchor is not None:
            self._anchors[anchor] = _Anchored(value, self._size - before)
        return value

    def _grow(self, line: int, size: int) -> None:
        self._size += size
        if self._size > MAX_VALUES:
            raise _UnreadableYaml(line, f"more than {MAX_VALUES:,} values in one object")

    def _content(self, event: yaml.Event, path: Path) -> Data:
        match event:
            case yaml.SequenceStartEvent():
                items: list[Data] = []
                while not isinstance(each := next(self._events), yaml.SequenceEndEvent):
                    items.append(self._value(each, (*path, len(items))))
                return items
            case yaml.MappingStartEvent():
                return self._mapping(path)
            case yaml.ScalarEvent():
                text = str(event.value)
                if not event.implicit[0]:
                    return text
                return _BOOLEANS.get(text.lower(), scalar(text)) if event.tag is None else text
            case _:
                raise _UnreadableYaml(0, "unexpected content")

    def _mapping(self, path: Path) -> dict[str, Data]:
        mapping: dict[str, Data] = {}
        merged: list[Data] = []
        while not isinstance(event := next(self._events), yaml.MappingEndEvent):
            line = event.start_mark.line if event.start_mark else 0
            if not isinstance(event, yaml.ScalarEvent):
                raise _UnreadableYaml(line, "a field's name must be a plain word")
            key = str(event.value)
            below = (*path, key)
            if key in mapping:
                raise _UnreadableYaml(line, f"`{dotted_path(below)}` is written twice")
            value_event = next(self._events)
            if key == "<<" and event.implicit[0]:
                merged.append(self._value(value_event, below))
                continue
            mapping[key] = self._value(value_event, below)
            if not isinstance(value_event, yaml.ScalarEvent | yaml.AliasEvent):  # the key's line shows the field
                text = self._lines[line].strip() if line < len(self._lines) else ""
                self._locations[below] = SourceLocation(where=f"{printable(self._file)}:{line + 1}", line=text)
        for source in merged:
            for each in source if isinstance(source, list) else [source]:
                mapping = {**as_mapping(each), **mapping}
        return mapping
