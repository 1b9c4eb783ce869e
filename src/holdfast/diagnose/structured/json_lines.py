"""Converts logs of JSON objects, as container runtimes and structured loggers write them, into plain lines.

The result is the text, with its time and its rank in front; a text of several lines keeps its one line number of the
file. structured_files.py reads documents that are one object as a whole.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, cast

import msgspec
from msgspec.structs import replace

from holdfast.diagnose.log_chunk import LogChunk

PREFIX_BYTES = 160
"""How many bytes may precede the object: the prefixes of kubectl and launchers."""
HEAD_BYTES = 16 << 10
"""Where the first object must start, in a chunk that has any."""
# {"log": "Traceback ...\n", "stream": "stderr", "time": "2026-11-20T10:10:42.123456789Z"}       Docker, Fluent Bit
# {"event": "training failed", "level": "error", "timestamp": "...", "exception": "Traceback ..."}      structlog
# {"message": "...", "severity": "ERROR", "time": "...", "exc_info": "Traceback ..."}           python-json-logger
_TEXTS = ("log", "message", "msg", "event", "textPayload", "MESSAGE")
_STACKS = ("exception", "exc_info", "exc_text", "stack_trace", "stack", "stacktrace", "traceback", "error")
_CLOCKS = ("time", "timestamp", "@timestamp", "ts", "asctime", "datetime")
_RANKS = ("rank", "global_rank", "RANK")


def to_plain_lines(block: LogChunk) -> Iterator[LogChunk]:
    """The chunk unchanged; or, if its lines are objects, their text, a text of several lines in separate chunks."""
    if not any(map(_is_object, block.data[:HEAD_BYTES].split(b"\n"))):
        yield block
        return
    first, plain, begin = int(block.first_line), list[bytes](), 0
    for number, line in enumerate(block.data.split(b"\n")):
        text = _to_text(line) if _is_object(line) else line
        if b"\n" not in text:
            plain.append(text)
            continue
        if plain:
            yield replace(block, first_line=first + begin, data=b"\n".join(plain) + b"\n")
        yield replace(block, first_line=first + number, data=text + b"\n", single_line=True)
        plain, begin = [], number + 1
    if any(plain):
        yield replace(block, first_line=first + begin, data=b"\n".join(plain))


def _is_object(line: bytes) -> bool:
    return -1 < line.find(b'{"') <= PREFIX_BYTES and line.rstrip().endswith(b"}")


def _to_text(line: bytes) -> bytes:
    """The text of an object with its prefix; the line unchanged if it holds none."""
    begin = line.find(b'{"')
    try:
        # json.dumps turns a torn emoji into half a surrogate pair; msgspec rejects it as damaged.
        parsed = (json.loads if b"\\ud" in line else msgspec.json.decode)(line[begin:])
    except (ValueError, RecursionError):  # msgspec and json raise ValueErrors
        return line
    if not isinstance(parsed, dict):
        return line
    values = cast("dict[str, Any]", parsed)
    texts = [text for names in (_TEXTS, _STACKS) if (text := _first(values, names))]
    if not texts:
        return line
    rank = next((values[name] for name in _RANKS if str(values.get(name, "")).isdecimal()), None)
    who = (_first(values, _CLOCKS), f"[rank{rank}]:" if rank is not None else "")
    head = "".join(f"{part} " for part in who if part)
    lines = "\n".join(texts).rstrip("\n").split("\n")
    below = f"{who[1]} " if who[1] else ""  # the time of the first line applies to those below it
    text = "\n".join([f"{head}{lines[0]}", *(f"{below}{each}" for each in lines[1:])])
    return line[:begin] + text.encode("utf-8", "replace")


def _first(values: dict[str, Any], names: tuple[str, ...]) -> str:
    return next((value for name in names if isinstance(value := values.get(name), str) and value), "")
