"""Real incidents from public threads, diagnosed from their lines alone: no worse than before, never sure and wrong."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from bench.diagnosis import Score, diagnosed, incidents, score

from holdfast.diagnose.rules import RULES

FOLDER = Path(__file__).parents[1] / "incidents"

AT_LEAST = {"public.jsonl": (20, 29)}
"""How many are right, and how many right or unknown with the deciding fact, as measured."""


@pytest.mark.parametrize("name", AT_LEAST)
def test_incidents_are_diagnosed_as_well_as_before(name: str) -> None:
    found = Counter(score(diagnosed(incident), incident.label) for incident in incidents(FOLDER / name))
    right, good = AT_LEAST[name]
    assert found[Score.CONFIDENT] == 0
    assert found[Score.RIGHT] >= right
    assert found[Score.RIGHT] + found[Score.NAMED] >= good


def test_every_collection_is_scored() -> None:
    assert {path.name for path in FOLDER.glob("*.jsonl")} == set(AT_LEAST)


def test_no_rule_is_a_line_of_the_collection() -> None:
    lines = {line for path in FOLDER.glob("*.jsonl") for incident in incidents(path) for line in incident.lines}
    for rule in RULES.values():
        assert not {line for line in lines if " " in line} & {rule.pattern, *rule.lines}, rule.code
