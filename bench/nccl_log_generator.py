"""Generates NCCL set-up logs: any version from 2.10 to 2.32, any size, any fabric, with their expected contents.

The wording comes only from nccl_formats.tsv, which was extracted from NCCL's sources independently of the parser. The
order and the thread of each line follow NCCL. Connections are those of rings and trees over nodes of GPUs, so that a
log has the volume of a real one.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cache, cached_property
from pathlib import Path

from msgspec import Struct, field

FORMATS = Path(__file__).with_name("nccl_formats.tsv")
_LENGTHS = re.compile(r"%(0?\d*(?:\.\d+)?)(?:ll|l|z|h)?([diuxXsfp])")


class Version(Struct, frozen=True, order=True):
    """A version of NCCL, by its numbers."""

    numbers: tuple[int, ...]

    def __str__(self) -> str:
        """As NCCL prints it."""
        return ".".join(map(str, self.numbers))

    @staticmethod
    def of(text: str) -> Version:
        """From `2.18.3`, with or without a suffix."""
        return Version(tuple(map(int, text.rstrip("+?").split("."))))


@cache
def versions() -> tuple[Version, ...]:
    """Every version with known formats, oldest first."""
    names = re.search(r"Versions: ([\d. ]+)", FORMATS.read_text())
    assert names
    return tuple(map(Version.of, names[1].split()))


@cache
def formats(line: str, version: Version) -> tuple[str, ...]:
    """The formats of a line in a version, ready for Python's `%`; none where the version does not have the line."""
    return tuple(text for name, first, last, text in _rows() if name == line and first <= version <= last)


@cache
def _rows() -> tuple[tuple[str, Version, Version, str], ...]:
    rows = (row.split("\t") for row in FORMATS.read_text().splitlines() if not row.startswith("#"))
    return tuple(
        (
            name,
            Version.of(first),
            versions()[-1] if last.endswith(("+", "?")) else Version.of(last),
            _LENGTHS.sub(lambda part: "0x%x" if part[2] == "p" else f"%{part[1]}{part[2]}", text),
        )
        for name, first, last, text in rows
    )


Truth = tuple[int, int, str, str, str, int | None, int | None, bool]
"""Sender, receiver, side, kind, name, NIC, proxy, GPUDirect: one connection, as reported by one end."""


class ExpectedCommunicator(Struct, kw_only=True):
    """The true contents of a communicator."""

    members: dict[int, tuple[str, int]]
    """Host and pid of each rank."""
    links: dict[Truth, int] = field(default_factory=lambda: defaultdict[Truth, int](int))
    """Connections, with a bit for each channel."""


