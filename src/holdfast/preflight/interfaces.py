"""The network interfaces of this node with their addresses, and which of them NCCL and Gloo choose."""

from __future__ import annotations

import ctypes
import os
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from ipaddress import IPv4Address, IPv6Address, ip_address

from msgspec import Struct

from holdfast.preflight.node_view import NotLookedAt

_IFF_RUNNING = 0x40
"""From linux/if.h: the interface is up and has a carrier. NCCL skips all others."""


class Interface(Struct, frozen=True, kw_only=True):
    """One network interface."""

    name: str
    running: bool = True
    """Up, with a carrier."""
    addresses: tuple[IPv4Address | IPv6Address, ...] = ()

    @property
    def usable(self) -> tuple[IPv4Address | IPv6Address, ...]:
        """The addresses that another node could reach: not those valid on one link only."""
        return tuple(each for each in self.addresses if not each.is_link_local)


ListInterfaces = Callable[[], Sequence[Interface]]
"""Lists the interfaces of the node; raises NotLookedAt if it cannot."""


class _Ifaddrs(ctypes.Structure):
    """`struct ifaddrs` of the C library."""


_Ifaddrs._fields_ = [
    ("next", ctypes.POINTER(_Ifaddrs)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.c_void_p),
    ("netmask", ctypes.c_void_p),
    ("destination", ctypes.c_void_p),
    ("data", ctypes.c_void_p),
]

_ADDRESS_AT: Mapping[int | None, tuple[int, int]] = {socket.AF_INET: (4, 4), socket.AF_INET6: (8, 16)}
"""Where a sockaddr of a family has its address: offset and size in bytes."""


def system_interfaces() -> tuple[Interface, ...]:
    """The interfaces of this process's network namespace, from getifaddrs.

    NCCL and Gloo call the same function. It needs no program in the image, and unlike /proc/net/fib_trie it says which
    interface has an address, also where a pod's address is a /32 without its own route.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    first = ctypes.POINTER(_Ifaddrs)()
    if libc.getifaddrs(ctypes.byref(first)) != 0:
        raise NotLookedAt(f"getifaddrs: {os.strerror(ctypes.get_errno())}")
    try:
        return _gathered(_entries(first))
    finally:
        libc.freeifaddrs(first)


def _entries(each: ctypes._Pointer[_Ifaddrs]) -> Iterator[Interface]:
    while each:
        entry = each.contents
        family = ctypes.c_ushort.from_address(entry.address).value if entry.address else None
        where = _ADDRESS_AT.get(family)
        found = (ip_address(ctypes.string_at(entry.address + where[0], where[1])),) if where else ()
        yield Interface(name=entry.name.decode(), running=bool(entry.flags & _IFF_RUNNING), addresses=found)
        each = entry.next


def _gathered(entries: Iterable[Interface]) -> tuple[Interface, ...]:
    """One interface per name, from an entry per address."""
    found: dict[str, Interface] = {}
    for entry in entries:
        before = found[entry.name].addresses if entry.name in found else ()
        found[entry.name] = Interface(name=entry.name, running=entry.running, addresses=(*before, *entry.addresses))
    return tuple(found.values())


def chosen_by_nccl(words: str, interfaces: Iterable[Interface]) -> Iterator[tuple[str, tuple[Interface, ...]]]:
    """Those that NCCL_SOCKET_IFNAME admits: `eth,ens` by prefix, `=eth0` by name, `^docker` all but these."""
    excluded = words.startswith("^")
    exact = words.removeprefix("^").startswith("=")
    names = tuple(name.partition(":")[0] for name in words.removeprefix("^").removeprefix("=").split(",") if name)

    def admits(each: Interface) -> bool:
        return (each.name in names if exact else each.name.startswith(names)) is not excluded

    yield words, tuple(each for each in interfaces if admits(each))


def named_exactly(words: str, interfaces: Iterable[Interface]) -> Iterator[tuple[str, tuple[Interface, ...]]]:
    """Those of a comma-separated list, each of which Gloo needs."""
    known = {each.name: each for each in interfaces}
    for name in words.split(","):
        yield name, (known[name],) if name in known else ()
