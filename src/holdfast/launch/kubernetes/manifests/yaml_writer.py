"""Owns how objects are written down: plain data in the order it was made, with the reason beside what is not obvious.

A value that wants a reason is a `Commented`; the reason becomes a comment in the YAML and is gone from the data. What is
None is left out of both.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

WIDTH = 110
"""Columns that comments are folded at."""


@dataclass(frozen=True)
class Commented:
    """A value, and why it is what it is."""

    value: YamlValue
    reason: str


YamlValue = Mapping[str, "YamlValue"] | Sequence["YamlValue"] | str | int | float | bool | None | Commented
"""What a manifest is made of."""


def to_plain(node: YamlValue) -> Any:
    """The data alone, as it is sent: dicts, lists and scalars."""
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
    """Objects as a stream of YAML documents that reads back as `plain`; `head` are comments above them all."""
    lines = [line for words in head for line in _comment(words, 0)]
    for each in objects:
        lines += ["---", *_mapping(each, 0)]
    return "\n".join(lines) + "\n"


def _mapping(node: Mapping[str, YamlValue], indent: int) -> Iterator[str]:
    for key, value in node.items():
        if to_plain(value) is not None:
            yield from _entry(f"{' ' * indent}{_scalar(key)}:", value, indent)


def _entry(head: str, value: YamlValue, indent: int) -> Iterator[str]:
    """What follows a key: on its line, or on the lines below."""
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
            beside = _inline_list(value)
            if beside and len(head) + len(beside) < WIDTH:
                yield f"{head} {beside}"
            else:
                yield head
                yield from _items(value, indent)
        case _:
            yield f"{head} {_scalar(to_plain(value))}"


def _items(node: Sequence[YamlValue], indent: int) -> Iterator[str]:
    """A list's entries; the first key of a group stands beside its hyphen."""
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
    """A list of scalars on one line; nothing where it holds more than that."""
    if any(isinstance(each, Commented | Mapping | list | tuple) for each in node):
        return ""
    return f"[{', '.join(map(_scalar, node))}]"


def _comment(words: str, indent: int) -> Iterator[str]:
    for line in textwrap.wrap(words, WIDTH - indent - 2, break_long_words=False, break_on_hyphens=False):
        yield f"{' ' * indent}# {line}"


_PLAIN = re.compile(r"[A-Za-z/][-A-Za-z0-9_./]*")
_YAML_KEYWORDS = {"true", "false", "yes", "no", "on", "off", "y", "n", "null"}
_BLOCK = re.compile(r"(?:[!-~](?:[ -~]*[!-~])?\n)(?:[ -~]*[!-~]\n)+")
"""Text of two lines and more that can stand as it is: printable, no blank line, no blank at the end of one."""
_UNPRINTABLE = re.compile("[^\t\n\r -~\u00a0-\ud7ff\ue000-\ufefe\uff00-\ufffd]|[\u2028\u2029]")


def _scalar(value: YamlValue) -> str:
    """A scalar so that every reader, of YAML 1.1 or 1.2, takes it for what it is."""
    if isinstance(value, str):
        if _PLAIN.fullmatch(value) and value.lower() not in _YAML_KEYWORDS:
            return value
        quoted = json.dumps(value, ensure_ascii=False)
        return _UNPRINTABLE.sub(lambda found: f"\\U{ord(found[0]):08X}", quoted)
    return json.dumps(cast(Any, value))
