"""Parses YAML text to plain data with the source location of every value.

It supports mappings, lists and scalars of the core schema, so `on` is text and `1.10` under `env` stays `1.10`. It
rejects aliases and tags, and limits nesting and size. For any input it returns data and findings; it never raises.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping

import yaml
from msgspec import Struct, field

from holdfast.findings import Finding

MAX_BYTES = 256 * 1024
"""Job files have one or two pages; the parser reads about 350 kB/s."""
MAX_DEPTH = 24
MAX_FINDINGS = 50
"""More findings are only counted."""

PRIVATE_FIELDS = frozenset({"secrets"})
"""Never quoted: the user may have written the secret itself in place of its source."""

Data = str | int | float | bool | list["Data"] | dict[str, "Data"] | None
Path = tuple[str | int, ...]


class SourceLocation(Struct, frozen=True, kw_only=True):
    """File, line number and text of the line of a value."""

    where: str
    line: str = ""

    def quoted(self, path: Path) -> tuple[str, ...]:
        """The line as evidence for a problem at this path, unless it may contain a secret."""
        private = path and path[0] in PRIVATE_FIELDS
        return (printable(self.line),) if self.line and not private else ()


class YamlSource(Struct, kw_only=True):
    """Parsed data: `locations` maps paths to lines; `invalid_paths` have a finding already."""

    name: str
    data: Data = None
    locations: dict[Path, SourceLocation] = field(default_factory=dict[Path, SourceLocation])
    findings: list[Finding] = field(default_factory=list[Finding])
    invalid_paths: set[Path] = field(default_factory=set[Path])
    omitted: int = 0

    def location(self, path: Path) -> SourceLocation:
        """Location of this path, or of its nearest parent."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.locations:
                return self.locations[path[:length]]
        return SourceLocation(where=self.name or dotted_path(path))

    def add_finding(self, path: Path, finding: Callable[[], Finding]) -> None:
        """Add a finding at this path; `finding` is called only below MAX_FINDINGS."""
        if len(self.findings) < MAX_FINDINGS:
            self.findings.append(finding())
        else:
            self.omitted += 1
        self.invalid_paths.add(path)

    def all_findings(self) -> tuple[Finding, ...]:
        """All findings, plus one with the number of omitted ones."""
        if not self.omitted:
            return tuple(self.findings)
        what = f"there are {self.omitted} more problems"
        rest = Finding(code="more-problems", what=what, where=self.name, remedy="Fix the ones above first.")
        return (*self.findings, rest)

    def is_invalid(self, path: Path) -> bool:
        return any(path[:length] in self.invalid_paths for length in range(len(path) + 1))


def printable(text: str, limit: int = 120) -> str:
    """The text without control characters, truncated to `limit`."""
    cut = text if len(text) <= limit else text[: limit - 1] + "…"
    return "".join(char if char.isprintable() else char.encode("unicode-escape").decode() for char in cut)


def dotted_path(path: Path) -> str:
    """`recovery.max_restarts`, `command[2]`."""
    return "".join(f"[{key}]" if isinstance(key, int) else f".{printable(key, 60)}" for key in path).removeprefix(".")


# Scalars of YAML 1.2's core schema (yaml.org/spec/1.2.2, 10.3.2); the lengths keep int() and float() quick.
_SCALARS: tuple[tuple[re.Pattern[str], Callable[[str], Data]], ...] = (
    (re.compile(r"|~|null|Null|NULL"), lambda _: None),
    (re.compile(r"true|True|TRUE|false|False|FALSE"), lambda text: text.lower() == "true"),
    (re.compile(r"[-+]?[0-9]{1,40}"), int),
    (re.compile(r"0o[0-7]{1,40}"), lambda text: int(text[2:], 8)),
    (re.compile(r"0x[0-9a-fA-F]{1,40}"), lambda text: int(text, 16)),
    (re.compile(r"[-+]?(\.[0-9]{1,40}|[0-9]{1,40}(\.[0-9]{0,40})?)([eE][-+]?[0-9]{1,4})?"), float),
    (re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"), lambda text: float(text.replace(".", ""))),
)


def scalar(text: str, *, keep_as_text: bool = False) -> Data:
    """Value of an unquoted scalar; `keep_as_text` keeps everything except null as text."""
    for pattern, read in _SCALARS:
        if pattern.fullmatch(text):
            value = read(text)
            return text if keep_as_text and value is not None else value
    return text


_PLAIN = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_./:@+]*[-A-Za-z0-9_./@+])?")
"""Text that needs no quotes unless it reads as another type; a colon at its end would make it a field's name."""


def as_yaml(text: str) -> str:
    """The text as a YAML scalar, in quotes if it would be read as something else without."""
    return text if _PLAIN.fullmatch(text) and scalar(text) == text else json.dumps(text, ensure_ascii=False)


# PyYAML's error message -> remedy.
_YAML_REMEDIES: Mapping[str, str] = {
    "that cannot start any token": "Indent with spaces, and put text that starts with a special character in quotes.",
    "mapping values are not allowed here": "Check the indentation, and put text that contains `: ` in quotes.",
    "could not find expected ':'": "Write `name: value`, with a space after the colon.",
    "found unexpected end of stream": "Close the quotation that was opened.",
    "expected <block end>": "Line this up with its neighbours.",
    "expected ',' or": "Close the bracket that was opened, and put commas between values.",
    "but found '<stream end>'": "Close the bracket that was opened.",
    "special characters are not allowed": "Remove the character, or write it as an escape in double quotes.",
}


