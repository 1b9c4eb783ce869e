"""Which checkpoints expire."""

from __future__ import annotations

import pytest

from holdfast.train.checkpoint.retention_policy import RetentionPolicy


@pytest.mark.parametrize(
    ("policy", "agreed_step", "expired"),
    [
        (RetentionPolicy(keep=2), None, [10, 20, 30]),
        (RetentionPolicy(keep=2, keep_every_steps=20), None, [10, 30]),
        (RetentionPolicy(keep=2), 30, [10, 20]),
        (RetentionPolicy(keep=2), 29, [10, 30]),
        (RetentionPolicy(keep=2), 50, [10, 20, 30]),
        (RetentionPolicy(keep=2), 9, [10, 20, 30]),
    ],
)
def test_newest_permanent_and_agreed_checkpoints_are_kept(
    policy: RetentionPolicy, agreed_step: int | None, expired: list[int]
) -> None:
    assert policy.expired([30, 10, 50, 20, 40], agreed_step) == expired
