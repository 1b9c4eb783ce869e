"""Decides whether a connection has become slow for good, from the kernel's counters of it. Pure.

The rate is that of the time in which there was data to send and the peer had room for it. So neither a pause, such as
an evaluation, nor a peer that is late counts as a slow network.
"""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median

from msgspec import Struct
from msgspec.structs import replace

from holdfast.diagnose.tcp_pairs import SLOW_SHARE
from holdfast.host.tcp_sockets import TcpCounters

MIN_FIRST_SAMPLES, MAX_FIRST_SAMPLES = 8, 40
"""The reference is the median of so many first samples."""
RECOVERED_SHARE = 0.8
"""Half of the latest samples above this share end a fall."""
WINDOW = 8
"""Latest samples, all of which are slow in a lasting fall."""

_MIN_BUSY_US, _MIN_BYTES, _MAX_BUSY_US = 20_000, 1 << 20, 500_000
"""A sample has at least this much, or was busy for so long: the kernel counts time in ticks of 1 to 10 ms, and the time
of small messages is the network's latency."""


class RateSample(Struct, frozen=True, kw_only=True):
    """What a connection did in one interval."""

    bytes_s: float
    """While it had data to send."""
    app_limited: bool
    """Whether the program sent too little to reach the network's rate: then the sample is not slow."""
    segments: int
    retransmits: int
    look: int
    """The number of the look that ended it."""


class LinkSpeed(Struct, frozen=True, kw_only=True):
    """What is remembered of one connection."""

    since: TcpCounters
    """The counters at the start of the current sample."""
    first: tuple[float, ...] = ()
    """Rates of the first samples, in bytes/s."""
    reference_bytes_s: float = 0.0
    """0 until it is known."""
    recent: tuple[RateSample, ...] = ()
    """The latest samples, oldest first."""
    is_slow: bool = False
    began: int = 0
    """The look that ended the first sample; 0 before it."""

    @property
    def is_limited_by_network(self) -> bool:
        """Whether the program sent enough to reach the network's rate in most of the latest samples."""
        return 2 * sum(sample.app_limited for sample in self.recent) < len(self.recent)

    @property
    def bytes_s(self) -> float:
        """The rate now; 0 before the first sample."""
        return median(sample.bytes_s for sample in self.recent) if self.recent else 0.0


def updated(link: LinkSpeed, counters: TcpCounters, look: int) -> LinkSpeed:
    """The connection after a look at its counters; looks are numbered from 1."""
    sample = _sample(link.since, counters, look)
    if sample is None:
        return link
    link = replace(link, since=counters, began=link.began or look, recent=(*link.recent, sample)[-WINDOW:])
    if len(link.first) < MAX_FIRST_SAMPLES and not (link.is_slow or _is_slow_sample(link, sample)):
        first = (*link.first, sample.bytes_s)
        reference = median(first) if len(first) >= MIN_FIRST_SAMPLES else 0.0
        link = replace(link, first=first, reference_bytes_s=reference)
    return replace(link, is_slow=_is_slow(link))


def lost_to_newer(link: LinkSpeed, others: Iterable[LinkSpeed]) -> bool:
    """Whether newer connections have what a slow one has lost: `others` are those over the same interface.

    Another phase of the job may use more connections together. Those that began about when the link did were there
    when its reference was taken.
    """
    newer = sum(
        each.bytes_s
        for each in others
        if each.began > link.began + MIN_FIRST_SAMPLES // 2 and each.recent[-1].look >= link.recent[0].look
    )
    return link.bytes_s + newer >= SLOW_SHARE * link.reference_bytes_s


def _is_slow(link: LinkSpeed) -> bool:
    if link.is_slow:
        return 2 * sum(each.bytes_s > RECOVERED_SHARE * link.reference_bytes_s for each in link.recent) < WINDOW
    return len(link.recent) == WINDOW and all(_is_slow_sample(link, each) for each in link.recent)


def _is_slow_sample(link: LinkSpeed, sample: RateSample) -> bool:
    return sample.bytes_s < SLOW_SHARE * link.reference_bytes_s and not sample.app_limited


def _sample(before: TcpCounters, now: TcpCounters, look: int) -> RateSample | None:
    """None if the connection has done too little since."""
    sent = now.acked_bytes - before.acked_bytes
    busy_us = now.busy_us - now.peer_limited_us - (before.busy_us - before.peer_limited_us)
    if busy_us < _MIN_BUSY_US or (sent < _MIN_BYTES and busy_us < _MAX_BUSY_US):
        return None
    return RateSample(
        bytes_s=sent / busy_us * 1e6,
        app_limited=now.app_limited,
        segments=now.segments - before.segments,
        retransmits=now.retransmits - before.retransmits,
        look=look,
    )
