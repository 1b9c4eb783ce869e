"""Judges the RDMA ports of a node by readings of their counters: a link that fails, or one slower than its siblings.

Pure. Collectives give each port the same work, so that a port is compared with its own earlier rate and with what the
other ports of its kind do at the same time: a pause, or another phase of the job, changes all of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from statistics import median

from holdfast.findings import Finding, Owner, Severity
from holdfast.host.rdma_counters import EFA_RECEIVED, EFA_SENT, RECEIVED, SENT, WORD_BYTES, CounterReading

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
MAX_REPORTS = 8
"""Findings on one port while the agent runs."""
_DATA = (SENT, RECEIVED, EFA_SENT, EFA_RECEIVED)


@dataclass(frozen=True, kw_only=True, slots=True)
class PortTraffic:
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """What is remembered of a node."""

    kinds: Mapping[str, str] = field(default_factory=dict[str, str])
    """Of each port: ports of the same kind are siblings."""
    readings: tuple[CounterReading, ...] = ()
    """Those of WINDOW_S, oldest first."""
    ports: Mapping[str, PortTraffic] = field(default_factory=dict[str, PortTraffic])
    reported: Mapping[tuple[str, str], float] = field(default_factory=dict[tuple[str, str], float])
    """Code and port of what was reported: when it went on last, in monotonic seconds."""
    reports: Mapping[str, int] = field(default_factory=dict[str, int])
    """Findings so far, by port."""


def updated(traffic: Traffic, reading: CounterReading, where: str) -> tuple[Traffic, tuple[Finding, ...]]:
    """The node after a reading, and what is new; `where` is its name."""
    kept = tuple(each for each in traffic.readings if each.at_s >= reading.at_s - WINDOW_S)
    rates = bytes_s(kept[-1], reading) if kept else {}
    ports = _with_rates(traffic, rates)
    traffic = replace(traffic, readings=(*kept, reading), ports=ports)
    found = dict(_judged(traffic, rates, where))
    recent = {key: at_s for key, at_s in traffic.reported.items() if reading.at_s - at_s < CLEAN_S}
    new: list[Finding] = []
    reports = Counter(traffic.reports)
    for (code, port), finding in found.items():
        if (code, port) not in recent and reports[port] < MAX_REPORTS:
            reports[port] += 1
            new.append(finding)
    reported = recent | dict.fromkeys(found, reading.at_s)
    return replace(traffic, reported=reported, reports=reports), tuple(new)


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


def _judged(traffic: Traffic, rates: Mapping[str, float], where: str) -> Iterator[tuple[tuple[str, str], Finding]]:
    """All that goes on, by code and port."""
    oldest, latest = traffic.readings[0], traffic.readings[-1]
    for port, grown in changes(oldest, latest).items():
        lines = evidence(oldest, latest, [port])
        if grown.get("link_downed"):
            times = grown["link_downed"]
            yield _finding(
                "fabric-link-down",
                port,
                where,
                f"the link of {port} went down {'once' if times == 1 else f'{times} times'} while the job runs",
                lines,
                "Look at this port's cable, transceiver and switch port: `holdfast check --nodes`, `dmesg`. NCCL ends "
                "with an error if the link stays down for longer than its timeout.",
            )
        if (errors := sum(grown.get(name, 0) for name in ERRORS)) >= MIN_ERRORS:
            yield _finding(
                "fabric-link-errors",
                port,
                where,
                f"{port} had {errors:,} errors of its link within {latest.at_s - oldest.at_s:.0f} s",
                lines,
                "Clean, reseat or replace the cable or transceiver of this port; see the switch port's counters too.",
            )
        if (state := traffic.ports.get(port)) and state.is_slow:
            siblings = state.recent[-1][1]
            yield _finding(
                "fabric-nic-slow",
                port,
                where,
                f"{port} carries {rates.get(port, 0.0) / 1e9:.3g} GB/s, {state.recent[-1][0]:.0%} of its earlier "
                f"{state.reference / 1e9:.3g} GB/s, while its siblings keep {siblings:.0%} of theirs",
                lines or (f"{port}: no counter of errors or congestion has changed",),
                "Its counters tell a bad cable (symbol_error, link_error_recovery) from congestion (port_xmit_wait, "
                "rp_cnp_handled, pauses) and loss (out_of_sequence, local_ack_timeout_err).",
            )


def _finding(
    code: str, port: str, where: str, what: str, lines: tuple[str, ...], remedy: str
) -> tuple[tuple[str, str], Finding]:
    finding = Finding(
        code=code,
        severity=Severity.WARNING,
        what=what,
        where=f"{where}, {port}",
        evidence=lines,
        remedy=remedy,
        owner=Owner.CLUSTER,
    )
    return (code, port), finding
