"""Diagnosis scored on collected incidents: right class, unknown with the deciding fact, wrong, confidently wrong.

.venv/bin/python -m bench.diagnosis_score FILE.jsonl [FILE.jsonl ...] [--each]

A line of such a file is an incident: `id`, `url`, `class` (the label), `evidence` (its log lines) and more. Only the
lines are diagnosed. An `unknown` counts as right only where the facts that it requests decide between few classes and
the label is one of them; `other` stands for every class that the collections file there.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from bench.paired_stats import headline, say, table
from holdfast.diagnose.diagnosis import Diagnosis
from holdfast.diagnose.failure_classes import Confidence, FailureClass
from holdfast.diagnose.log_chunk import LogChunk, LogSource
from holdfast.diagnose.pipeline import diagnose_chunks

MOST_CLASSES = 8
"""An unknown that leaves more classes open than these does not name the deciding fact."""


class Score(StrEnum):
    """How one answer compares with the label."""

    RIGHT = "right"
    UNKNOWN_EVIDENCE_NAMED = "unknown, deciding fact named"
    UNKNOWN_LABEL_NOT_NAMED = "unknown, label not among those"
    WRONG = "wrong"
    CONFIDENTLY_WRONG = "confidently wrong"


@dataclass(frozen=True, kw_only=True)
class Incident:
    """One incident that contains lines."""

    id: str
    label: FailureClass
    lines: tuple[str, ...]


def incidents(path: Path) -> list[Incident]:
    """The incidents of a file that contain lines."""
    rows = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    return [
        Incident(id=row["id"], label=FailureClass(row["class"]), lines=tuple(row["evidence"]))
        for row in rows
        if row["evidence"]
    ]


def diagnose_incident(incident: Incident) -> Diagnosis:
    """The diagnosis of an incident's lines alone."""
    data = "\n".join(incident.lines).encode()
    return diagnose_chunks([LogChunk(source=LogSource(name="log"), first_line=1, data=data)])


def score(answer: Diagnosis, label: FailureClass) -> Score:
    """Compare an answer with the label."""
    if answer.failure_class is FailureClass.UNKNOWN:
        open_ = {failure_class.label for missing in answer.next_evidence for failure_class in missing.distinguishes}
        return (
            Score.UNKNOWN_EVIDENCE_NAMED
            if label.label in open_ and len(open_) <= MOST_CLASSES
            else Score.UNKNOWN_LABEL_NOT_NAMED
        )
    if answer.failure_class.label is label.label:
        return Score.RIGHT
    return Score.CONFIDENTLY_WRONG if answer.confidence is Confidence.CERTAIN else Score.WRONG


def main() -> None:
    """Score every file, and print a row per class."""
    parser = argparse.ArgumentParser(prog="bench.diagnosis_score", description=__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--each", action="store_true", help="print a line for each incident that is not right")
    options = parser.parse_args()
    headline("diagnosis: incidents scored by their label")
    for path in options.files:
        _report(path, options.each)


def _report(path: Path, each: bool) -> None:
    found: dict[FailureClass, Counter[Score]] = {}
    total: Counter[Score] = Counter()
    known = incidents(path)
    for incident in known:
        answer = diagnose_incident(incident)
        verdict = score(answer, incident.label)
        found.setdefault(incident.label, Counter())[verdict] += 1
        total[verdict] += 1
        if each and verdict is not Score.RIGHT:
            say(
                f"{verdict}: {incident.id}: {incident.label} diagnosed as {answer.failure_class}"
                f" ({answer.confidence}), {answer.code}"
            )
    good = total[Score.RIGHT] + total[Score.UNKNOWN_EVIDENCE_NAMED]
    say(f"\n{path.name}: {len(known)} incidents with lines, {good} right or named ({good / max(1, len(known)):.0%})")
    rows = [_row(failure_class, found[failure_class]) for failure_class in sorted(found)]
    say(table(("class", "incidents", *Score), [*rows, _row("all", total)]))


def _row(name: str, counts: Counter[Score]) -> Sequence[str]:
    return (name, str(counts.total()), *(str(counts[each] or "") for each in Score))


if __name__ == "__main__":
    sys.exit(main())
