"""Which failures are said to be a drill's, where it filled a disk."""

from __future__ import annotations

import pytest

from holdfast.events import FaultInjected, RecoveryDecided
from holdfast.findings import Finding
from holdfast.job import fault_attribution

FULL = "OSError: [Errno 28] No space left on device"


def _behind(target: str, finding: Finding, *, later_s: float = 60.0) -> FaultInjected | None:
    drill = FaultInjected(at=1000.0, node=-1, requested_at=999.0, target=target, action="fill")
    at = 1000.0 + later_s
    decided = RecoveryDecided(
        at=at, replica=0, attempt=0, action="restart in place", failed_at=at, finding=finding, first_failed_rank=1
    )
    return fault_attribution.injected_cause((drill,), decided)


@pytest.mark.parametrize(
    ("target", "finding"),
    [
        ("run-dir", Finding(code="disk-full", what="rank 1 on node1 ended because a disk is full")),
        ("run-dir", Finding(code="rank-crashed", what="rank 1 on node1 ended with code 120")),
        ("run-dir", Finding(code="failure-cause-unknown", what="attempt 2 ended, and the log does not say why")),
        ("run-dir", Finding(code="rank-crashed", what="rank 1 on node1 ended with code 1", evidence=(FULL,))),
        ("checkpoints", Finding(code="rank-crashed", what="rank 1 on node1 ended with code 1", evidence=(FULL,))),
    ],
)
def test_failure_after_a_disk_was_filled_is_the_drills(target: str, finding: Finding) -> None:
    assert _behind(target, finding) is not None


@pytest.mark.parametrize(
    ("target", "finding", "later_s"),
    [
        (
            "run-dir",
            Finding(code="rank-crashed", what="ended with code 1", evidence=("KeyError: 'x'",)),
            60.0,
        ),
        ("run-dir", Finding(code="rank-killed", what="rank 1 on node1 was killed by SIGKILL"), 60.0),
        ("checkpoints", Finding(code="rank-crashed", what="rank 1 on node1 ended with code 1"), 60.0),
        ("run-dir", Finding(code="rank-crashed", what="rank 1 on node1 ended with code 120"), 7200.0),
    ],
)
def test_failure_that_a_full_disk_does_not_explain_is_nobodys_drill(
    target: str, finding: Finding, later_s: float
) -> None:
    assert _behind(target, finding, later_s=later_s) is None
