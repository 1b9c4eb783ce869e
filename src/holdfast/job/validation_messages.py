"""Converts pydantic validation errors to findings, by a table.

It knows no field names: reserved fields and source locations are arguments.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping
from types import NoneType
from typing import Any, get_args

from msgspec import Struct
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from holdfast.findings import Finding
from holdfast.job.spec import PATTERN_TEXT
from holdfast.job.yaml_source import Path, SourceLocation, YamlSource, dotted_path, printable


class MessageTemplate(Struct, frozen=True, kw_only=True):
    """The message of one error type; `what` is formatted with the error's context and the value found."""

    code: str
    what: str
    remedy: str = ""


_NOT = "must be {0}, not {{found}}"
MESSAGES: Mapping[str, MessageTemplate] = {
    "missing": MessageTemplate(code="missing-field", what="is missing", remedy="Add it."),
    "int_type": MessageTemplate(code="wrong-type", what=_NOT.format("a whole number")),
    "float_type": MessageTemplate(code="wrong-type", what=_NOT.format("a number")),
    "string_type": MessageTemplate(code="wrong-type", what=_NOT.format("text"), remedy="Put it in quotes."),
    "tuple_type": MessageTemplate(code="wrong-type", what=_NOT.format("a list")),
    "dict_type": MessageTemplate(code="wrong-type", what=_NOT.format("a group of `name: value` lines")),
    "model_type": MessageTemplate(code="wrong-type", what=_NOT.format("a group of `name: value` lines")),
    "invalid_key": MessageTemplate(code="wrong-type", what="must have text for a name"),
    "string_unicode": MessageTemplate(code="bad-text", what="contains half a character"),
    "too_short": MessageTemplate(code="empty", what="must not be empty"),
    "string_too_short": MessageTemplate(code="empty", what="must not be empty"),
    "string_pattern_mismatch": MessageTemplate(code="bad-name", what="may only have {words}"),
    "greater_than_equal": MessageTemplate(code="out-of-range", what="must be at least {ge:g}"),
    "greater_than": MessageTemplate(code="out-of-range", what="must be more than {gt:g}"),
    "less_than_equal": MessageTemplate(code="out-of-range", what="must be at most {le:g}"),
    "finite_number": MessageTemplate(code="out-of-range", what="must be a finite number"),
    "enum": MessageTemplate(code="bad-value", what="must be {expected}"),
    "literal_error": MessageTemplate(code="bad-value", what="must be {expected}"),
    "bad-text": MessageTemplate(code="bad-text", what="{message}", remedy="Remove the character."),
    "bad-checkpoint-interval": MessageTemplate(
        code="bad-checkpoint-interval", what="{message}", remedy="Keep one of them."
    ),
    "bad-nodes": MessageTemplate(code="bad-nodes", what="{message}", remedy="Write `nodes: 4`."),
    "bad-size": MessageTemplate(
        code="bad-size", what="{message}", remedy="Use K, M, G, T, P or Ki, Mi, Gi, Ti, Pi, or plain bytes."
    ),
    "bad-secret": MessageTemplate(code="bad-secret", what="{message}", remedy="Write `NAME: {{env: VARIABLE}}`."),
    "bad-path": MessageTemplate(code="bad-path", what="{message}"),
    "bad-egress": MessageTemplate(
        code="bad-egress",
        what="{message}",
        remedy="Write one destination for each rule, such as `{{cidr: 10.20.0.0/16}}` or `{{ports: [443]}}`.",
    ),
    "bad-notify": MessageTemplate(
        code="bad-notify",
        what="{message}",
        remedy="Write one receiver for each entry, such as `{{slack: {{env: SLACK_URL}}}}`.",
    ),
    "bad-volume": MessageTemplate(code="bad-volume", what="{message}", remedy="Name one of them."),
    "bad-command": MessageTemplate(code="bad-command", what="{message}", remedy="write the command as a list of words"),
}
"""Error types with underscores are pydantic's; those with hyphens are raised in spec.py."""

_OTHER = MessageTemplate(code="bad-value", what="cannot be {found}")


def add_validation_findings(
    error: ValidationError,
    model: type[BaseModel],
    source: YamlSource,
    *,
    reserved: Mapping[str, str],
    hints: Mapping[str, str],
) -> None:
    """Add one finding per invalid value to the source.

    `reserved` maps planned fields to what they will do, `hints` names that are no fields to the right field.
    """
    details = error.errors(include_url=False, include_input=True)
    inside = {detail["loc"][:-1] for detail in details}
    for detail in details:
        path = tuple(detail["loc"])
        if path and path[-1] == "[key]":
            path = path[:-1]
        if source.is_invalid(path) or (detail["type"] == "too_short" and path in inside):
            continue  # already reported; pydantic also calls a list too short if one of its items is invalid
        if detail["type"] == "extra_forbidden":
            source.add_finding(path, lambda path=path: _unknown_field(path, model, source, reserved, hints))
        else:
            source.add_finding(path, lambda path=path, detail=detail: _invalid_value(path, detail, source))


