"""Rate limits of a node's messages and of log lines, with a test clock."""

from __future__ import annotations

import logging

import pytest
from msgspec.structs import replace

from holdfast.security.api_limits import LIMITS, NodeRateLimiter
from holdfast.security.log_rate_limit import LogRateLimit

TIGHT = replace(LIMITS, node_bytes_per_s=100.0, node_burst_bytes=1000.0, message_cost_bytes=10)


def test_node_may_send_its_burst_then_waits_for_its_rate() -> None:
    bucket = NodeRateLimiter(TIGHT)
    assert [bucket.take(90, 5.0) for _ in range(10)] == [0.0] * 10
    assert bucket.take(90, 5.0) == pytest.approx(1.0)
    assert bucket.take(90, 6.0) == pytest.approx(1.0)
    assert bucket.take(40, 7.5) == 0.0


def test_rest_fills_no_more_than_the_burst() -> None:
    bucket = NodeRateLimiter(TIGHT)
    bucket.take(0, 0.0)
    assert [bucket.take(90, 1e6) for _ in range(10)] == [0.0] * 10
    assert bucket.take(90, 1e6) > 0


def test_empty_messages_cost_too() -> None:
    bucket = NodeRateLimiter(TIGHT)
    assert sum(bucket.take(0, 0.0) > 0 for _ in range(101)) == 1


def test_log_is_told_the_same_so_often_and_the_rest_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    log = logging.getLogger("test-sparing")
    log.addFilter(spare := LogRateLimit(3, clock=lambda: now[0]))
    try:
        for minute in range(2):
            now[0] = 60.0 * minute
            for number in range(10):
                log.warning("refused %s", number)
            log.warning("something else")
    finally:
        log.removeFilter(spare)
    assert [record.getMessage() for record in caplog.records] == [
        *("refused 0", "refused 1", "refused 2", "something else"),
        *("refused 0 (and 7 more of this kind before)", "refused 1", "refused 2", "something else"),
    ]
