"""Patterns of NCCL's set-up lines, from 2.10 to 2.32, each under the line it matches.

Lines are quoted from public threads; the forms of every version are in the format tables from which the tests generate
logs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import TypeVar

from holdfast.diagnose.nccl_transport.transport_report import RECEIVE, Direction, LinkType, TransportKind
from holdfast.diagnose.pattern_scan import PatternScan, compile_scan

_T = TypeVar("_T")
MARK = b" NCCL INFO "
_CACHED_BYTES = 64
"""A longer number is not a rank, and hardly a link type."""
SWITCH = -1
"""The receiver of a connection to a switch that reduces (CollNet)."""

# [1,3]<stdout>:ip-10-0-0-1:35481:35549 [1] NCCL INFO …; launchers glue their own prefix to the host's name.
_WRITER = rb"(?<![^\s:\[\]<>|])([^\s:\[\]<>|/\\\"']{1,255}|<[^\s<>:]{1,64}>):(\d{1,10}):(\d{1,10}) \[-?\d{1,4}\]"
THREAD = re.compile(_WRITER + rb"\Z")
# n1:8:9 [0] misc/ibvwrap.cc:262 (wrap_ibv_reg_mr) NCCL WARN Call to ibv_reg_mr failed …; the function since 2.30
WARNING_BEGINS = b" NCCL WARN "
WARNING = re.compile(rb"(" + _WRITER + rb")(?: [^\s]{1,120})?(?: \([^()\n]{1,120}\))?\Z")
LIBRARY_BEGINS = b"libibverbs: Warning: "

# NCCL version 2.18.3+cuda12.1
VERSION_BEGINS = b"NCCL version "
VERSION = re.compile(VERSION_BEGINS + rb"(\d+\.\d+\.\d+)[^\s+]{0,32}\+cuda(\d+\.\d+)")

# HOLDFAST_REPLICA=1, as `env` or a job's script writes it
REPLICA_BEGINS = b"HOLDFAST_REPLICA="
REPLICA = re.compile(REPLICA_BEGINS + rb"['\"]?(\d{1,7})\b")


def rare_lines(data: bytes) -> Sequence[tuple[int, int]]:
    """Where rare lines, which also appear outside NCCL's messages, may be: which of them, and where their words end.

    One pass looks for all, in a sixth of the time that `find` takes for two of them.
    """
    found: list[tuple[int, int]] = []

    def note(which: int, _begin: int, end: int, _flags: int, _context: object) -> None:
        found.append((which, end))

    _rare_scan()(data, note)
    return found


HAS_VERSION, HAS_REPLICA, HAS_WARNING, HAS_LIBRARY = range(4)


@cache
def _rare_scan() -> PatternScan:
    return compile_scan([VERSION_BEGINS, REPLICA_BEGINS, WARNING_BEGINS, LIBRARY_BEGINS])


# What may follow a whole message: RCCL's ` comm 0x95cdeb0 nRanks 08`, Ray's ` [repeated 15x across cluster]`, colour
# codes, the end of a JSON string.
_REPEATED = rb"(?: comm \S{1,32} nRanks \d{1,7})?(?: \[repeated \d{1,7}x across cluster\][^\n]*)?"
_END = _REPEATED + rb"(?:\s|\x1b\[[0-9;]*[A-Za-z]|(?:\\[rn])+(?:\\u001b\[[0-9;]*m)*\"[^\n]*)*\Z"


CHANNEL_BYTES = len(b"Channel 00")
# What may stand between that and ` : `, as in `Channel 00/0 : `. The number is the connection's (0 collective, 1 point
# to point); up to 2.13, and for SHM, there is none; in the order of a ring it is how many channels there are.
ENDS = frozenset((b"", *(b"/%d" % number for number in range(65)), *(b"/%02d" % number for number in range(10))))

COLLECTIVE_ENDS = frozenset((b"/0", b"/00"))


@cache
def channels() -> Mapping[bytes, int]:
    """The bit of each channel by its name, such as `Channel 00`; NCCL has at most 64 channels."""
    return {b"%s %02d" % (kind, channel): 1 << channel for kind in (b"Channel", b"CollNet") for channel in range(64)}


# 12[1a000]: the busId in hex up to 2.18.1, the nvmlDev in decimal since; CollNet's lines name the rank alone
_RANK = re.compile(rb"(\d{1,7})(?:\[[0-9a-f]{1,16}\])?\Z")

# [send] via NET/AWS Libfabric/1(2)/GDRDMA/Shared
_NET = re.compile(
    rb"\[(send|receive)\] via (NET|COLLNET)/([^/\n]{1,64})/(\d{1,5})(?:\((\d{1,7})\))?"
    rb"(/GDRDMA)?((?:\(PCI\))?(?:/Shared)?)" + _END
)
# via P2P/direct pointer/read; via P2P/IPC/read; via P2P/indirect/3[2]
_P2P = re.compile(
    rb"via P2P/(direct pointer|IPC|CUMEM|MNNVL|indirect)((?:/\d+\[[0-9a-f]+\])?(?:/read)?(?:/CE)?)" + _END
)
# via direct shared memory; via SHM/direct/direct
_SHM = re.compile(rb"via (?:SHM/)?(direct shared memory|(?:direct|CE)(?:/(?:direct|CE))?)" + _END)
# Channel 00/02 :    0   1   3   2   6   4   5   7: the order of a ring, not a connection
_RING = re.compile(rb"[\s\d]*\Z")

# comm 0x557fe785f7a0 rank 36 nranks 64 cudaDev 4 nvmlDev 4 busId 9b000 commId 0x5ae77eb5ea4ec1ee - Init COMPLETE
INIT = re.compile(
    rb"(?:\[Rank \d+\] )?(?:nccl\w{1,40} )?comm (\S{1,32}) rank (\d{1,7}) nranks (\d{1,7}) cudaDev (\d{1,5})"
    rb"(?: nvmlDev (\d{1,5}))? busId ([0-9a-fA-F]{1,16})((?: \w{1,16} \S{1,32})*)(?: bytes)? ?- Init (START|COMPLETE)"
)
# … parent 0x5581 splitCount 1 color 0 key 3- Init START
EXTRA = re.compile(rb"(parent|color|splitCount|childCount|commId) ([^\s-]+|-\d+)")
# bootstrapSplit: comm 0x5591 parent 0x5581 rank 0 nranks 2 color 1 key 0 prev 1 next 1 - DONE
SPLIT = re.compile(rb"bootstrapSplit: (?:comm \S+ parent (\S+) )?rank (\d+) nranks (\d+) color (-?\d+) ")
# comm 0x55cd1a0bf930 rank 1 nRanks 2 nNodes 1 localRanks 2 localRank 1 MNNVL 0
COUNTS = re.compile(rb"comm (\S+) rank (\d+) nRanks (\d+) nNodes (\d+) ")

# NCCL_SOCKET_IFNAME set by environment to eth0; numbers end with a dot; NCCL_IB_HCA set to mlx5_0
ENV = re.compile(rb"(NCCL_[A-Z0-9_]{1,64}) set (?:by environment )?to ([^\n]{0,512}?)\.?" + _END)
# NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/RoCE [RO]; OOB eth0:10.0.0.1<0>
# [0]={[0] mlx5_0:1/IB, [1] mlx5_1:1/IB} is a merged device (2.20 to 2.23); from 2.30 :rail:plane may follow the port
HCA = re.compile(rb"([\w+.-]{1,64}):(\d{1,3})(?::-?\d*:-?\d*)?/(IB|RoCE)")
# NET/Socket : Using [0]enp3s0f0:10.2.64.94<0> [1]usb0:169.254.3.1<0>
SOCKET_USING = re.compile(rb"NET/Socket : Using((?: \[\d+\]\S+)+)" + _END)
INTERFACE = re.compile(rb"\[\d+\](\S+)")
# Bootstrap : Using eth0:10.0.0.1<0>; Bootstrap: Using [0]eth0:…
BOOTSTRAP = re.compile(rb"Bootstrap ?: Using ?(?:\[\d+\])?(\S{1,128})")
# NET/OFI Initializing aws-ofi-nccl 1.14.2; NET/OFI Using aws-ofi-nccl 1.4.0aws
OFI_PLUGIN = re.compile(rb"NET/OFI (?:Initializing|Using) (aws-ofi-nccl \S{1,32})")
# NET/OFI Selected Provider is efa (found 4 nics); NET/OFI Selected provider is efa, fabric is efa (found 32 nics)
OFI_NICS = re.compile(rb"NET/OFI Selected [Pp]rovider is [^(\n]{1,64}\(found (\d{1,4}) nics\)")
# NET/IB : GPU Direct RDMA Disabled for HCA 0 'mlx5_0'
GDR_HCA = re.compile(rb"NET/([^/\n:]{1,64}?) : GPU Direct RDMA (Enabled|Disabled) for HCA (\d{1,4}) '([^'\n]{0,64})'")
# Connected all rings, use ring PXN 0 GDR 1
RINGS = re.compile(rb"Connected all rings(?:, use ring PXN (\d) GDR (\d))?")
# Pattern 4, crossNic 0, nChannels 16, bw 30.0/30.0, type NVL/PIX, sameChannels 1
PATTERN = re.compile(rb"Pattern 4, [^\n]*type (\w{2,4})/\w{2,4}, sameChannels")
# Using network AWS Libfabric
NETWORK = re.compile(rb"Using network ([^\n]{1,64}?)" + _END)
DRIVER = re.compile(rb"cudaDriverVersion (\d{4,6})" + _END)


def parse_connection(text: bytes) -> tuple[int, int, LinkType, int] | None:
    """Sender, receiver, link type and reporting end, from the text after `Channel 00/0 : `; None if it is no
    connection.
    """
    # 12[4] -> 20[4] [send] via NET/IB/0, or for CollNet 12 [send] via COLLNET/SHARP/0
    parts = text.split(b" ", 3)
    if len(parts) == 4 and parts[1] == b"->":
        sender, receiver, joining = _RANKS[parts[0]], _RANKS[parts[2]], parts[3]
    else:
        first, _, joining = text.partition(b" ")
        sender, receiver = _RANKS[first], SWITCH
    if sender is None or receiver is None or (joined := _LINK_TYPES[joining]) is None:
        return None
    return sender, receiver, joined, receiver if joined.direction is RECEIVE and receiver != SWITCH else sender


def _rank(text: bytes) -> int | None:
    """The rank number of a connection; None where it is torn."""
    match = _RANK.match(text)
    return int(match[1]) if match else None


def _parse_link_type(text: bytes) -> LinkType | None:
    """The link type after the two ranks of a connection; None where it is torn."""
    if match := _NET.match(text):
        side, kind, name, nic, proxy, gdr, options = match.groups()
        return _link_type(
            TransportKind.NET if kind == b"NET" else TransportKind.COLLNET,
            to_text(name),
            to_text(options),
            Direction(to_text(side)),
            int(nic),
            int(proxy) if proxy else None,
            gdr is not None,
        )
    if match := _P2P.match(text):
        return _link_type(TransportKind.P2P, to_text(match[1]), to_text(match[2]))
    if match := _SHM.match(text):
        return _link_type(TransportKind.SHM, to_text(match[1]), "")
    return None


class _ParseCache(dict[bytes, _T]):
    """Caches the meaning of words, parsed on first use; a look-up costs a third of that in an `lru_cache`."""

    def __init__(self, parse: Callable[[bytes], _T], most: int) -> None:
        super().__init__()
        self._parse = parse
        self._most = most

    def __missing__(self, raw: bytes) -> _T:
        meant = self._parse(raw)
        if len(raw) <= _CACHED_BYTES and len(self) < self._most:
            self[raw] = meant
        return meant


_RANKS = _ParseCache(_rank, 1 << 16)
_LINK_TYPES = _ParseCache(_parse_link_type, 1 << 12)


def _link_type(
    kind: TransportKind,
    name: str,
    options: str,
    side: Direction = Direction.SEND,
    nic: int | None = None,
    proxy: int | None = None,
    gdr: bool = False,
) -> LinkType:
    route = f"{kind.value}/{name}{'/GDRDMA' if gdr else ''}"
    return LinkType(kind=kind, name=name, direction=side, nic=nic, proxy=proxy, gdr=gdr, options=options, route=route)


def is_ring(text: bytes) -> bool:
    """Whether the text after `Channel 00/02 : ` is the order of a ring."""
    return _RING.match(text) is not None


def to_text(raw: bytes) -> str:
    """Bytes of a log as text, whatever their encoding."""
    return raw.decode("utf-8", "replace")