def _invalid_value(path: Path, detail: ErrorDetails, source: YamlSource) -> Finding:
    row = MESSAGES.get(detail["type"], _OTHER)
    context: dict[str, Any] = {**detail.get("ctx", {})}
    words = PATTERN_TEXT.get(str(context.get("pattern")), "")
    what = row.what.format_map(
        {**context, "found": _kind(detail["input"]), "words": words, "message": printable(detail["msg"])}
    )
    subject = f"`{dotted_path(path)}`" if path else "the description"
    place = source.location(path)
    remedy = row.remedy.format()
    if row.code == "missing-field":
        remedy = f"Add `{dotted_path(path)}: ...`."
        place = SourceLocation(where=source.location(path[:-1]).where if source.name else dotted_path(path))
    elif detail["input"] is None:
        remedy = "Give it a value, or remove the line."
    elif row.code == "bad-value" and isinstance(detail["input"], str):
        remedy = suggest(detail["input"], re.findall(r"'([^']+)'", str(context.get("expected"))))
    return finding_at(place, path, code=row.code, what=f"{subject} {what}", remedy=remedy)


def finding_at(place: SourceLocation, path: Path, *, code: str, what: str, remedy: str = "") -> Finding:
    """A finding that quotes its source line."""
    evidence = place.quoted(path)
    return Finding(code=code, what=what, where=place.where, evidence=evidence, remedy=remedy)


def _unknown_field(
    path: Path, model: type[BaseModel], source: YamlSource, reserved: Mapping[str, str], hints: Mapping[str, str]
) -> Finding:
    place = source.location(path)
    name = dotted_path(path)
    if name in reserved:
        what = f"`{name}` ({reserved[name]}) is not built yet"
        return finding_at(place, path, code="not-supported", what=what, remedy="Remove it.")
    siblings = _fields_at(model, path[:-1])
    key = printable(str(path[-1]), 60)
    remedy = f"Write it as `{hints[key]}`." if key in hints else suggest(key, siblings) or _suggest_group(key, model)
    if not remedy:
        remedy = f"Remove it; fields here are {', '.join(siblings)}."
    return finding_at(place, path, code="unknown-field", what=f"`{name}` is not a field", remedy=remedy)


def suggest(word: str, known: Collection[str]) -> str:
    """`Did you mean ...?` with the closest known word, or one that starts with this word."""
    cut = word[:60]
    near = difflib.get_close_matches(cut.lower().replace("-", "_"), known, 1) or difflib.get_close_matches(
        cut, known, 1
    )
    best = next(iter(near), None) or next((name for name in known if cut and name.startswith(cut)), None)
    return f"Did you mean `{best}`?" if best else ""


def _suggest_group(key: str, model: type[BaseModel]) -> str:
    """Suggest the same field one level down, for example for `max_restarts` outside `recovery`."""
    homes = [name for name in model.model_fields if key in _fields_at(model, (name,))]
    return f"Did you mean `{homes[0]}.{key}`?" if homes else ""


def _fields_at(model: type[BaseModel], path: Path) -> list[str]:
    """Field names of the model at this path; empty if there is no model."""
    here: Any = model
    for key in path:
        if _is_model(here):
            field = here.model_fields.get(str(key))
            here = _without_none(field.annotation) if field else None
        else:
            here = next((each for each in reversed(get_args(here)) if each is not ...), None)
    return list(here.model_fields) if _is_model(here) else []


def _without_none(annotation: Any) -> Any:
    """`X` of `X | None`; another annotation as it is."""
    members = [each for each in get_args(annotation) if each is not NoneType]
    return members[0] if len(members) == 1 and len(members) < len(get_args(annotation)) else annotation


def _is_model(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _kind(value: object) -> str:
    """The type of a value, in plain English."""
    match value:
        case None:
            return "empty"
        case bool():
            return "true or false"
        case int():
            return "a whole number"
        case float():
            return "a number with a fraction"
        case str():
            return "text"
        case list() | tuple():
            return "a list"
        case dict():
            return "a group of fields"
        case _:
            return f"a {type(value).__name__}"
