"""Which replicas differ, and whether a majority can give its state."""

from __future__ import annotations

import pytest

from holdfast.findings import Severity
from holdfast.train.ft.divergence import compare, restored, unresolved


def test_equal_digests_are_no_divergence():
    assert compare(100, [{0: 7, 1: 7}, {0: -8, 1: -8}]) is None


@pytest.mark.parametrize(
    ("votes", "outliers", "has_majority"),
    [
        ([{0: 7, 1: 7, 2: 8}], {2: [0]}, True),
        ([{0: 7, 1: 7, 2: 7}, {0: 5, 1: 6, 2: 6}], {0: [1]}, True),
        ([{0: 1, 1: 7, 2: 7}, {0: 7, 1: 7, 2: 1}], {0: [0], 2: [1]}, True),
        ([{0: 7, 2: 8}], {2: [0]}, False),
        ([{0: 1, 1: 2, 2: 3}], {1: [0], 2: [0]}, False),
        ([{0: 1, 1: 1, 2: 2, 3: 2}], {2: [0], 3: [0]}, False),
        ([{0: 1, 1: 7, 2: 7}, {0: 7, 1: 1, 2: 7}, {0: 7, 1: 7, 2: 1}], {0: [0], 1: [1], 2: [2]}, False),
    ],
)
def test_outliers_are_those_without_the_majority_on_some_rank(votes, outliers, has_majority):
    diverged = compare(100, votes)
    assert diverged is not None
    assert (diverged.outliers, diverged.has_majority) == (outliers, has_majority)


def test_findings_name_the_rank_the_step_and_both_digests():
    diverged = compare(100, [{0: 7, 1: 7, 2: 7}, {0: 5, 1: -1, 2: 5}])
    assert diverged is not None
    finding = restored(diverged, 1)
    assert (finding.severity, finding.where) == (Severity.WARNING, "rank 1 of replica 1")
    assert finding.evidence == (
        "rank 1: replica 0 has digest 0000000000000005, replica 1 has digest ffffffffffffffff, "
        "replica 2 has digest 0000000000000005",
    )
    ended = unresolved(diverged, 90)
    assert ended.severity is Severity.ERROR
    assert "after step 100" in ended.what
    assert "after step 90" in ended.evidence[0]
