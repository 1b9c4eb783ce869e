"""Which of two failures came first: each rule decides where those before it do not."""

from __future__ import annotations

import itertools
import math

import pytest
from msgspec.structs import replace

from holdfast.diagnose.failure_classes import Confidence
from holdfast.diagnose.precedence import Clocks, PeerSymptom, Suspect, explained_among, first_cause

HOSTS = Clocks(skew_s=5.0, report_lag_s=5.0)
RUN = Clocks(skew_s=0.0, report_lag_s=math.inf)
CRASH = Suspect(failure="crash", at=100.0, layer=4, confidence=Confidence.CERTAIN, ends_process=True)
CLOSED = replace(CRASH, failure="closed", ends_process=False, symptom=PeerSymptom.PEER)


@pytest.mark.parametrize(
    ("later", "clocks"),
    [
        (replace(CRASH, failure="slow", layer=0, slows_only=True), HOSTS),
        (replace(CRASH, failure="other rank", is_of_other_rank=True), HOSTS),
        (replace(CLOSED, layer=0), HOSTS),
        (replace(CLOSED, at=1.0), RUN),
        (replace(CRASH, failure="network", at=99.0, symptom=PeerSymptom.NETWORK), RUN),
        (replace(CRASH, failure="unsure", layer=0, confidence=Confidence.UNSURE), HOSTS),
        (replace(CRASH, failure="deep, but late", at=106.0, layer=0), HOSTS),
        (replace(CRASH, failure="shallow", layer=5), HOSTS),
        (replace(CRASH, failure="late", at=100.1), RUN),
        (replace(CRASH, failure="only seen to end", is_indirect=True), HOSTS),
        (replace(CRASH, failure="behind it in the sequence"), HOSTS),
    ],
    ids=lambda value: value.failure if isinstance(value, Suspect) else "",
)
def test_rule_decides_between_a_crash_and(later: Suspect[str], clocks: Clocks) -> None:
    sequences = [[CRASH, later]] if later.failure.startswith("behind") else [[CRASH, later], [later, CRASH]]
    for suspects in sequences:
        found = first_cause(suspects, clocks)
        assert found is not None
        assert found.failure == "crash"


def test_earlier_one_that_is_not_certain_gives_way_to_a_deeper_one() -> None:
    likely = replace(CRASH, confidence=Confidence.LIKELY)
    found = first_cause([replace(likely, failure="early", at=90.0, layer=5), likely], HOSTS)
    assert found is not None
    assert found.failure == "crash"


def test_earliest_of_several_certain_ones_came_first() -> None:
    between, earliest = (replace(CRASH, failure=str(at), at=at, layer=9 - int(at) // 20) for at in (60.0, 20.0))
    for order in itertools.permutations([CRASH, between, earliest]):
        found = first_cause(order, HOSTS)
        assert found is not None
        assert found.failure == "20.0"


def test_lost_peer_long_before_a_crash_is_no_symptom_of_it_on_clocks_of_hosts() -> None:
    early = replace(CLOSED, at=90.0)
    assert explained_among([CRASH, early], HOSTS) == []
    assert explained_among([CRASH, early], RUN) == [early]
    assert explained_among([CRASH, CLOSED], HOSTS) == [CLOSED]


def test_lines_of_one_source_without_times_are_ordered_by_their_numbers() -> None:
    first, second = (
        replace(CRASH, failure=str(line), at=None, line=("a.log", line), layer=4 - line) for line in (1, 2)
    )
    found = first_cause([second, replace(first, layer=2)], HOSTS)
    assert found is not None
    assert found.failure == "1"


def test_nothing_suspected_is_no_cause() -> None:
    assert first_cause([], RUN) is None
