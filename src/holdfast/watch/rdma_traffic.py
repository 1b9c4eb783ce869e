"""Judges the RDMA ports of a node by readings of their counters: a link with errors, or one slower than its siblings.

Pure. Collectives give each port the same work, so that a port is compared with its own earlier rate and with what the
other ports of its kind do at the same time: a pause, or another phase of the job, changes all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from statistics import median

from msgspec import Struct, field
from msgspec.structs import replace

from holdfast.host.rdma_counters import EFA_RECEIVED, EFA_SENT, RECEIVED, SENT, WORD_BYTES, CounterReading
from holdfast.watch import quiet_traffic
from holdfast.watch.monitor import Episodes, Symptom
from holdfast.watch.monitor import updated as with_symptoms
from holdfast.watch.quiet_traffic import QuietTraffic

WINDOW_S = 60.0
"""Of readings that are kept."""
MIN_ERRORS = 20
"""Errors in WINDOW_S: ten times what the InfiniBand specification tolerates, 120 symbol errors in an hour."""
ERRORS = ("symbol_error", "port_rcv_errors", "link_error_recovery")
BUSY_BYTES_S = 100e6
"""The median port carries at least this in a sample that counts."""
REFERENCE_SAMPLES = 12
"""A port's reference is the median of so many first busy samples."""
ALIKE = 2.0
"""Ports whose references differ more than so many times from the median do other work, such as storage."""
MIN_SIBLINGS = 2
SLOW_SHARE, KEPT_SHARE = 0.6, 0.8
"""Of its reference: a slow port is below the first while its siblings' median is above the second."""
SAMPLES = 6
"""Latest busy samples, all of which are slow in a lasting fall; half of them end it."""
CLEAN_S = 600.0
"""A finding on a port is reported again only after so long without its cause: errors near a limit come and go."""
_DATA = (SENT, RECEIVED, EFA_SENT, EFA_RECEIVED)


class PortTraffic(Struct, frozen=True, kw_only=True):
    """What is remembered of one port."""

    first: tuple[float, ...] = ()
    """Rates of its first busy samples, in bytes/s."""
    recent: tuple[tuple[float, float], ...] = ()
    """Of its latest busy samples: its share of its reference, and the median share of its siblings."""
    is_slow: bool = False

    @property
    def reference(self) -> float:
        """Its earlier busy rate in bytes/s; 0 until it is known."""
        return median(self.first) if len(self.first) == REFERENCE_SAMPLES else 0.0


class Traffic(Struct, frozen=True, kw_only=True):
    """What is remembered of a node."""

    kinds: Mapping[str, str] = field(default_factory=dict[str, str])
    """Of each port: ports of the same kind are siblings."""
    readings: tuple[CounterReading, ...] = ()
    """Those of WINDOW_S, oldest first."""
    ports: Mapping[str, PortTraffic] = field(default_factory=dict[str, PortTraffic])
    episodes: Episodes = field(default_factory=Episodes)
    quiet: QuietTraffic = field(default_factory=QuietTraffic)


def updated(traffic: Traffic, reading: CounterReading) -> tuple[Traffic, tuple[Symptom, ...]]:
    """The node after a reading, and what is new."""
    kept = tuple(each for each in traffic.readings if each.at_s >= reading.at_s - WINDOW_S)
    rates = bytes_s(kept[-1], reading) if kept else {}
    ports = _with_rates(traffic, rates)
    traffic = replace(traffic, readings=(*kept, reading), ports=ports)
    episodes, new = with_symptoms(traffic.episodes, _judged(traffic, rates), reading.at_s)
    quiet, stopped = quiet_traffic.updated(traffic.quiet, sum(rates.values()), reading.at_s)
    if stopped:
        new = (*new, quiet_traffic.symptom("RDMA"))
    return replace(traffic, episodes=episodes, quiet=quiet), new


def changes(before: CounterReading, now: CounterReading) -> dict[str, dict[str, int]]:
    """By how much each counter of each port has grown; one that was reset has grown by its value."""
    return {
        port: {
            name: grown
            for name, value in counters.items()
            if (earlier := before.ports.get(port, {}).get(name)) is not None
            and (grown := value - earlier if value >= earlier else value)
        }
        for port, counters in now.ports.items()
    }


