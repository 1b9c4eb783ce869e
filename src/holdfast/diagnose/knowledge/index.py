"""Owns the one list of all that can be explained, and how a row is found by what a person has seen of it."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from itertools import chain

from holdfast.diagnose.knowledge import (
    class_remedies,
    cluster_findings,
    combined_causes,
    cuda,
    job_findings,
    nccl,
    peer_checkpoint_findings,
    run_findings,
    signals,
    update_findings,
    xid,
)
from holdfast.diagnose.knowledge.explanation import Explanation
from holdfast.diagnose.rules import RULES
from holdfast.diagnose.rules.evidence_requests import EVIDENCE_REQUESTS
from holdfast.diagnose.rules.rule import Rule

FINDINGS_SOURCE = "holdfast, findings"
MIN_SIMILARITY = 0.6
"""How alike a word must be to be offered instead, from 0 to 1."""
MAX_SUGGESTIONS = 5

_NUMBER = re.compile(r"-\d+")
_VALUE = re.compile(r"\{\w+\}")
_PUNCTUATION = re.compile(r"[\W_]+")


def _from_findings(rows: Iterable[tuple[str, str, str, str]]) -> list[Explanation]:
    return [
        Explanation(code=code, cause=cause, confirm=confirm, remedy=remedy, source=FINDINGS_SOURCE)
        for code, cause, confirm, remedy in rows
    ]


def _from_rule(rule: Rule) -> Explanation:
    says = _VALUE.sub("…", rule.message)
    lines = f"A line such as `{rule.lines[0]}`." if rule.lines else "A structured record says so."
    means = f" It speaks for {' or '.join(rule.classes)}." if rule.classes else ""
    decides = "; ".join(EVIDENCE_REQUESTS[name].how for name in rule.needs)
    return Explanation(
        code=rule.code,
        cause=f"{says[:1].upper()}{says[1:]}.{means}",
        confirm=decides or lines,
        remedy="; ".join(_VALUE.sub("…", step) for step in rule.remedy) or "Nothing by itself: it tells of others.",
        source=", ".join(filter(None, (rule.source, rule.versions))) or FINDINGS_SOURCE,
    )


GROUPS: Mapping[str, list[Explanation]] = {
    "Findings before a run": _from_findings(job_findings.ROWS),
    "Findings of a cluster": _from_findings(cluster_findings.ROWS),
    "Findings of a run": _from_findings(run_findings.ROWS),
    "Findings of an update": _from_findings(update_findings.ROWS),
    "Findings of peer copies": _from_findings(peer_checkpoint_findings.ROWS),
    "Classes of diagnosis": list(class_remedies.rows()),
    "Lines and records in logs": [_from_rule(rule) for rule in RULES.values()],
    "Lines and ranks together": list(combined_causes.rows()),
    "Signals and exit statuses": list(signals.rows()),
    "NCCL results and InfiniBand completions": list(nccl.rows()),
    "CUDA errors": list(cuda.rows()),
    "Xid and SXid": list(xid.rows()),
}
"""All that can be explained, by the heading it is listed under."""


def find(words: str) -> list[Explanation]:
    """Every row that these words are the code of, or another name of: a bare number can be several things.

    Case, spaces and punctuation do not matter, but for the minus of `-9`.
    """
    wanted = _key(words)
    rows = list(chain.from_iterable(GROUPS.values()))
    return [row for row in rows if _key(row.code) == wanted] or [row for row in rows if wanted in map(_key, row.names)]


def suggest(words: str) -> list[str]:
    """Codes that somebody may have meant by words that are none."""
    known = {_key(name): row.code for row in chain.from_iterable(GROUPS.values()) for name in (row.code, *row.names)}
    close = difflib.get_close_matches(_key(words), known, n=2 * MAX_SUGGESTIONS, cutoff=MIN_SIMILARITY)
    return list(dict.fromkeys(known[name] for name in close))[:MAX_SUGGESTIONS]


def _key(words: str) -> str:
    words = words.strip()
    return words if _NUMBER.fullmatch(words) else _PUNCTUATION.sub("", words.lower())
