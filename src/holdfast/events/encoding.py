"""JSON encoding of events and messages that never fails on text."""

from __future__ import annotations

from typing import Any, cast

import msgspec

_encoder = msgspec.json.Encoder()


def encode(message: msgspec.Struct) -> bytes:
    """A struct as JSON; a lone surrogate, as in a file name that is not UTF-8, is written as an escape."""
    try:
        return _encoder.encode(message)
    except UnicodeEncodeError:
        return _encoder.encode(_encodable(msgspec.to_builtins(message)))


def escape_surrogates(text: str) -> str:
    """The same text with lone surrogates as escapes."""
    return text.encode("utf-8", "backslashreplace").decode()


def _encodable(value: Any) -> Any:
    match value:
        case str():
            return escape_surrogates(value)
        case dict():
            items = cast("dict[str, Any]", value).items()
            return {escape_surrogates(name): _encodable(inner) for name, inner in items}
        case list() | tuple():
            return [_encodable(inner) for inner in cast("list[Any]", value)]
        case _:
            return value
