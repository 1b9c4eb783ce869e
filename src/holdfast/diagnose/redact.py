"""Owns making an answer fit to be shown to strangers: the same name becomes the same stand-in wherever it appears.

Replaced are hosts, addresses, paths beyond their last part, users, mail addresses, and what looks like a secret.
What is left says what happened, not where. Refuses to own whether to share.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any, cast

import msgspec

from holdfast.diagnose.answer import Answer, Consequence, Culprit, Evidence, Other
from holdfast.diagnose.transport import Transport

# In this order: a secret may hold what looks like a host, an address may hold what looks like a path.
_KINDS: tuple[tuple[str, re.Pattern[str]], ...] = (
    (
        "secret",
        re.compile(
            r"(?i:(?<=token=)|(?<=password=)|(?<=secret=)|(?<=api_key=)|(?<=bearer ))[^\s,;&\"']+"
            r"|\b(?:hf_|ghp_|gho_|sk-|xox[bap]-|AKIA|ASIA|eyJ)[A-Za-z0-9_.-]{12,}|\b[A-Fa-f0-9]{40,}\b"
        ),
    ),
    ("mail", re.compile(r"\b[\w.+-]+@[\w-]+\.[\w.-]+\b")),
    ("address", re.compile(r"\b(?:\d{1,3}\.){3}\d{1,3}\b|\b(?:[0-9a-f]{1,4}:){3,7}[0-9a-f]{0,4}\b|fe80::[0-9a-f:]+")),
    ("path", re.compile(r"(?<![\w.<])/(?:[\w.@+-]+/)+(?=[\w.@+-])")),
    ("host", re.compile(r"(?<![\w./-])[A-Za-z][\w-]*(?:\.[\w-]+){2,}(?=[\s:,<\]\)]|$)(?!\()")),
    ("host", re.compile(r"(?<![\w./-])[A-Za-z][\w-]*\d[\w.-]*(?=:\d+:\d+ \[|<\d+>|: task )")),
)
_KEPT_PATHS = ("/dev/", "/proc/", "/sys/", "/usr/", "/opt/conda/", "/etc/")


class Redactor:
    """Stand-ins for names, alike for all texts that one redactor is given."""

    def __init__(self, hosts: frozenset[str] = frozenset()) -> None:
        self._stand_ins: dict[tuple[str, str], str] = {}
        known = sorted(hosts, key=len, reverse=True)
        self._hosts = (
            re.compile("|".join(rf"(?<![\w-]){re.escape(host)}(?![\w-])" for host in known)) if known else None
        )

    def text(self, text: str) -> str:
        """One text with every name in it replaced."""
        for kind, pattern in _KINDS:
            text = pattern.sub(lambda found, kind=kind: self._stand_in(kind, found[0]), text)
        return self._hosts.sub(lambda found: self._stand_in("host", found[0]), text) if self._hosts else text

    def _stand_in(self, kind: str, name: str) -> str:
        if kind == "path" and name.startswith(_KEPT_PATHS):
            return name
        number = sum(1 for known, _ in self._stand_ins if known == kind) + 1
        ending = "/" if kind == "path" else ""
        return self._stand_ins.setdefault((kind, name), f"<{kind}-{number}>{ending}")


def redacted(answer: Answer) -> Answer:
    """The answer with every name in it replaced."""
    culprit = answer.culprit
    hosts = {name for name in (culprit.host, culprit.node) if name} if culprit else set[str]()
    if answer.transport is not None:
        hosts |= {name for process in answer.transport.processes for name in (process.host, process.node)}
    redactor = Redactor(frozenset(hosts))

    def shown(evidence: Evidence) -> Evidence:
        return replace(evidence, where=redactor.text(evidence.where), text=redactor.text(evidence.text))

    def followed(consequence: Consequence) -> Consequence:
        return replace(consequence, says=redactor.text(consequence.says), first=shown(consequence.first))

    def other(each: Other) -> Other:
        return replace(each, what=redactor.text(each.what), first=shown(each.first))

    return replace(
        answer,
        transport=_nameless_transport(answer.transport, redactor) if answer.transport else None,
        what=redactor.text(answer.what),
        culprit=_nameless(culprit, redactor) if culprit else None,
        evidence=tuple(map(shown, answer.evidence)),
        consequences=tuple(map(followed, answer.consequences)),
        also=tuple(map(shown, answer.also)),
        others=tuple(map(other, answer.others)),
        notes=tuple(map(redactor.text, answer.notes)),
    )


def _nameless_transport(transport: Transport, redactor: Redactor) -> Transport:
    """The same with every text in it replaced; names of fields are no texts."""

    def walked(value: Any) -> Any:
        if isinstance(value, str):
            return redactor.text(value)
        if isinstance(value, dict):
            return {name: walked(each) for name, each in cast("dict[Any, Any]", value).items()}
        if isinstance(value, list | tuple):
            return [walked(each) for each in cast("list[Any]", value)]
        return value

    return msgspec.convert(walked(msgspec.to_builtins(transport)), Transport)


def _nameless(culprit: Culprit, redactor: Redactor) -> Culprit:
    host = redactor.text(culprit.host) if culprit.host else None
    node = redactor.text(culprit.node) if culprit.node else None
    return replace(culprit, host=host, node=node)
