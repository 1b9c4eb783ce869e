"""The index of all explanations, and their lookup by code or alias."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from itertools import chain

from msgspec.structs import replace

from holdfast.diagnose.failure_classes import FAILURE_CLASS_INFO, FailureClass
from holdfast.diagnose.knowledge import (
    acceptance_findings,
    cluster_findings,
    combined_causes,
    cuda,
    gpu_check_findings,
    host_check_findings,
    image_findings,
    job_findings,
    manifest_findings,
    nccl,
    node_check_findings,
    peer_checkpoint_findings,
    rank_findings,
    rdma_check_findings,
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
"""The similarity from 0 to 1 above which a word is suggested."""
MAX_SUGGESTIONS = 5

_NUMBER = re.compile(r"-\d+")
_VALUE = re.compile(r"\{\w+\}")
_PUNCTUATION = re.compile(r"[\W_]+")


def _from_findings(rows: Iterable[tuple[str, str, str, str]]) -> list[Explanation]:
    return [
        Explanation(code=code, cause=cause, confirm=confirm, remedy=remedy, source=FINDINGS_SOURCE)
        for code, cause, confirm, remedy in rows
    ]


FINDINGS: Mapping[str, list[Explanation]] = {
    "Findings of an acceptance": _from_findings(acceptance_findings.ROWS),
    "Findings before a run": _from_findings(job_findings.ROWS),
    "Findings of a cluster": _from_findings(cluster_findings.ROWS),
    "Findings of a manifest": _from_findings(manifest_findings.ROWS),
    "Findings of an image": _from_findings(image_findings.ROWS),
    "Findings of a node": _from_findings(node_check_findings.ROWS),
    "Findings of a node: RDMA": _from_findings(rdma_check_findings.ROWS),
    "Findings of a node: GPUs": _from_findings(gpu_check_findings.ROWS),
    "Findings of a node: network, disks, software, CPUs, variables": _from_findings(host_check_findings.ROWS),
    "Findings of a run": _from_findings(run_findings.ROWS),
    "Findings of a rank": _from_findings(rank_findings.ROWS),
    "Findings of an update": _from_findings(update_findings.ROWS),
    "Findings of peer checkpoints": _from_findings(peer_checkpoint_findings.ROWS),
}
"""The explanations of findings, by the heading of their list."""


def _from_class(failure_class: FailureClass) -> Explanation:
    info = FAILURE_CLASS_INFO[failure_class]
    return Explanation(
        code=failure_class.value,
        cause=f"{info.description[:1].upper()}{info.description[1:]}.",
        confirm=info.confirm,
        remedy=info.remedy,
        source="holdfast, classes of diagnosis",
    )


def _from_rule(rule: Rule) -> Explanation:
    remedy = "; ".join(_VALUE.sub("…", step) for step in rule.remedy)
    decides = "; ".join(EVIDENCE_REQUESTS[name].how for name in rule.needs)
    if rule.message == "{what}" and rule.classes:  # it stands for a finding of a run, or of the whole fabric
        known = {row.code: row for rows in FINDINGS.values() for row in rows}
        same = known.get(rule.code.removeprefix("run-")) or _from_class(rule.classes[0])
        remedy = same.remedy if remedy == "…" else remedy
        return replace(same, code=rule.code, confirm=decides or same.confirm, remedy=remedy, source=rule.source)
    text = _VALUE.sub("…", rule.message)
    lines = (
        f"A line such as `{next(iter(rule.matches.values()))}`." if rule.matches else "A structured record shows it."
    )
    means = f" It points to {' or '.join(rule.classes)}." if rule.classes else ""
    return Explanation(
        code=rule.code,
        cause=f"{text[:1].upper()}{text[1:]}.{means}",
        confirm=decides or lines,
        remedy=remedy or "Nothing by itself: it is a symptom of other faults.",
        source=rule.source or FINDINGS_SOURCE,
    )


GROUPS: Mapping[str, list[Explanation]] = {
    **FINDINGS,
    "Classes of diagnosis": list(map(_from_class, FAILURE_CLASS_INFO)),
    "Lines and records in logs": [_from_rule(rule) for rule in RULES.values()],
    "Lines and ranks together": list(combined_causes.rows()),
    "Signals and exit statuses": list(signals.rows()),
    "NCCL results and InfiniBand completions": list(nccl.rows()),
    "CUDA errors": list(cuda.rows()),
    "Xid and SXid": list(xid.rows()),
}
"""All explanations, by the heading of their list."""


def find(words: str) -> list[Explanation]:
    """Every row with this code or alias: a bare number can mean several things.

    Case, spaces and punctuation do not matter, except the minus of `-9`.
    """
    wanted = _key(words)
    rows = list(chain.from_iterable(GROUPS.values()))
    return [row for row in rows if _key(row.code) == wanted] or [row for row in rows if wanted in map(_key, row.names)]


def suggest(words: str) -> list[str]:
    """Suggests similar codes for an unknown word."""
    known = {_key(name): row.code for row in chain.from_iterable(GROUPS.values()) for name in (row.code, *row.names)}
    close = difflib.get_close_matches(_key(words), known, n=2 * MAX_SUGGESTIONS, cutoff=MIN_SIMILARITY)
    return list(dict.fromkeys(known[name] for name in close))[:MAX_SUGGESTIONS]


def _key(words: str) -> str:
    words = words.strip()
    return words if _NUMBER.fullmatch(words) else _PUNCTUATION.sub("", words.lower())
