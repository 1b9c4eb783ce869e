"""Converts documents into lines: torch's error files, Kubernetes objects, files of a cgroup.

Each kind is recognised by its beginning, and its facts are written as the lines that logs have for the same event; so
the rules for lines are the only rules. A document of an unexpected form is read as text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import PurePath
from typing import Any, cast

import yaml
from msgspec import Struct
from msgspec.structs import replace
from yaml.composer import ComposerError

from holdfast.diagnose.log_chunk import LogChunk, LogSource

DOCUMENT_BYTES = 32 << 20
"""Largest document that is parsed; a larger one is read as text."""
YAML_BYTES = 2 << 20
"""The same for YAML, which takes a second for each megabyte."""
MAX_VALUES = 1_500_000
"""Most values of a parsed document, counted by their separators: each takes some hundred bytes."""
MAX_LINES = 20_000
MAX_LINE_CHARS = 4000

_KUBERNETES = re.compile(rb"[\"']?kind[\"']?\s*:\s*[\"']?(?:List|PodList|EventList|NodeList|Pod|Event|Node)\b")


class _PlainLoader(yaml.BaseLoader):
    """Reads YAML scalars as text, whatever their tag, and no aliases: with them one page expands to millions."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise ComposerError(problem="an alias, which Kubernetes never writes")
        return super().compose_node(parent, index)


class RenderedLine(Struct, frozen=True, kw_only=True):
    """One line of a converted document."""

    text: str
    about: str | None = None
    """The pod or node that it is about."""
    source_words: str = ""
    """Text in the document by which its position is found."""


class DocumentKind(Struct, frozen=True, kw_only=True):
    """One kind of document."""

    matches: Callable[[str, bytes], bool]
    """Arguments: the file's name and its beginning."""
    render: Callable[[str, bytes], Iterator[RenderedLine]]
    """Arguments: the file's name and all of it; a ValueError means that it is not one after all."""


def is_too_large(data: bytes) -> bool:
    """Whether a document would take more memory than a diagnosis may use."""
    return len(data) > DOCUMENT_BYTES or sum(map(data.count, (b",", b"{", b"["))) > MAX_VALUES


def kind_of(name: str, head: bytes) -> DocumentKind | None:
    """The kind of document of a file with this name and beginning; None for a log."""
    return next((kind for kind in KINDS if kind.matches(PurePath(name).name, head)), None)


def to_chunks(kind: DocumentKind, source: LogSource, data: bytes) -> list[LogChunk]:
    """The lines of a document, each at its position; the document itself if it has an unexpected form."""
    try:
        lines = [line for _, line in zip(range(MAX_LINES), kind.render(PurePath(source.name).name, data), strict=False)]
    except (ValueError, RecursionError, yaml.YAMLError):
        return [LogChunk(source=source, first_line=1, data=data)]
    return [
        LogChunk(
            source=replace(source, node=line.about or source.node),
            first_line=_line_of(line.source_words, data),
            data=" ".join(line.text[:MAX_LINE_CHARS].splitlines()).encode("utf-8", "replace") + b"\n",
        )
        for line in lines
    ]


def _line_of(quoted: str, data: bytes) -> int:
    """The line of a document in which some words first appear; its first line if they are written differently."""
    at = data.find(quoted.encode("utf-8", "replace")) if quoted else -1
    return data.count(b"\n", 0, at) + 1 if at >= 0 else 1


def _is_json(head: bytes) -> bool:
    return head.lstrip()[:1] == b"{"


# torch elastic: $TORCHELASTIC_ERROR_FILE, error.json
# {"message": {"message": "ValueError: bad", "extraInfo": {"py_callstack": "Traceback ...", "timestamp": "1732180000"}}}


def _is_error_file(name: str, head: bytes) -> bool:
    return _is_json(head) and (b'"py_callstack"' in head or (name == "error.json" and b'"message"' in head))


def _render_error_file(name: str, data: bytes) -> Iterator[RenderedLine]:
    outer = _dict(json.loads(data)).get("message")
    inner = _dict(outer)
    extra = _dict(inner.get("extraInfo"))
    message = _text(inner.get("message")) or _text(outer)
    if not message:
        raise ValueError("no message")
    stack = _text(extra.get("py_callstack")).splitlines()
    stamp = _text(extra.get("timestamp"))
    at = _timestamp(int(stamp)) if stamp.isdecimal() and len(stamp) < 12 else ""
    if stack and stack[0].startswith("Traceback"):
        yield RenderedLine(text=stack[0])
    for line in message.splitlines():
        yield RenderedLine(text=f"{at}{line}", source_words=json.dumps(line)[1:-1])
    if (code := inner.get("errorCode")) is not None:
        yield RenderedLine(text=f"exitcode: {_text(code)}", source_words='"errorCode"')


def _timestamp(seconds: int) -> str:
    return f"[{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%SZ}] "


# Kubernetes: kubectl get pods,events,nodes -o json|yaml


def _is_kubernetes(name: str, head: bytes) -> bool:
    return b"apiVersion" in head and (_is_json(head) or head.lstrip()[:3] in {b"api", b"ite", b"kin", b"---"})


