"""Chooses a network's subnets among those that no route of this machine covers."""

from __future__ import annotations

import fcntl
import json
import os
import time
import zlib
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from ipaddress import IPv4Network
from itertools import islice

from holdfast.errors import ExitCode, failure
from holdfast.findings import Owner
from holdfast.launch.local.netns import ip_command

_SIZE = 256

LOCK_TIMEOUT_S = 10.0
"""Longest time to wait for other runs that choose subnets; each takes some hundred milliseconds."""
LOCK_POLL_S = 0.02

# RFC 2544's range for benchmarks comes first: it is the private range least likely to be in use behind the default
# route, where this machine's routes would not show it.
_POOLS = (IPv4Network("198.18.0.0/15"), IPv4Network("10.0.0.0/8"), IPv4Network("172.16.0.0/12"))


@contextmanager
def subnet_lock() -> Generator[None]:
    """Keep other runs from choosing subnets until this run's are in the routing table.

    The lock is on the network namespace itself: it has the scope of the routing table and leaves no file behind. Any
    user of the machine can take it, so after LOCK_TIMEOUT_S this proceeds without the lock.
    """
    descriptor = os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        _lock(descriptor, time.monotonic() + LOCK_TIMEOUT_S)
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int, deadline: float) -> None:
    """Take the lock, or give up at the deadline (monotonic seconds)."""
    while time.monotonic() < deadline:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            time.sleep(LOCK_POLL_S)


def pick_free(count: int, tag: str) -> list[IPv4Network]:
    """Choose /24 subnets that no route covers; a hash of the tag sets where the search starts."""
    taken = _routed()
    start = zlib.crc32(tag.encode()) % (_POOLS[0].num_addresses // _SIZE)
    candidates = (subnet for subnet in _subnets(start) if not any(subnet.overlaps(other) for other in taken))
    chosen = list(islice(candidates, count))
    if len(chosen) == count:
        return chosen
    raise failure(
        "netns-no-free-subnet",
        f"no {count} free /24 subnets: this machine's routes cover every private range",
        exit_code=ExitCode.CANNOT_RUN_HERE,
        where=", ".join(str(pool) for pool in _POOLS),
        evidence=tuple(str(route) for route in taken),
        remedy="Use `isolation: process`, or remove a route; `ip route show table all` lists them.",
        owner=Owner.CLUSTER,
    )


def _subnets(start: int) -> Iterator[IPv4Network]:
    """Every /24 of the pools; `start` rotates each pool."""
    for pool in _POOLS:
        count = pool.num_addresses // _SIZE
        for index in range(count):
            yield IPv4Network((int(pool.network_address) + (start + index) % count * _SIZE, 24))


def _routed() -> list[IPv4Network]:
    listed = ip_command.run((ip_command.find("ip") or "ip", "-json", "-4", "route", "show", "table", "all"))
    destinations = {str(route["dst"]) for route in json.loads(listed or "[]")}
    return [IPv4Network(destination) for destination in sorted(destinations - {"default"})]
