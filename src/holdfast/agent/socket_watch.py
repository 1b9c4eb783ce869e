"""Watches the TCP sockets of the ranks on one node: which interfaces they use, and how fast each connection is.

A look at all sockets takes 0.3 ms and 10 µs per socket. It searches the ranks' descriptors only for sockets that it
has not seen before.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from heapq import nlargest, nsmallest
from ipaddress import ip_address

from holdfast.agent.data_sockets import (
    NodeAddresses,
    RankSocket,
    carried_bytes,
    ends_of,
    is_near,
    public_ports,
    report_limit,
    sample,
    to_other_nodes,
)
from holdfast.agent.link_speed import LinkSpeed, lost_to_newer, updated
from holdfast.agent.tcp_traffic import TcpTraffic
from holdfast.clock import Clock
from holdfast.diagnose.tcp_pairs import DATA_BYTES
from holdfast.events import LinkRate, LinkSlowed, LinksMeasured, SocketsObserved, TrafficStopped
from holdfast.fabric.catalog import LOCAL_DEFAULT
from holdfast.host.daemon_threads import in_daemon_thread
from holdfast.host.processes import descendants, open_sockets
from holdfast.host.tcp_sockets import TcpSocket, tcp_sockets
from holdfast.preflight.interfaces import ListInterfaces, system_interfaces
from holdfast.preflight.node_view import NotLookedAt
from holdfast.protocol.orders import StartRanks
from holdfast.watch import quiet_traffic
from holdfast.watch.quiet_traffic import QuietTraffic

Message = SocketsObserved | LinksMeasured | LinkSlowed | TrafficStopped

log = logging.getLogger("holdfast.agent")

START_POLL_S, EARLY_POLL_S, POLL_S = 0.1, 0.5, 1.0
"""Seconds between two looks until the ranks have connected, in the seconds after, and later."""
START_FOR_S, EARLY_FOR_S = 300.0, 10.0
"""Seconds after which these begin at the latest."""
START_LOAD, LOAD = 0.02, 0.004
"""Shares of one core that looking may take until the ranks have connected, and later."""
MAX_REPORTS = 4
"""Reports of one attempt: groups may connect later, or again."""
REPORT_AT_BYTES = tuple(DATA_BYTES << doublings for doublings in (0, 2, 5, 8, 9))
"""What connections over interfaces that the run does not name have carried when they are reported once more."""
MAX_NODES = 1024
"""Nodes of an attempt that report, the first ones: they speak for all, and the run's log has room for them."""
MAX_SLOW_LINKS = 4
"""Connections of one attempt that are reported as slow, over one interface to near or to far addresses: a slow storage
takes no places of the other ranks."""
RATES_AFTER = 4
"""Looks from the first known rate of a connection until all are reported."""
MAX_RATES = 16
"""Connections whose rates in the first steps are reported, if as many are in a report."""
MAX_FAILURES = 5
"""Looks in a row that fail, after which no more follow."""
_MAX_TRIES = 3
"""Looks after which a socket that no rank has open is another program's."""
_MAX_LISTED, _MAX_ADDRESSES = 8, 64
_NAMING = "_SOCKET_IFNAME"
"""The end of the variables that name interfaces."""


def spans_nodes(order: StartRanks) -> bool:
    """Whether ranks exchange data with other machines by TCP, as far as the order tells."""
    return _nodes(order) > 1 and order.fabric == LOCAL_DEFAULT and not _is_loopback(order.env.get("MASTER_ADDR", ""))


def _nodes(order: StartRanks) -> int:
    return int(order.env.get("GROUP_WORLD_SIZE", "1"))


