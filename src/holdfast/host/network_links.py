"""Which network interfaces have a link, and when that changes."""

from __future__ import annotations

import array
import fcntl
import socket
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path

from msgspec import Struct

_SIOCGIFFLAGS, _SIOCGIFCONF = 0x8913, 0x8912
_IFF_LOOPBACK, _IFF_RUNNING = 0x8, 0x40
_RTMGRP_LINK = 0x1
_IFREQ = "16s24s"
_MAX_ADDRESSES = 256

# struct nlmsghdr, ifinfomsg and rtattr of linux/netlink.h and linux/rtnetlink.h
_HEADER, _LINK, _ATTRIBUTE = struct.Struct("=IHHII"), struct.Struct("=BxHiII"), struct.Struct("=HH")
_RTM_NEWLINK, _RTM_DELLINK, _IFLA_IFNAME = 16, 17, 3


class LinkReading(Struct, frozen=True, kw_only=True):
    """The interfaces other than loopback at one time."""

    links: Mapping[str, bool]
    """Whether each has a link, by name."""
    lost: frozenset[str] = frozenset()
    """Those that lost their link since the last reading, whether or not it is back."""


class NetworkLinks:
    """The interfaces of this network namespace; rtnetlink wakes who waits for a change."""

    def __init__(self) -> None:
        """Raises OSError where there is no rtnetlink."""
        self._control = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._changes = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_NONBLOCK, socket.NETLINK_ROUTE)
        self._changes.bind((0, _RTMGRP_LINK))
        self._known: dict[str, bool] = {}

    def descriptor(self) -> int:
        """What becomes readable when a link changes."""
        return self._changes.fileno()

    def read(self, at_s: float = 0.0) -> LinkReading:
        """The interfaces now."""
        lost = set(self._changed())
        links = dict(self._links())
        lost |= {name for name, had_link in self._known.items() if had_link and not links.get(name, False)}
        self._known = dict(links)
        return LinkReading(links=links, lost=frozenset(lost))

    def _links(self) -> Iterator[tuple[str, bool]]:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(self._control, _SIOCGIFFLAGS, struct.pack(_IFREQ, name.encode(), b""))
            except OSError:  # it has just gone
                continue
            (flags,) = struct.unpack_from("H", answer, 16)
            if not flags & _IFF_LOOPBACK:
                yield name, bool(flags & _IFF_RUNNING)

    def _changed(self) -> Iterator[str]:
        """The interfaces that lost their link, by the messages since the last reading."""
        while True:
            try:
                messages = self._changes.recv(1 << 16)
            except OSError:  # none is left, or some were lost: the interfaces themselves are read next
                return
            for name, has_link in parse_link_messages(messages):
                if self._known.get(name, False) and not has_link:
                    yield name
                self._known[name] = has_link

    def close(self) -> None:
        """Close both sockets."""
        self._control.close()
        self._changes.close()


def parse_link_messages(data: bytes) -> Iterator[tuple[str, bool]]:
    """Each message's interface, and whether it has a link."""
    while len(data) >= _HEADER.size + _LINK.size:
        length, kind, _, _, _ = _HEADER.unpack_from(data)
        if length < _HEADER.size:
            return
        if kind in (_RTM_NEWLINK, _RTM_DELLINK):
            flags = _LINK.unpack_from(data, _HEADER.size)[3]
            yield _name(data[_HEADER.size + _LINK.size : length]), kind == _RTM_NEWLINK and bool(flags & _IFF_RUNNING)
        data = data[_aligned(length) :]


def _name(attributes: bytes) -> str:
    while len(attributes) >= _ATTRIBUTE.size:
        length, kind = _ATTRIBUTE.unpack_from(attributes)
        if kind == _IFLA_IFNAME:
            return attributes[_ATTRIBUTE.size : length].rstrip(b"\0").decode()
        attributes = attributes[max(_aligned(length), _ATTRIBUTE.size) :]
    return ""


def _aligned(length: int) -> int:
    return (length + 3) & ~3


def interface_with(address: str) -> str:
    """The interface that has this IPv4 address; empty if there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        buffer = array.array("B", bytes(struct.calcsize(_IFREQ) * _MAX_ADDRESSES))
        where, size = buffer.buffer_info()
        answer = fcntl.ioctl(control, _SIOCGIFCONF, struct.pack("iL", size, where))
        (used,) = struct.unpack_from("i", answer)
    entries = struct.iter_unpack(_IFREQ, buffer.tobytes()[:used])
    found = {socket.inet_ntoa(rest[4:8]): name.rstrip(b"\0").decode() for name, rest in entries}
    return found.get(address, "")


def is_hardware(interface: str, root: Path = Path("/")) -> bool:
    """Whether an interface is a device's, and not one that the kernel or a container made."""
    return (root / "sys/class/net" / interface / "device").exists()