def bytes_s(before: CounterReading, now: CounterReading) -> dict[str, float]:
    """What each port has carried, in the direction in which it carried more."""
    elapsed_s = max(now.at_s - before.at_s, 1e-9)
    return {
        port: max(
            *(WORD_BYTES * grown.get(name, 0) for name in (SENT, RECEIVED)),
            *(grown.get(name, 0) for name in (EFA_SENT, EFA_RECEIVED)),
        )
        / elapsed_s
        for port, grown in changes(before, now).items()
    }


def evidence(before: CounterReading, now: CounterReading, ports: Iterable[str] = ()) -> tuple[str, ...]:
    """A line for each port whose counters other than those of data have changed; for these ports only, if any."""
    named, grown = set(ports), changes(before, now)
    seconds = now.at_s - before.at_s
    lines = {
        port: ", ".join(f"{name} +{value:,}" for name, value in grown[port].items() if name not in _DATA)
        for port in grown
        if not named or port in named
    }
    return tuple(f"{port} in {seconds:.0f} s: {line}" for port, line in lines.items() if line)


def _with_rates(traffic: Traffic, rates: Mapping[str, float]) -> Mapping[str, PortTraffic]:
    ports = {port: traffic.ports.get(port, PortTraffic()) for port in rates}
    for kind in {traffic.kinds.get(port, "") for port in ports}:
        group = {port: rate for port, rate in rates.items() if traffic.kinds.get(port, "") == kind}
        if median(group.values()) < BUSY_BYTES_S:
            continue
        for port, rate in group.items():
            if not ports[port].reference:
                ports[port] = replace(ports[port], first=(*ports[port].first, rate))
        alike = _alike({port: ports[port].reference for port in group})
        shares = {port: rates[port] / ports[port].reference for port in alike}
        for port, share in shares.items():
            siblings = [each for other, each in shares.items() if other != port]
            if len(siblings) >= MIN_SIBLINGS:
                recent = (*ports[port].recent, (share, median(siblings)))[-SAMPLES:]
                ports[port] = replace(ports[port], recent=recent)
                ports[port] = replace(ports[port], is_slow=_is_slow(ports[port]))
    return ports


def _alike(references: Mapping[str, float]) -> list[str]:
    known = [each for each in references.values() if each]
    middle = median(known) if known else 0.0
    return [port for port, each in references.items() if each and middle / ALIKE <= each <= middle * ALIKE]


def _is_slow(port: PortTraffic) -> bool:
    if port.is_slow:
        good = sum(share >= KEPT_SHARE * siblings for share, siblings in port.recent)
        return 2 * good < SAMPLES
    fallen = [share < SLOW_SHARE and siblings >= KEPT_SHARE for share, siblings in port.recent]
    return len(fallen) == SAMPLES and all(fallen)


def _judged(traffic: Traffic, rates: Mapping[str, float]) -> Iterator[Symptom]:
    """All current problems."""
    oldest, latest = traffic.readings[0], traffic.readings[-1]
    for port, grown in changes(oldest, latest).items():
        if (errors := sum(grown.get(name, 0) for name in ERRORS)) >= MIN_ERRORS:
            yield Symptom(
                code="fabric-link-errors",
                device=port,
                what=f"{port} had {errors:,} errors of its link within {latest.at_s - oldest.at_s:.0f} s",
                evidence=partial(evidence, oldest, latest, [port]),
                remedy="Clean, reseat or replace the cable or transceiver of this port; see the switch port's counters "
                "too.",
                clear_s=CLEAN_S,
            )
        if (state := traffic.ports.get(port)) and state.is_slow:
            siblings = state.recent[-1][1]
            yield Symptom(
                code="fabric-nic-slow",
                device=port,
                what=f"{port} carries {rates.get(port, 0.0) / 1e9:.3g} GB/s, {state.recent[-1][0]:.0%} of its earlier "
                f"{state.reference / 1e9:.3g} GB/s, while its siblings keep {siblings:.0%} of theirs",
                evidence=partial(_evidence_of_slowness, oldest, latest, port),
                remedy="Its counters tell a bad cable (symbol_error, link_error_recovery) from congestion "
                "(port_xmit_wait, rp_cnp_handled, pauses) and loss (out_of_sequence, local_ack_timeout_err).",
                clear_s=CLEAN_S,
            )


def _evidence_of_slowness(oldest: CounterReading, latest: CounterReading, port: str) -> tuple[str, ...]:
    return evidence(oldest, latest, [port]) or (f"{port}: no counter of errors or congestion has changed",)