class _Owners:
    """Which rank has a socket open, by inode."""

    def __init__(self, pids: Callable[[], Mapping[int, int]]) -> None:
        self._pids = pids
        self._ranks: dict[int, int] = {}
        self._tries = Counter[int]()

    def of(self, sockets: Sequence[TcpSocket]) -> list[RankSocket]:
        """The sockets that belong to ranks; reads the descriptors of processes only if there are new ones."""
        present = {each.inode for each in sockets}
        self._ranks = {inode: rank for inode, rank in self._ranks.items() if inode in present}
        self._tries = Counter({inode: tries for inode, tries in self._tries.items() if inode in present})
        unknown = [each for each in present - self._ranks.keys() if self._tries[each] < _MAX_TRIES]
        if unknown:
            self._tries.update(unknown)
            self._search({f"socket:[{inode}]": inode for inode in unknown})
        return [RankSocket(self._ranks[each.inode], each) for each in sockets if each.inode in self._ranks]

    def _search(self, names: dict[str, int]) -> None:
        pids = self._pids()
        for rank, pid in pids.items():
            self._claim(rank, pid, names)
        for rank, pid in pids.items():
            for child in descendants(pid) if names else ():
                self._claim(rank, child, names)

    def _claim(self, rank: int, pid: int, names: dict[str, int]) -> None:
        for name in names.keys() & open_sockets(pid):
            self._ranks[names.pop(name)] = rank