def parse(text: str, name: str, *, keep_as_text: Collection[Path] = ()) -> YamlSource:
    """Parse one YAML document; scalars at the paths `keep_as_text` (`*` matches any key) stay text."""
    source = YamlSource(name=name)
    lines = text.splitlines()
    try:
        _Builder(source, lines, keep_as_text, yaml.parse(text, Loader=yaml.SafeLoader)).document()
    except yaml.reader.ReaderError as error:
        _refuse_yaml(source, lines, text.count("\n", 0, error.position), str(error.reason))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        _refuse_yaml(source, lines, mark.line if mark else 0, " ".join(filter(None, (error.context, error.problem))))
    except _UnsupportedYaml as error:
        _refuse_yaml(source, lines, error.line, str(error))
    except (ValueError, OverflowError):  # PyYAML does not catch chr() for an escape such as "\U00110000"
        _refuse_yaml(source, lines, 0, "an escape in double quotes names a character that does not exist")
    return source


def _refuse_yaml(source: YamlSource, lines: list[str], line: int, problem: str) -> None:
    evidence = (printable(lines[line].strip()),) if line < len(lines) else ()
    remedy = next((remedy for words, remedy in _YAML_REMEDIES.items() if words in problem), "")
    what = f"this is not YAML that holdfast reads: {printable(problem, 200)}"
    where = f"{source.name}:{line + 1}"
    source.data = None
    source.add_finding((), lambda: Finding(code="bad-yaml", what=what, where=where, evidence=evidence, remedy=remedy))


def _line(event: yaml.Event) -> int:
    return event.start_mark.line if event.start_mark else 0


class _UnsupportedYaml(Exception):
    def __init__(self, line: int, problem: str) -> None:
        super().__init__(problem)
        self.line = line


class _Builder:
    """Builds data from parser events; recursion follows the document's depth, limited by `MAX_DEPTH`."""

    def __init__(
        self, source: YamlSource, lines: list[str], as_written: Collection[Path], events: Iterator[yaml.Event]
    ) -> None:
        self._source = source
        self._lines = lines
        self._keep_as_text = as_written
        self._events = events

    def document(self) -> None:
        next(self._events)  # the stream's start
        if isinstance(next(self._events), yaml.StreamEndEvent):
            return
        self._source.data = self._value(next(self._events), ())
        next(self._events)  # the document's end
        after = next(self._events)
        if isinstance(after, yaml.DocumentStartEvent):
            raise _UnsupportedYaml(_line(after), "a second document starts here")

    def _value(self, event: yaml.Event, path: Path) -> Data:
        line = _line(event)
        if path not in self._source.locations and path:
            self._source.locations[path] = self._location(line)
        if len(path) > MAX_DEPTH:
            raise _UnsupportedYaml(line, f"nested more than {MAX_DEPTH} levels deep")
        if isinstance(event, yaml.AliasEvent):
            return self._unsupported(path, line, "an alias", "Write the value out.")
        if isinstance(event, yaml.NodeEvent) and getattr(event, "tag", None) is not None:
            self._unsupported(path, line, "a tag", "Leave the word that starts with `!` out, or put it in quotes.")
        if isinstance(event, yaml.SequenceStartEvent):
            return list(self._items(path))
        if isinstance(event, yaml.MappingStartEvent):
            return self._mapping(path)
        assert isinstance(event, yaml.ScalarEvent)
        text = str(event.value)
        return scalar(text, keep_as_text=self._stays_text(path)) if event.implicit[0] else text

    def _items(self, path: Path) -> Iterator[Data]:
        index = 0
        while not isinstance(event := next(self._events), yaml.SequenceEndEvent):
            yield self._value(event, (*path, index))
            index += 1

    def _mapping(self, path: Path) -> dict[str, Data]:
        mapping: dict[str, Data] = {}
        while not isinstance(event := next(self._events), yaml.MappingEndEvent):
            line = _line(event)
            if not isinstance(event, yaml.ScalarEvent):
                raise _UnsupportedYaml(line, "a field's name must be a plain word")
            key = str(event.value)
            below = (*path, key)
            if key in mapping:
                self._duplicate(below, line)
                self._value(next(self._events), below)
                continue
            self._source.locations[below] = self._location(line)
            mapping[key] = self._value(next(self._events), below)
        return mapping

    def _location(self, line: int) -> SourceLocation:
        text = self._lines[line].strip() if line < len(self._lines) else ""
        return SourceLocation(where=f"{self._source.name}:{line + 1}", line=text)

    def _stays_text(self, path: Path) -> bool:
        return any(
            len(pattern) == len(path) and all(want in ("*", key) for want, key in zip(pattern, path, strict=True))
            for pattern in self._keep_as_text
        )

    def _duplicate(self, path: Path, line: int) -> None:
        first = self._source.locations[path].where.rpartition(":")[2]
        what = f"`{dotted_path(path)}` is written twice; the first is on line {first}"
        self._add_finding(path, line, "duplicate-key", what, "Keep one of the two.")

    def _unsupported(self, path: Path, line: int, thing: str, remedy: str) -> None:
        self._add_finding(path, line, "unsupported-yaml", f"this is {thing}, which holdfast does not read", remedy)

    def _add_finding(self, path: Path, line: int, code: str, what: str, remedy: str) -> None:
        place = self._location(line)
        evidence = place.quoted(path)
        self._source.add_finding(
            path, lambda: Finding(code=code, what=what, where=place.where, evidence=evidence, remedy=remedy)
        )
