"""Ports that fail or become slower than their siblings, by streams of readings."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from holdfast.findings import Finding
from holdfast.host.rdma_counters import CounterReading
from holdfast.watch.monitor import MAX_REPORTS
from holdfast.watch.quiet_traffic import QUIET_S
from holdfast.watch.rdma_traffic import (
    CLEAN_S,
    REFERENCE_SAMPLES,
    SAMPLES,
    WINDOW_S,
    Traffic,
    bytes_s,
    changes,
    evidence,
    updated,
)

PORTS = [f"mlx5_{number}:1" for number in range(8)]
POLL_S = 5.0
GB_S = 20e9
"""What each port carries in a busy phase."""


class Stream:
    """Counters of eight ports that carry what a function of port and poll says."""

    def __init__(self, kinds: dict[str, str] | None = None) -> None:
        self.traffic = Traffic(kinds=kinds or dict.fromkeys(PORTS, "NDR"))
        first = {"port_xmit_data": 1 << 40, "port_xmit_wait": 7, "symbol_error": 3, "link_downed": 255}
        self.counters = {port: dict(first) for port in PORTS}
        self.polls = 0

    def run(
        self, polls: int, rate: Callable[[str, int], float], add: dict[str, dict[str, int]] | None = None
    ) -> list[Finding]:
        """Findings of some polls; `add` is added to counters in each of them."""
        found: list[Finding] = []
        for _ in range(polls):
            self.polls += 1
            for port, counters in self.counters.items():
                counters["port_xmit_data"] += int(rate(port, self.polls) * POLL_S / 4)
                for name, value in (add or {}).get(port, {}).items():
                    counters[name] += value
            ports = {port: dict(counters) for port, counters in self.counters.items()}
            self.traffic, new = updated(self.traffic, CounterReading(at_s=self.polls * POLL_S, ports=ports))
            found += [each.finding("node3") for each in new]
        return found


def busy(port: str, poll: int) -> float:
    return GB_S * random.Random(f"{port} {poll}").uniform(0.9, 1.1)


def slow(name: str, share: float) -> Callable[[str, int], float]:
    return lambda port, poll: busy(port, poll) * (share if port == name else 1.0)


CLEAN_POLLS, WINDOW_POLLS = round(CLEAN_S / POLL_S) + 1, round(WINDOW_S / POLL_S) + 1
LEARN = REFERENCE_SAMPLES + 2


def test_healthy_ports_in_changing_phases_are_not_named() -> None:
    stream = Stream()
    assert stream.run(LEARN, busy) == []
    assert stream.run(20, lambda port, poll: 0.0) == []
    assert stream.run(20, lambda port, poll: busy(port, poll) * 0.3) == []
    assert stream.run(200, lambda port, poll: busy(port, poll) * (poll % 3 > 0)) == []


def test_node_that_carries_nothing_for_ten_minutes_is_reported_once_each_time() -> None:
    stream, polls = Stream(), round(QUIET_S / POLL_S)
    assert stream.run(polls + 5, lambda port, poll: 0.0) == [], "it has carried nothing yet"
    for _ in range(2):
        stream.run(1, busy)
        assert stream.run(polls - 1, lambda port, poll: 100.0) == []
        assert [each.code for each in stream.run(polls, lambda port, poll: 100.0)] == ["traffic-stopped"]


def test_port_that_carries_less_than_its_siblings_is_named_once_with_its_counters() -> None:
    stream = Stream()
    stream.run(LEARN, busy)
    falling = {"mlx5_5:1": {"port_xmit_wait": 9_000_000, "symbol_error": 1}}
    assert stream.run(SAMPLES - 1, slow("mlx5_5:1", 0.4), falling) == []
    (found,) = stream.run(30, slow("mlx5_5:1", 0.4), falling)
    assert (found.code, found.where) == ("fabric-nic-slow", "node3, mlx5_5:1")
    assert "of its earlier 20" in found.what
    assert len(found.evidence) == 1
    assert "port_xmit_wait +" in found.evidence[0]


def test_port_that_recovers_may_be_named_again() -> None:
    stream = Stream()
    stream.run(LEARN, busy)
    assert len(stream.run(20, slow("mlx5_5:1", 0.4))) == 1
    assert stream.run(SAMPLES // 2 - 1, busy) == []
    assert len(stream.run(1, slow("mlx5_5:1", 0.4))) == 0
    stream.run(CLEAN_POLLS + SAMPLES, busy)
    assert [each.code for each in stream.run(20, slow("mlx5_5:1", 0.4))] == ["fabric-nic-slow"]


@pytest.mark.parametrize("share", [0.7, 0.95])
def test_small_fall_is_no_finding(share: float) -> None:
    stream = Stream()
    stream.run(LEARN, busy)
    assert stream.run(50, slow("mlx5_5:1", share)) == []


def test_single_slow_polls_are_no_finding() -> None:
    stream = Stream()
    stream.run(LEARN, busy)
    assert stream.run(60, lambda port, poll: slow("mlx5_5:1", 0.1 if poll % SAMPLES else 1.0)(port, poll)) == []


def test_port_of_another_kind_or_with_other_work_is_not_compared() -> None:
    stream = Stream(kinds=dict.fromkeys(PORTS, "NDR") | {"mlx5_0:1": "HDR"})

    def storage(name: str) -> Callable[[str, int], float]:
        return lambda port, poll: (1e9 if poll <= LEARN else 0.0) if port == name else busy(port, poll)

    assert stream.run(60, storage("mlx5_0:1")) == []
    assert Stream().run(60, storage("mlx5_0:1")) == []


def test_errors_that_grow_fast_are_a_finding_and_slow_ones_are_not() -> None:
    stream = Stream()
    assert stream.run(60, busy, {"mlx5_2:1": {"symbol_error": 1}}) == []
    (found,) = stream.run(30, busy, {"mlx5_2:1": {"symbol_error": 40}})
    assert (found.code, found.where) == ("fabric-link-errors", "node3, mlx5_2:1")


def test_errors_about_the_limit_are_one_finding_for_as_long_as_they_come() -> None:
    stream = Stream()
    found = [each for _ in range(60) for each in stream.run(1, busy, {"mlx5_2:1": {"symbol_error": 21}})]
    for _ in range(60):  # 21 errors in some minutes, none in others
        found += stream.run(1, busy, {"mlx5_2:1": {"symbol_error": 21}}) + stream.run(WINDOW_POLLS, busy)
    assert [each.code for each in found] == ["fabric-link-errors"]


def test_port_that_fails_again_and_again_has_a_limit() -> None:
    stream, found = Stream(), list[Finding]()
    stream.run(2, busy)
    for _ in range(2 * MAX_REPORTS):
        found += stream.run(1, busy, {"mlx5_2:1": {"symbol_error": 30}})
        found += stream.run(CLEAN_POLLS + WINDOW_POLLS, busy)
    assert len(found) == MAX_REPORTS


def test_words_are_four_bytes_and_the_busier_direction_counts() -> None:
    before = CounterReading(at_s=10.0, ports={"a": {"port_xmit_data": 0, "port_rcv_data": 7}, "e": {"tx_bytes": 0}})
    now = CounterReading(at_s=12.0, ports={"a": {"port_xmit_data": 500, "port_rcv_data": 8}, "e": {"tx_bytes": 500}})
    assert bytes_s(before, now) == {"a": 1000.0, "e": 250.0}


def test_counters_that_were_reset_have_grown_by_their_value() -> None:
    before = CounterReading(at_s=0.0, ports={"a": {"symbol_error": 90, "rp_cnp_handled": 3}})
    now = CounterReading(at_s=60.0, ports={"a": {"symbol_error": 5, "rp_cnp_handled": 3}, "b": {"symbol_error": 5}})
    assert changes(before, now) == {"a": {"symbol_error": 5}, "b": {}}
    assert evidence(before, now) == ("a in 60 s: symbol_error +5",)