class SocketWatch:
    """The sockets of one attempt's ranks on this node."""

    def __init__(
        self,
        order: StartRanks,
        *,
        node: int,
        clock: Clock,
        pids: Callable[[], Mapping[int, int]],
        environ: Mapping[str, str],
        send: Callable[[Message], object],
        steps: Callable[[], int],
        sockets: Callable[[], Sequence[TcpSocket]] = tcp_sockets,
        interfaces: ListInterfaces = system_interfaces,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """`pids` returns the pid of each running rank, `steps` how many steps this node has finished."""
        self._sockets, self._interfaces = sockets, interfaces
        self._order, self._node, self._clock = order, node, clock
        self._environ, self._send, self._steps = environ, send, steps
        reports = int(environ.get("GROUP_RANK", "0")) < MAX_NODES
        self._limit = report_limit(_nodes(order)) if reports else 0
        """Connections in a report; 0 if this node sends none."""
        self._owners = _Owners(pids)
        self._links: dict[int, LinkSpeed] = {}
        """By inode."""
        self._slow: set[int] = set()
        """Connections reported as slow."""
        self._slow_links = Counter[tuple[str, bool]]()
        """How many, by interface and whether they are near."""
        self._looks = 0
        self._measured = 0
        """Looks at which the rate of a connection in its first steps was known."""
        self._traffic = TcpTraffic()
        self._quiet = QuietTraffic()
        self._monotonic = monotonic
        self._looked_at = monotonic()
        self._addresses = NodeAddresses(interfaces={})
        self._host_name = ""
        """As reports have it; set when another interface than the run's is first seen."""
        self._unknown: frozenset[bytes] = frozenset()
        """Local addresses that no interface had when the interfaces were last read."""
        self._seen: tuple[int, ...] = ()
        """The inodes of the latest look."""
        self._reported: list[tuple[int, ...]] = []
        """Those of each report, other than by REPORT_AT_BYTES."""
        self._sizes = 0
        """How many of REPORT_AT_BYTES the latest report had reached."""
        self._public: frozenset[int] = frozenset()
        """Ports at which a server has listened at all addresses, in this attempt."""
        self._unsent: list[Message] = []
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Watch until `stop`, if the run's nodes exchange data by TCP."""
        if spans_nodes(self._order):
            self._task = asyncio.ensure_future(self.run())
            self._task.add_done_callback(_log_failure)

    def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def step_metrics(self) -> dict[str, float]:
        """What has been measured per step since the last call; empty if nothing is new."""
        return self._traffic.take()

    async def run(self) -> None:
        """Look until cancelled, or until the kernel does not tell."""
        poll_s, load, until = START_POLL_S, START_LOAD, time.monotonic() + START_FOR_S
        failures = 0
        while True:
            try:
                settled, messages, took_s = await asyncio.wrap_future(in_daemon_thread(self._look))
            except (OSError, NotLookedAt) as error:
                failures += 1
                if not self._looks or failures == MAX_FAILURES:
                    log.warning("the sockets of the ranks are not watched: %s", error)
                    return
                await asyncio.sleep(poll_s)
                continue
            failures = 0
            for message in messages:
                self._send(message)
            if poll_s == START_POLL_S and settled:
                poll_s, load, until = EARLY_POLL_S, LOAD, time.monotonic() + EARLY_FOR_S
            elif time.monotonic() >= until:
                poll_s, load = POLL_S, LOAD
            await asyncio.sleep(max(poll_s, took_s / load))

    def look(self) -> None:
        """Look once."""
        _, messages, _ = self._look()
        for message in messages:
            self._send(message)

    def _look(self) -> tuple[bool, list[Message], float]:
        """Whether the connections have settled, what is to be sent, and the CPU seconds that this took."""
        began = time.thread_time()
        data = self._find()
        self._looks += 1
        settled = self._report(data)
        self._measure(data)
        messages, self._unsent = self._unsent, []
        return settled, messages, time.thread_time() - began

    def _find(self) -> list[RankSocket]:
        """The ranks' sockets to other nodes."""
        sockets = self._sockets()
        local = frozenset(each.local.address for each in sockets if not each.listening and not each.local.is_loopback)
        if not self._addresses.interfaces or local - self._addresses.interfaces.keys() - self._unknown:
            self._addresses = NodeAddresses.of(self._interfaces(), self._order.interfaces)
            self._unknown = local - self._addresses.interfaces.keys()
        store = {int(self._order.env.get("MASTER_PORT", "0"))}
        self._public |= public_ports(sockets)
        data = self._owners.of([*to_other_nodes(sockets, self._addresses.interfaces, store, self._public)])
        if not self._host_name and any(self._addresses.is_other(each.socket) for each in data):
            self._host_name = _host_name(self._addresses)
        return data

    def _report(self, data: Sequence[RankSocket]) -> bool:
        """Report the first connections immediately, and others when they no longer change; return whether they do not.

        Those that carry data over another interface are reported again.
        """
        seen, before = tuple(sorted(each.socket.inode for each in data)), self._seen
        self._seen = seen
        settled = bool(seen) and seen == before
        new = seen and self._limit and seen not in self._reported[-1:]
        due = bool(new and (settled or not self._reported) and len(self._reported) < MAX_REPORTS)
        carried = sum(carried_bytes(each.socket) for each in data if self._addresses.is_other(each.socket))
        sizes = sum(carried >= size for size in REPORT_AT_BYTES)
        if due:
            self._reported.append(seen)
        if due or (self._reported and sizes > self._sizes):
            self._sizes = max(sizes, self._sizes)
            self._unsent.append(self._observed(data))
        return settled

    def _observed(self, data: Sequence[RankSocket]) -> SocketsObserved:
        addresses = self._addresses
        other = sorted({addresses.interface(each.socket) for each in data if addresses.is_other(each.socket)})
        return SocketsObserved(
            at=self._clock(),
            node=self._node,
            replica=self._order.replica,
            attempt=self._order.attempt,
            promised=addresses.promised[:_MAX_LISTED],
            other_interfaces=tuple(other[:_MAX_LISTED]),
            connections=sample(data, addresses, self._limit),
            promised_bytes=sum(carried_bytes(each.socket) for each in data if not addresses.is_other(each.socket)),
            count=len(data),
            addresses={str(ip_address(one)): name for one, name in [*addresses.interfaces.items()][:_MAX_ADDRESSES]},
            variables={name: value for name, value in self._environ.items() if name.endswith(_NAMING)},
            host_name=self._host_name,
        )

    def _measure(self, data: Sequence[RankSocket]) -> None:
        """Update the rate of each connection; report those that have become slow."""
        links: dict[int, LinkSpeed] = {}
        for each in data:
            counters, known = each.socket.counters, self._links.get(each.socket.inode)
            links[each.socket.inode] = updated(known, counters, self._looks) if known else LinkSpeed(since=counters)
        self._links = links
        for each in data:
            link, name = links[each.socket.inode], self._addresses.interface(each.socket)
            place = name, is_near(each.socket)
            if not link.is_slow or each.socket.inode in self._slow or self._slow_links[place] == MAX_SLOW_LINKS:
                continue
            others = (links[one.socket.inode] for one in data if self._addresses.interface(one.socket) == name)
            if not lost_to_newer(link, others):
                self._slow.add(each.socket.inode)
                self._slow_links[place] += 1
                self._unsent.append(self._slowed(each, link, data))
        self._report_rates(data)
        self._watch_traffic(self._traffic.add(data, self._addresses, self._steps()))

    def _watch_traffic(self, carried_bytes: int) -> None:
        """Report once when the ranks no longer exchange data."""
        now = self._monotonic()
        elapsed_s, self._looked_at = now - self._looked_at, now
        self._quiet, stopped = quiet_traffic.updated(self._quiet, carried_bytes / max(elapsed_s, 1e-9), now)
        if stopped:
            finding = quiet_traffic.symptom("TCP").finding(f"node{self._node}")
            self._unsent.append(TrafficStopped(at=self._clock(), node=self._node, finding=finding))

    def _report_rates(self, data: Sequence[RankSocket]) -> None:
        """Report the rates of the first steps once, some looks after the first of them is known."""
        known = [each for each in data if self._links[each.socket.inode].reference_bytes_s]
        self._measured += bool(known)
        if self._measured != RATES_AFTER or not known:
            return
        slowest = nsmallest(min(MAX_RATES, self._limit), self._rates(data), key=lambda one: one[0])
        if slowest:
            self._unsent.append(
                LinksMeasured(
                    at=self._clock(),
                    node=self._node,
                    replica=self._order.replica,
                    attempt=self._order.attempt,
                    links=tuple(
                        LinkRate(ends=ends_of(each, self._addresses), bytes_s=int(rate)) for rate, each in slowest
                    ),
                )
            )

    def _rates(self, data: Sequence[RankSocket]) -> Iterator[tuple[float, RankSocket]]:
        """The rate to each address over each interface, of all connections together, with the slowest of them."""
        groups: dict[tuple[str, bytes], list[RankSocket]] = {}
        for each in data:
            groups.setdefault((self._addresses.interface(each.socket), each.socket.remote.address), []).append(each)
        for group in groups.values():
            links = {each: self._links[each.socket.inode] for each in group}
            limited = {
                each: link.reference_bytes_s
                for each, link in links.items()
                if link.reference_bytes_s and link.is_limited_by_network
            }
            if limited:
                rate = sum(link.reference_bytes_s or link.bytes_s for link in links.values())
                yield rate, min(limited, key=limited.__getitem__)

    def _slowed(self, slow: RankSocket, link: LinkSpeed, data: Sequence[RankSocket]) -> LinkSlowed:
        others = [(self._links[each.socket.inode].bytes_s, each) for each in data if each is not slow]
        fastest = nlargest(_MAX_LISTED, others, key=lambda one: one[0])
        return LinkSlowed(
            at=self._clock(),
            node=self._node,
            replica=self._order.replica,
            attempt=self._order.attempt,
            ends=ends_of(slow, self._addresses),
            before_bytes_s=int(link.reference_bytes_s),
            now_bytes_s=int(link.bytes_s),
            retransmits=sum(each.retransmits for each in link.recent),
            segments=sum(each.segments for each in link.recent),
            others_bytes_s={str(each.socket.remote): int(rate) for rate, each in fastest if rate},
        )


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("the sockets of the ranks are no longer watched: %r", error)


def _host_name(addresses: NodeAddresses) -> str:
    """This node's name with the interface of its first address, as Gloo looks it up; it may ask a name server."""
    name = socket.gethostname()
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):  # a label of more than 63 characters is no name of a host
        return f"{name} (no address)"
    first = str(found[0][4][0]) if found else ""
    interface = next((each for address, each in addresses.interfaces.items() if str(ip_address(address)) == first), "")
    return f"{name} ({interface or first})"


def _is_loopback(address: str) -> bool:
    try:
        return ip_address(address).is_loopback
    except ValueError:
        return address in ("", "localhost")