class Job(Struct, frozen=True, kw_only=True, dict=True):
    """A job whose ranks set NCCL up."""

    version: Version
    nodes: int = 2
    gpus: int = 8
    channels: int = 4
    nics: int = 4
    network: str = "IB"
    """NCCL's name for it: IB, IBext_v8, AWS Libfabric, FasTrak, Socket, …"""
    layer: str = "IB"
    gdr: bool = True
    pxn: bool = False
    within: str = "CUMEM"
    """How GPUs of a node are connected: CUMEM, IPC, direct pointer, indirect, SHM."""
    collnet: bool = False
    replicas: int = 1
    """Besides the world communicator, one for each of this many equal parts, and one across the parts for each rank."""
    split: bool = False
    """Whether the others are split off the first."""
    env: tuple[tuple[str, str], ...] = (("NCCL_SOCKET_IFNAME", "eth0"),)
    timestamps: bool = False
    filler: int = 0
    """Lines of other kinds for each rank and communicator."""

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return self.nodes * self.gpus

    @cached_property
    def groups(self) -> list[range]:
        """The world ranks of each communicator, in order of creation."""
        world = range(self.ranks)
        if self.replicas == 1:
            return [world]
        part = self.ranks // self.replicas
        inside = [world[begin : begin + part] for begin in range(0, self.ranks, part)]
        return [world, *inside, *(world[first::part] for first in range(part))]

    def host(self, rank: int) -> str:
        """The host of a rank."""
        return f"worker-{rank // self.gpus:04d}"

    def pid(self, rank: int) -> int:
        """The process of a rank."""
        return 41000 + rank % self.gpus

    def truth(self) -> list[ExpectedCommunicator]:
        """What the logs of all ranks contain together."""
        found: list[ExpectedCommunicator] = []
        for group in self.groups:
            one = ExpectedCommunicator(members={rank: (self.host(w), self.pid(w)) for rank, w in enumerate(group)})
            for rank in range(len(group)):
                for channel, truth, _ in self._connections(group, rank):
                    one.links[truth] |= 1 << channel
            found.append(one)
        return found

    def log(self, rank: int) -> list[bytes]:
        """The lines of one rank, each with its newline."""
        return [f"{line}\n".encode() for line in self._lines(rank)]

    # Connections

    def _connections(self, group: range, rank: int) -> Iterator[tuple[int, Truth, bool]]:
        """Channel, connection, and whether it belongs to a tree, for one rank of a communicator."""
        for channel in range(self.channels):
            following, before = self._ring(group, rank, channel)
            yield from self._ends(group, rank, following, channel, False)
            yield from self._ends(group, before, rank, channel, False, receiving=True)
            begin, size = self._local(group, rank)
            if (rank - begin - channel) % size:
                # Up the chain within the node; down it the ring's connection serves.
                yield from self._ends(group, rank, before, channel, True)
            for peer in self._tree(group, rank, channel):
                yield from self._ends(group, rank, peer, channel, True)
                yield from self._ends(group, peer, rank, channel, True, receiving=True)
            across = self.host(group[0]) != self.host(group[-1])
            if self.collnet and across and rank % self.gpus == channel % self.gpus:
                for side in ("send", "receive"):
                    yield channel, (rank, -1, side, "CollNet", "SHARP", channel % self.nics, None, self.gdr), True

    def _ends(
        self, group: range, a: int, b: int, channel: int, tree: bool, receiving: bool = False
    ) -> Iterator[tuple[int, Truth, bool]]:
        if a == b:
            return
        near = self.host(group[a]) == self.host(group[b])
        if near and not receiving:
            kind = "SHM" if self.within == "SHM" else "P2P"
            yield channel, (a, b, "send", kind, self.within, None, None, False), tree
        elif not near:
            begin, size = self._local(group, a)
            proxy = begin + channel % size if self.pxn and self.version >= Version((2, 12, 7)) else a
            through = None if receiving or proxy == a else proxy
            side = "receive" if receiving else "send"
            yield channel, (a, b, side, "NET", self.network, channel % self.nics, through, self.gdr), tree

    def _ring(self, group: range, rank: int, channel: int) -> tuple[int, int]:
        """The next and the previous rank of a ring, which enters each node at another GPU for each channel."""
        sizes = self._local(group, rank)
        begin, size = sizes
        at = (rank - begin - channel) % size
        following = begin + (at + 1 + channel) % size if at + 1 < size else self._entry(group, begin + size, channel)
        before = begin + (at - 1 + channel) % size if at else self._exit(group, begin - 1, channel)
        return following, before

    def _local(self, group: range, rank: int) -> tuple[int, int]:
        """The first of a rank's ranks on its node, and their number."""
        node = group[rank] // self.gpus
        begin = rank
        while begin and group[begin - 1] // self.gpus == node:
            begin -= 1
        end = rank
        while end < len(group) and group[end] // self.gpus == node:
            end += 1
        return begin, end - begin

    def _entry(self, group: range, begin: int, channel: int) -> int:
        begin %= len(group)
        return begin + channel % self._local(group, begin)[1]

    def _exit(self, group: range, last: int, channel: int) -> int:
        begin, size = self._local(group, last % len(group))
        return begin + (channel - 1) % size

    def _tree(self, group: range, rank: int, channel: int) -> list[int]:
        """The peers of a binary tree over the nodes, which one GPU of each node belongs to for each channel."""
        begin, size = self._local(group, rank)
        if rank != begin + channel % size:
            return []
        starts = _starts(group, self.gpus)
        index = starts.index(begin)
        peers = [(index - 1) // 2] if index else []
        peers += [child for child in (2 * index + 1, 2 * index + 2) if child < len(starts)]
        return [self._entry(group, starts[peer], channel) for peer in peers]

    # Printed lines

    def _lines(self, world: int) -> Iterator[str]:
        host, pid, device = self.host(world), self.pid(world), world % self.gpus
        main = f"{host}:{pid}:{pid} [{device}] NCCL INFO "
        stamp = "[2026-11-20 10:00:00] " if self.timestamps and self.version >= Version((2, 26, 2)) else ""
        main = stamp + main
        node = world // self.gpus
        if self.version < Version((2, 22, 3)):
            if world == 0:
                yield f"NCCL version {self.version}+cuda12.4"
        else:
            yield f"{main}NCCL version {self.version}+cuda12.4"
        for name, value in self.env:
            line = "env_number" if value.isdecimal() and formats("env_number", self.version) else "env_string"
            yield main + self._say(line, name, int(value) if line == "env_number" else value)
        address = f"10.0.{node // 250}.{node % 250 + 1}<0>"
        yield main + self._say(
            "bootstrap", f" eth0:{address}" if self.version >= Version((2, 12, 7)) else f" [0]eth0:{address}"
        )
        if formats("driver", self.version):
            yield main + self._say("driver", 12040)
        yield from (main + line for line in self._network(address))
        pointers: list[str] = []
        for number, group in enumerate(self.groups):
            if world not in group:
                continue
            pointers.append(f"{0x5581_0000_0000 + (world % 977) * 65536 + number * 16:x}")
            thread = f"{stamp}{host}:{pid}:{pid + 100 + number} [{device}] NCCL INFO "
            yield from self._set_up(group, number, group.index(world), pointers, thread, main)

    def _network(self, address: str) -> Iterator[str]:
        if self.network == "AWS Libfabric":
            yield "NET/OFI Initializing aws-ofi-nccl 1.9.1-aws"
            yield f"NET/OFI Selected Provider is efa (found {self.nics} nics)"
        elif self.network == "Socket":
            yield self._say("ib_none")
            yield self._say("socket_using", f" [0]eth0:{address}")
        elif self.network == "IB":
            devices = "".join(f" [{nic}]mlx5_{nic}:1/{self.layer}" for nic in range(self.nics))
            if self.version < Version((2, 12, 7)):
                yield self._say("ib_using", devices, "eth0", address)
            else:
                yield self._say("ib_using", devices, "[RO]", "eth0", address)

    def _set_up(
        self, group: range, number: int, rank: int, pointers: Sequence[str], thread: str, main: str
    ) -> Iterator[str]:
        version, size = self.version, len(group)
        if number == 0 or version >= Version((2, 12, 7)):
            yield thread + self._say("network", self.network)
        device, bus = group[rank] % self.gpus, 0x1000 * (group[rank] % self.gpus + 1)
        # Splits before 2.31 have no id: where the format has one, it is zeros.
        split = self.split and number > 0 and version >= Version((2, 18, 1))
        common = (int(pointers[-1], 16), rank, size, device)
        replicas = self.replicas
        across = number > replicas
        count, color = (2, number - replicas - 1) if across else (1, number - 1)
        known = {
            "nvmlDev": device,
            "busId": bus,
            "commId": 0xFEED if split and version < Version((2, 31)) else 0x9A9C_0000 + number,
            "parent": int(pointers[0], 16),
            "splitCount": count,
            "childCount": count,
            "color": color,
            "key": rank,
        }
        api = "ncclCommSplit" if split else "ncclCommInitRankConfig"

        def step(line: str) -> Iterator[str]:
            name = line if not split or not formats(f"split_{line[5:]}", version) else f"split_{line[5:]}"
            for text in formats(name, version):
                if name.startswith("split") and version > Version((2, 30, 7)):
                    text = text.replace(" parent", " commId 0x%x parent")  # noqa: PLW2901 - as 2.31 prints it
                values: list[object] = [rank] if text.startswith("[Rank") else []
                values += [api] if "%s comm" in text else []
                values += common
                values += [known[word] for word in re.findall(r"(\w+) (?:0x)?%", text.partition("cudaDev %d")[2])]
                yield thread + text % tuple(values)

        yield from step("init_start")
        if split and (said := formats("split", version)):
            (text,) = said
            values = [rank, size, color, rank, (rank - 1) % size, (rank + 1) % size]
            values = [common[0], known["parent"], *values] if "parent" in text else values
            yield thread + text % tuple(values)
        if formats("affinity", version):
            yield thread + self._say("affinity", device, "ffff,ffffffff")
        yield thread + self._say(
            "pattern", 4, 0, self.channels, 24.0, 24.0, "NVL" if self.within != "SHM" else "PHB", "PIX", 1
        )
        if formats("counts", version):
            nodes = len(_starts(group, self.gpus))
            local = self._local(group, rank)
            yield thread + self._say("counts", common[0], rank, size, nodes, local[1], rank - local[0], 0)
        for channel in range(self.channels):
            following, before = self._ring(group, rank, channel)
            yield thread + self._say("ring", channel, before, rank, following)
        if rank == 0:
            for channel in range(self.channels):
                order = "".join(f" {one:>4}" for one in range(min(size, 64)))
                yield f"{thread}Channel {channel:02d}/{self.channels:02d} :{order}"
        tree = "".join(
            f" [{channel}] {(rank + 1) % size}/-1/-1->{rank}->{rank - 1}" for channel in range(self.channels)
        )
        yield thread + self._say("trees", tree)
        for index in range(self.filler):
            yield f"{thread}Could not get speed from /sys/class/net/eth{index}/speed. Defaulting to 10 Gbps."
        lazy = version >= Version((2, 22, 3))
        if lazy:
            yield from step("init_complete")
            # A collective makes its connections, on a separate thread, or (its only one) on the calling thread.
            own = self.pid(group[rank]) + 300 + number if version < Version((2, 27, 3)) else self.pid(group[rank])
            thread = main.replace(f":{self.pid(group[rank])} [", f":{own} [")
        connections = list(self._connections(group, rank))
        (rings,) = formats("rings", version)
        stages = [
            [*(thread + self._connect(*one[:2], group) for one in connections if one[2] == tree), thread + done]
            for tree, done in (
                (False, rings % (int(self.pxn), int(self.gdr)) if "%" in rings else rings),
                (True, self._say("trees_done")),
            )
        ]
        for stage in reversed(stages) if lazy else stages:
            yield from stage
        yield thread + self._say(
            "thresholds", 8, 8, 64, 512, 8, 64, *(512,) * (2 if version >= Version((2, 14, 3)) else 3)
        )
        (text,) = formats("channels", version)
        yield thread + text % tuple([self.channels] * text.count("%"))
        if formats("chunk", version):
            yield thread + self._say("chunk", 131072)
        if not lazy:
            yield from step("init_complete")

    def _connect(self, channel: int, truth: Truth, group: range) -> str:
        sender, receiver, side, kind, name, nic, proxy, gdr = truth
        direct = "/GDRDMA" if gdr else ""
        if kind == "CollNet":
            return self._fill(f"collnet_{side}", channel, 0, sender, name, nic, direct)
        devices = [group[rank] % self.gpus for rank in (sender, receiver)]
        if self.version < Version((2, 18, 3)):
            devices = [0x1000 * (device + 1) for device in devices]
        ends = (sender, devices[0], receiver, devices[1])
        if kind == "NET":
            if proxy is not None:
                return self._fill("send_pxn", channel, 0, *ends, name, nic, proxy, direct)
            return self._fill(side, channel, 0, *ends, name, nic, direct)
        if kind == "SHM":
            return self._fill("shm", channel, None, *ends, "direct", "direct")
        line, words = _within(name, self.version)
        if line == "p2p_indirect":
            words = (sender, devices[0])
        return self._fill(line, channel, 0, *ends, *words)

    def _fill(self, line: str, channel: int, connection: int | None, *values: object) -> str:
        """A format with its values; one without the connection gets none, and the remainder is empty."""
        (text,) = formats(line, self.version)
        given = [channel, *values] if "/" not in text.partition(" :")[0] else [channel, connection, *values]
        wanted = len(re.findall(r"%0?\d*[a-zA-Z]", text))
        given = [*given, *[""] * wanted][:wanted]
        return text % tuple(given)

    def _say(self, line: str, *values: object) -> str:
        (text, *_) = formats(line, self.version)
        return text % values


def _within(name: str, version: Version) -> tuple[str, tuple[object, ...]]:
    """The line by which a version reports this connection between two GPUs of a node, and its last words."""
    if name == "CUMEM" and not formats("p2p_cumem", version):
        return "p2p_method", ("CUMEM",)
    return {"CUMEM": "p2p_cumem", "IPC": "p2p_ipc", "direct pointer": "p2p_direct", "indirect": "p2p_indirect"}[
        name
    ], ()


@cache
def _starts(group: range, gpus: int) -> tuple[int, ...]:
    """The first rank of each node."""
    return tuple(index for index, world in enumerate(group) if index == 0 or group[index - 1] // gpus != world // gpus)
