"""InfiniBand links of a node as both of their ends see them, so that a bad cable is named with its switch port."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from statistics import median_low

from msgspec import Struct

from holdfast.findings import Finding, Owner, Severity
from holdfast.host.daemon_threads import in_daemon_thread
from holdfast.preflight.checks.roce import evidence_lines
from holdfast.preflight.node_view import NodeView, NotLookedAt
from holdfast.preflight.rdma_devices import Port, judged_ports, uses_verbs
from holdfast.preflight.subnet_links import Link, LinkEnd, read_link

LIMITS = {
    "SymbolErrorCounter": 100,
    "PortRcvErrors": 100,
    "LinkErrorRecoveryCounter": 10,
    "LinkDownedCounter": 10,
}
"""Errors since somebody has cleared the counters; ten times the default of ibqueryerrors where training a link errs."""
TIMES_SIBLINGS = 10
"""Each reboot of the node counts on all of its links: one is bad if it has so many times the errors of the others."""

MAX_PORTS_AT_ONCE = 8
"""Ports that are queried side by side: six short programs for each."""


class _Quantity(Struct, frozen=True, kw_only=True):
    """What two ends of a link agree on when they train it."""

    name: str
    unit: str
    used: Callable[[LinkEnd], float]
    enabled: Callable[[LinkEnd], frozenset[float]]
    supported: Callable[[LinkEnd], frozenset[float]]

    def possible(self, link: Link) -> float:
        """The best that both ends support and at least one of them enables; 0 if they do not tell."""
        both = self.supported(link.own) & self.supported(link.other)
        return max(both & (self.enabled(link.own) | self.enabled(link.other)), default=0.0)

    def restricted(self, link: Link) -> str:
        """The end whose setting forbids the best; empty if both ends allow it, so that it is the cable."""
        best = self.possible(link)
        ends = ((link.switch_port, link.other), (link.port.name, link.own))
        return next((name for name, end in ends if best not in self.enabled(end)), "")


_WIDTH = _Quantity(
    name="width",
    unit="X",
    used=lambda end: end.width,
    enabled=lambda end: end.widths_enabled,
    supported=lambda end: end.widths_supported,
)
_SPEED = _Quantity(
    name="speed",
    unit=" Gbit/s a lane",
    used=lambda end: end.speed,
    enabled=lambda end: end.speeds_enabled,
    supported=lambda end: end.speeds_supported,
)


def rdma_links(view: NodeView) -> Iterator[Finding]:
    """InfiniBand: each link is as wide and fast as both ends allow, active at both ends, and without many errors."""
    if not uses_verbs(view.wanted):
        return
    ports = [port for port in judged_ports(view).ports if port.is_infiniband and port.phys_state.endswith("LinkUp")]
    links = _links(view, ports)
    for quantity in (_WIDTH, _SPEED):
        yield from _degraded(links, quantity)
    yield from _inactive(links)
    yield from _erring(links)


def _links(view: NodeView, ports: Sequence[Port]) -> list[Link]:
    """The links of the ports that answer at both ends; raises NotLookedAt if none does."""
    links: list[Link] = []
    reasons: list[Exception] = []
    for first in range(0, len(ports), MAX_PORTS_AT_ONCE):
        asked = [in_daemon_thread(partial(read_link, view, port)) for port in ports[first : first + MAX_PORTS_AT_ONCE]]
        for answer in asked:
            try:
                links.append(answer.result())
            except (NotLookedAt, TimeoutError) as error:
                reasons.append(error)
    if reasons and not links:
        raise NotLookedAt(str(reasons[0]))
    return links


def _degraded(links: Sequence[Link], quantity: _Quantity) -> Iterator[Finding]:
    slow = [link for link in links if quantity.used(link.own) < quantity.possible(link)]
    if quantity is _SPEED and len(slow) == len(links) > 1:
        return  # all cables are of an older generation than adapters and switches
    for link in slow:
        restricted = quantity.restricted(link)
        used, best = (f"{each:g}{quantity.unit}" for each in (quantity.used(link.own), quantity.possible(link)))
        why = f"because {restricted} does not enable more" if restricted else "although both ends enable more"
        yield Finding(
            code="rdma-link-degraded",
            severity=Severity.WARNING,
            what=f"the link from {link.port.name} to {link.switch_port} has a {quantity.name} of {used} instead of "
            f"{best}, {why}",
            where=f"{link.port.name}, {link.switch_port}",
            evidence=(f"{link.port.name}: {link.own.rate}", f"{link.switch_port}: {link.other.rate}"),
            remedy=f"Correct the setting of {restricted} (`ibportstate`, or the switch's configuration)."
            if restricted
            else "Clean, reseat or replace this cable; if it stays so, try another switch port, then the adapter.",
            owner=Owner.CLUSTER,
        )


def _inactive(links: Sequence[Link]) -> Iterator[Finding]:
    for link in links:
        if link.own.state == "Active" and link.other.state not in ("Active", "Armed"):
            yield Finding(
                code="rdma-link-one-sided",
                severity=Severity.WARNING,
                what=f"{link.port.name} is active, and {link.switch_port} at the other end of its link is in state "
                f"{link.other.state}",
                where=f"{link.port.name}, {link.switch_port}",
                evidence=(f"{link.port.name}: {link.own.state}", f"{link.switch_port}: {link.other.state}"),
                remedy="Reset the link: `ibportstate` on the switch port; then see the subnet manager's log.",
                owner=Owner.CLUSTER,
            )


def _erring(links: Sequence[Link]) -> Iterator[Finding]:
    own, other = {link.port.name: link.own for link in links}, {link.port.name: link.other for link in links}
    for link in links:
        found = [
            f"{place}: {counter} {count}"
            for place, ends in ((link.port.name, own), (link.switch_port, other))
            for counter, count in ends[link.port.name].counters.items()
            if _is_many(counter, count, _of_siblings(ends, link.port.name, counter))
        ]
        if found:
            yield Finding(
                code="rdma-link-errors",
                severity=Severity.WARNING,
                what=f"the link from {link.port.name} to {link.switch_port} has many errors: {found[0]}",
                where=f"{link.port.name}, {link.switch_port}",
                evidence=evidence_lines(found),
                remedy="See whether they still grow: `ibqueryerrors -k` clears them. If so, clean, reseat or replace "
                "this cable.",
                owner=Owner.CLUSTER,
            )


def _of_siblings(ends: Mapping[str, LinkEnd], name: str, counter: str) -> list[int]:
    return [end.counters[counter] for of_port, end in ends.items() if of_port != name and counter in end.counters]


def _is_many(counter: str, count: int, siblings: Sequence[int]) -> bool:
    return count > LIMITS[counter] and (not siblings or count > TIMES_SIBLINGS * median_low(siblings))
