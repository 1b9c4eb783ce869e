"""Writes objects as YAML, in insertion order, with comments that give reasons.

A value with a reason is a `Commented`; the reason becomes a YAML comment and is not part of the data. Both omit None.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from msgspec import Struct

WIDTH = 110
"""Width at which comments are folded."""


class Commented(Struct, frozen=True):
    """A value with its reason."""

    value: YamlValue
    reason: str


YamlValue = Mapping[str, "YamlValue"] | Sequence["YamlValue"] | str | int | float | bool | None | Commented
"""A node of a manifest."""


def to_plain(node: YamlValue) -> Any:
    """The data without comments: dicts, lists and scalars."""
    match node:
        case Commented():
            return to_plain(node.value)
        case Mapping():
            data = {key: to_plain(value) for key, value in node.items()}
            return {key: value for key, value in data.items() if value is not None}
        case str():
            return node
        case Sequence():
            return [to_plain(each) for each in node]
        case _:
            return node


def to_yaml(objects: Sequence[Mapping[str, YamlValue]], *, head: Sequence[str] = ()) -> str:
    """A stream of YAML documents that parses to `to_plain` of each object; `head` has comments for the top."""
    lines = [line for words in head for line in _comment(words, 0)]
    for each in objects:
        lines += ["---", *_mapping(each, 0)]
    return "\n".join(lines) + "\n"


def _mapping(node: Mapping[str, YamlValue], indent: int) -> Iterator[str]:
    for key, value in node.items():
        if to_plain(value) is not None:
            yield from _entry(f"{' ' * indent}{_scalar(key)}:", value, indent)


def _entry(head: str, value: YamlValue, indent: int) -> Iterator[str]:
    """A key and its value, on one line or several."""
    match value:
        case Commented():
            yield from _comment(value.reason, indent)
            yield from _entry(head, value.value, indent)
        case Mapping() if to_plain(value):
            yield head
            yield from _mapping(value, indent + 2)
        case str() if _BLOCK.fullmatch(value):
            yield f"{head} |"
            yield from (f"{' ' * (indent + 2)}{line}" for line in value.splitlines())
        case Sequence() if value and not isinstance(value, str):
            inline = _inline_list(value)
            if inline and len(head) + len(inline) < WIDTH:
                yield f"{head} {inline}"
            else:
                yield head
                yield from _items(value, indent)
        case _:
            yield f"{head} {_scalar(to_plain(value))}"


def _items(node: Sequence[YamlValue], indent: int) -> Iterator[str]:
    """A list's entries; the first key of a mapping follows its hyphen."""
    mark = f"{' ' * indent}-"
    for each in node:
        value = each
        if isinstance(value, Commented):
            yield from _comment(value.reason, indent)
            value = value.value
        if isinstance(value, Mapping) and to_plain(value):
            first = True
            for line in _mapping(value, indent + 2):
                is_comment = line.lstrip().startswith("#")
                yield f"{mark} {line[indent + 2 :]}" if first and not is_comment else line
                first = first and is_comment
        else:
            yield from _entry(mark, value, indent + 2)


def _inline_list(node: Sequence[YamlValue]) -> str:
    """A list of scalars on one line; empty for any other list."""
    if any(isinstance(each, Commented | Mapping | list | tuple) for each in node):
        return ""
    return f"[{', '.join(map(_scalar, node))}]"


def _comment(words: str, indent: int) -> Iterator[str]:
    for line in textwrap.wrap(words, WIDTH - indent - 2, break_long_words=False, break_on_hyphens=False):
        yield f"{' ' * indent}# {line}"


_PLAIN = re.compile(r"[A-Za-z/][-A-Za-z0-9_./]*")
_YAML_KEYWORDS = {"true", "false", "yes", "no", "on", "off", "y", "n", "null"}
_BLOCK = re.compile(r"(?:[!-~](?:[ -~]*[!-~])?\n)(?:[ -~]*[!-~]\n)+")
"""Text of two or more lines that fits a literal block: printable, no blank line, no trailing space."""
_UNPRINTABLE = re.compile("[^\t\n\r -~\u00a0-\ud7ff\ue000-\ufefe\uff00-\ufffd]|[\u2028\u2029]")


def _scalar(value: YamlValue) -> str:
    """A scalar, quoted so that YAML 1.1 and 1.2 parsers read the same value."""
    if isinstance(value, str):
        if _PLAIN.fullmatch(value) and value.lower() not in _YAML_KEYWORDS:
            return value
        quoted = json.dumps(value, ensure_ascii=False)
        return _UNPRINTABLE.sub(lambda found: f"\\U{ord(found[0]):08X}", quoted)
    return json.dumps(cast(Any, value))
