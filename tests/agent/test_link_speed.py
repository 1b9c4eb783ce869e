"""A connection that stays slow is distinguished from one that is noisy, idle, waited for, or sends small messages."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator

import pytest
from msgspec.structs import replace

from holdfast.agent.link_speed import MIN_FIRST_SAMPLES, SLOW_SHARE, WINDOW, LinkSpeed, lost_to_newer, updated
from holdfast.host.tcp_sockets import TcpCounters

GB_S = 1e9
FAST = 1.0
"""In GB/s; a sample of 0.1 s."""


def stream(rates_gb_s: Iterable[float], *, busy_s: float = 0.1) -> Iterator[TcpCounters]:
    """The counters after each interval in which the connection was busy at such a rate."""
    now = TcpCounters()
    for rate in rates_gb_s:
        now = replace(
            now,
            acked_bytes=now.acked_bytes + int(rate * GB_S * busy_s),
            busy_us=now.busy_us + int(busy_s * 1e6),
            segments=now.segments + 1000,
            retransmits=now.retransmits + (30 if rate < FAST / 2 else 0),
        )
        yield now


def watched(looks: Iterable[TcpCounters], first: int = 1) -> list[LinkSpeed]:
    link = LinkSpeed(since=TcpCounters())
    return [link := updated(link, counters, look) for look, counters in enumerate(looks, first)]


def slow_at(links: list[LinkSpeed]) -> list[int]:
    return [number for number, link in enumerate(links) if link.is_slow]


def test_lasting_fall_is_found_and_shows_its_figures() -> None:
    links = watched(stream([FAST] * 20 + [0.5 * FAST] * 20))
    assert slow_at(links)[0] == 20 + WINDOW - 1
    last = links[-1]
    assert (last.reference_bytes_s, last.bytes_s) == (FAST * GB_S, 0.5 * FAST * GB_S)
    assert sum(sample.segments for sample in last.recent) == 1000 * WINDOW


def test_fall_to_newer_connections_is_none_of_the_link() -> None:
    old = watched(stream([FAST] * 20 + [0.2 * FAST] * 20))[-1]
    newer = [watched(stream([0.2 * FAST] * 20), first=21)[-1]] * 4
    assert old.is_slow
    assert lost_to_newer(old, [old, *newer])
    as_old = watched(stream([FAST] * 40))[-1]
    assert not lost_to_newer(old, [old, as_old, watched([TcpCounters()])[-1]])
    assert not lost_to_newer(old, [old, *newer[:1]])
    idle_since = watched(stream([FAST] * 4), first=21)[-1]
    assert not lost_to_newer(old, [old, idle_since])


def test_small_fall_and_short_ones_are_none() -> None:
    assert slow_at(watched(stream([FAST] * 20 + [(SLOW_SHARE + 0.05) * FAST] * 50))) == []
    assert slow_at(watched(stream(([FAST] * 10 + [0.1 * FAST] * (WINDOW - 1)) * 10))) == []


def test_connection_that_is_fast_again_is_no_longer_slow() -> None:
    links = watched(stream([FAST] * 10 + [0.1 * FAST] * 10 + [FAST] * 10))
    assert slow_at(links)[-1] <= 20 + WINDOW / 2
    assert not links[-1].is_slow
    # Between the two shares it stays what it was.
    assert watched(stream([FAST] * 10 + [0.1 * FAST] * 10 + [0.7 * FAST] * 20))[-1].is_slow


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_noise_is_no_fall(seed: int) -> None:
    chance = random.Random(seed)
    # A busy machine: half of the rate in one sample of five, and any within a factor of two.
    rates = [chance.uniform(0.7, 1.4) * (0.5 if chance.random() < 0.2 else 1.0) for _ in range(5000)]
    assert slow_at(watched(stream(rates))) == []
    assert slow_at(watched(stream([*rates, *(0.25 * rate for rate in rates[:50])]))) != []


def test_pause_is_no_fall() -> None:
    first = list(stream([FAST] * 10))
    small = replace(first[-1], acked_bytes=first[-1].acked_bytes + 1000, busy_us=first[-1].busy_us + 15_000)
    links = watched([*first, *[first[-1]] * 100, *[small] * 100])
    assert slow_at(links) == []
    assert len(links[-1].recent) == WINDOW


def test_time_in_which_the_peer_did_not_read_does_not_count() -> None:
    looks = list(stream([FAST] * 40))
    late = [replace(each, busy_us=10 * each.busy_us, peer_limited_us=9 * each.busy_us) for each in looks]
    assert watched(late)[-1].bytes_s == pytest.approx(FAST * GB_S)
    assert slow_at(watched(late)) == []


def test_small_messages_of_another_phase_are_no_fall() -> None:
    looks = list(stream([FAST] * 10 + [0.1 * FAST] * 30))
    links = watched([*looks[:10], *(replace(each, app_limited=True) for each in looks[10:])])
    assert slow_at(links) == []


def test_connection_over_which_nothing_arrives_is_slow() -> None:
    (*_, last) = stream([FAST] * 10)
    dead = [replace(last, busy_us=last.busy_us + number * 500_000) for number in range(1, 20)]
    links = watched([*stream([FAST] * 10), *dead])
    assert links[-1].is_slow
    assert links[-1].bytes_s == 0.0


def test_reference_is_that_of_the_first_samples() -> None:
    links = watched(stream([0.4 * FAST] * 30))
    assert [link.reference_bytes_s > 0 for link in links].index(True) == MIN_FIRST_SAMPLES - 1
    assert links[-1].reference_bytes_s == 0.4 * GB_S
    assert slow_at(links) == []


def test_program_that_sends_little_does_not_show_what_the_network_can_do() -> None:
    looks = list(stream([FAST] * 10))
    assert watched(looks)[-1].is_limited_by_network
    assert not watched([replace(each, app_limited=True) for each in looks])[-1].is_limited_by_network