def _render_kubernetes(name: str, data: bytes) -> Iterator[RenderedLine]:
    if _KUBERNETES.search(data) is None:
        raise ValueError("nothing of a run")
    if _is_json(data):
        documents = [json.loads(data)]
    elif len(data) <= YAML_BYTES:
        documents = list(yaml.load_all(data, _PlainLoader))
    else:
        raise ValueError("too long")
    for document in documents:
        outer = _dict(document)
        for item in _dicts(outer.get("items")) if "items" in outer else (outer,):
            yield from _RENDERERS.get(_text(item.get("kind")), _render_nothing)(item)


def _render_nothing(item: Mapping[str, Any]) -> Iterator[RenderedLine]:
    return iter(())


def _render_event(event: Mapping[str, Any]) -> Iterator[RenderedLine]:
    about = _dict(event.get("involvedObject") or event.get("regarding"))
    at = event.get("lastTimestamp") or event.get("eventTime") or event.get("firstTimestamp")
    name, message = _text(about.get("name")), _text(event.get("message") or event.get("note"))
    whom = f"{_text(about.get('kind')).lower()}/{name}"
    text = f"{_stamp(at)}{_text(event.get('type'))}  {_text(event.get('reason'))}  {whom}"
    yield RenderedLine(
        text=f"{text}  {message}", about=name, source_words=json.dumps(message, ensure_ascii=False)[1:60].rstrip('"\\')
    )


def _render_pod(pod: Mapping[str, Any]) -> Iterator[RenderedLine]:
    name, status = _name(pod), _dict(pod.get("status"))
    if reason := _text(status.get("reason")):
        yield RenderedLine(
            text=f"pod/{name}  {reason}  {_text(status.get('message'))}", about=name, source_words=reason
        )
    for condition in _dicts(status.get("conditions")):
        details = f"{_text(condition.get('reason'))}  {_text(condition.get('message'))}"
        kind, value = condition.get("type"), condition.get("status")
        at = _stamp(condition.get("lastTransitionTime"))
        if (kind, value) in {("PodScheduled", "False"), ("DisruptionTarget", "True")}:
            yield RenderedLine(
                text=f"{at}Warning  pod/{name}  {details}", about=name, source_words=_text(condition.get("reason"))
            )
    for key in ("initContainerStatuses", "containerStatuses"):
        for container in _dicts(status.get(key)):
            yield from _render_container(name, container)


def _render_container(pod: str, container: Mapping[str, Any]) -> Iterator[RenderedLine]:
    for key in ("lastState", "state"):
        for how, fields in _dict(container.get(key)).items():
            state = _dict(fields)
            reason, message = _text(state.get("reason")), _text(state.get("message"))
            who = f"pod/{pod}  container {_text(container.get('name'))}"
            if how == "waiting" and reason not in {"", "ContainerCreating", "PodInitializing"}:
                yield RenderedLine(text=f"{who} waits: {reason}  {message}", about=pod, source_words=reason)
            if how == "terminated" and (code := _text(state.get("exitCode"))) not in {"", "0"}:
                ended = f"{_stamp(state.get('finishedAt'))}{who} terminated: {reason}  exit code {code}"
                yield RenderedLine(text=f"{ended}  {message}".rstrip(), about=pod, source_words=reason)


def _render_node(node: Mapping[str, Any]) -> Iterator[RenderedLine]:
    name = _name(node)
    for condition in _dicts(_dict(node.get("status")).get("conditions")):
        if condition.get("type") == "Ready" and condition.get("status") != "True":
            details = f"{_text(condition.get('reason'))}  {_text(condition.get('message'))}"
            at = _stamp(condition.get("lastTransitionTime"))
            yield RenderedLine(
                text=f"{at}NodeNotReady  node/{name}  {details}",
                about=name,
                source_words=_text(condition.get("reason")),
            )


_RENDERERS: Mapping[str, Callable[[Mapping[str, Any]], Iterator[RenderedLine]]] = {
    "Event": _render_event,
    "Pod": _render_pod,
    "Node": _render_node,
}


def _name(item: Mapping[str, Any]) -> str:
    return _text(_dict(item.get("metadata")).get("name"))


def _stamp(value: object) -> str:
    return f"{text} " if (text := _text(value)) else ""


# A cgroup's counters: memory.events


def _is_memory_events(name: str, head: bytes) -> bool:
    return name.startswith("memory.events") and b"oom_kill " in head


def _render_memory_events(name: str, data: bytes) -> Iterator[RenderedLine]:
    for line in data[:4096].decode("utf-8", "replace").splitlines():
        yield RenderedLine(text=f"{name}: {line}", source_words=line)


KINDS: Sequence[DocumentKind] = (
    DocumentKind(matches=_is_error_file, render=_render_error_file),
    DocumentKind(matches=_is_kubernetes, render=_render_kubernetes),
    DocumentKind(matches=_is_memory_events, render=_render_memory_events),
)


# Validation of a document's fields


def _dict(value: object) -> dict[str, Any]:
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def _dicts(value: object) -> Iterator[dict[str, Any]]:
    items = cast("list[object]", value) if isinstance(value, list) else []
    yield from (cast("dict[str, Any]", item) for item in items if isinstance(item, dict))


def _text(value: object) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value) if abs(value) < 2**63 else ""
    return value if isinstance(value, str) else ""
