"""Creates, changes and removes a run's network: the hub, the nodes, partitions and bandwidth limits.

FOLDER/                 a tmpfs
network.json        state for `NetnsNetwork.open`
hosts               every node's /etc/hosts
hub/, 2/, 3/, ...   namespaces: of the bridges, and of each node by its number

Creation and removal are in one long file because they must match.
"""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from ipaddress import IPv4Network
from pathlib import Path

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from holdfast.errors import ExitCode, HoldfastError, failure
from holdfast.host.processes import undo_later
from holdfast.launch.local.netns import ip_command, namespace, subnet
from holdfast.launch.local.netns.netns_support import rates_unavailable, unavailable

CONTROLLER = "controller"
"""Host name of the network's owner, as nodes resolve it."""

_TAG = re.compile(r"[a-z0-9]{1,13}")
"""With the prefix `hf` it is an interface name, which has at most 15 characters."""

_OWNER, _FIRST, _LAST = 1, 2, 254
"""Host numbers in a /24: the owner's, and the first and last of nodes."""

# Runs for each process that is started in a node. It mounts a new /sys, because the machine's shows the machine's
# interfaces and NCCL looks up `eth0` there, and binds the cgroups into it. In a container that forbids the mount the
# machine's /sys stays. 9 is an arbitrary free descriptor.
_SETUP_SCRIPT = """\
mount --bind "$0" /etc/hosts || exit
if [ -r /sys/fs/cgroup ] && exec 9</sys/fs/cgroup && mount -t sysfs sysfs /sys 2>/dev/null; then
    mount --no-canonicalize --rbind /proc/self/fd/9 /sys/fs/cgroup
fi
exec 9<&-
exec "$@"
"""


class NetnsInterface(Struct, frozen=True, kw_only=True):
    """An interface that every node has; the first one has the nodes' host names and reaches the controller."""

    name: str = "eth0"
    mbit: int | None = None
    """Bandwidth limit in Mbit/s in each direction; None is unlimited."""


class NetnsNode(Struct, frozen=True, kw_only=True):
    """A node of a network."""

    name: str
    """The host name, which every node resolves to `address`."""
    aliases: tuple[str, ...]
    """Other host names of the node."""
    number: int
    """Its host number in every subnet; numbers are reused only after all others."""
    addresses: dict[str, str]
    """Address of each interface."""
    prefix: tuple[str, ...]
    """The prefix that runs a command in the node; it execs, so the pid is the command's."""

    @property
    def address(self) -> str:
        """The address of the first interface."""
        return next(iter(self.addresses.values()))


class _Member(Struct, frozen=True, kw_only=True):
    name: str
    number: int
    aliases: tuple[str, ...]


class _State(Struct, frozen=True, kw_only=True):
    """A network as stored in network.json."""

    interfaces: tuple[NetnsInterface, ...]
    subnets: tuple[str, ...]
    members: tuple[_Member, ...] = ()
    last_number: int = _FIRST - 1


class NetnsNetwork:
    """One run's network. Its methods take 2 to 60 ms; call them from any thread, one at a time."""

    def __init__(self, tag: str, state: _State) -> None:
        self.tag = tag
        self._folder = _folder(tag)
        self._hub = self._folder / "hub"
        self._subnets = tuple(IPv4Network(text) for text in state.subnets)
        self._propagation = _propagation()
        self._state = state

    @classmethod
    def create(cls, tag: str, *, interfaces: tuple[NetnsInterface, ...] = (NetnsInterface(),)) -> NetnsNetwork:
        """Create a network without nodes; `remove` and `leftovers` find it by its tag (up to 13 of a-z and 0-9)."""
        _require(interfaces)
        with subnet.subnet_lock():
            try:
                _folder(tag).mkdir(mode=0o700)
            except FileExistsError as error:
                raise failure(
                    "netns-exists",
                    f"there is a network with the tag {tag} already",
                    exit_code=ExitCode.CANNOT_RUN_HERE,
                    evidence=tuple(leftovers(tag)),
                    remedy="Choose another tag, or remove the leftovers of that run.",
                ) from error
            try:
                namespace.mount_shared_tmpfs(_folder(tag))
                chosen = subnet.pick_free(len(interfaces), tag)
                network = cls(tag, _State(interfaces=interfaces, subnets=tuple(str(one) for one in chosen)))
                network._make_hub()
                network._attach()
                network._save(network._state)
            except BaseException:
                remove(tag)
                raise
        return network

    @classmethod
    def open(cls, tag: str) -> NetnsNetwork:
        """Take over a network whose owner is gone, with its nodes."""
        try:
            network = cls(tag, _load(_folder(tag) / "network.json"))
        except FileNotFoundError as error:
            raise failure(
                "netns-not-found",
                f"there is no network with the tag {tag} here",
                exit_code=ExitCode.NOT_FOUND,
                evidence=(str(error),),
                remedy="A network in a user namespace is seen from inside it only: enter_rootless(join_pid=...).",
            ) from error
        if _interface(tag) not in _interface_names():
            network._attach()
        return network

    @property
    def address(self) -> str:
        """The owner's address, which nodes resolve as `controller`."""
        return str(self._subnets[0][_OWNER])

    @property
    def nodes(self) -> dict[str, NetnsNode]:
        """The nodes by name."""
        return {member.name: self._node(member) for member in self._state.members}

    def add_node(self, name: str, *, aliases: tuple[str, ...] = ()) -> NetnsNode:
        """Create a node; the name of a removed node may be used again and gets another address."""
        if name in self.nodes:
            raise ValueError(f"the network {self.tag} has a node {name} already")
        member = _Member(name=name, number=self._free_number(name), aliases=aliases)
        members = (*self._state.members, member)
        self._save(replace(self._state, members=members, last_number=member.number))
        try:
            self._make(member)
        except BaseException:
            self.remove_node(name)
            raise
        return self._node(member)

    def remove_node(self, name: str) -> None:
        """Remove a node: its processes, namespaces and name."""
        member = self._member(name)
        self.kill(name)
        # A partly created node lacks some ports, hence -force and no error.
        ip_command.try_run(
            (*namespace.enter_prefix(self._hub), ip_command.find("ip") or "ip", "-force", "-batch", "-"),
            [f"link delete dev {port}" for port in self._ports(member)],
        )
        namespace.unpin(self._namespace_dir(member))
        self._save(replace(self._state, members=tuple(other for other in self._state.members if other != member)))

    def processes(self, name: str) -> list[int]:
        """Every process in the node, including daemons."""
        return namespace.processes_in(self._namespace_dir(self._member(name)))

    def kill(self, name: str) -> None:
        """Kill every process in the node; the node stays.

        The kernel closes their connections. To simulate a dead machine, which closes nothing, partition the node first.
        """
        namespace.kill(lambda: self.processes(name))

    def partition(self, name: str, for_s: float | None = None) -> None:
        """Cut the node off: no packet arrives or leaves; connections stay open and the node keeps its addresses.

        The partition ends after `for_s` seconds, even if this process has ended by then; without `for_s`, call `heal`.
        """
        with ExitStack() as undone:
            for port in self._ports(self._member(name)):
                heal = (ip_command.find("ip") or "ip", *_link_set(port, "up"))
                undone.enter_context(undo_later(for_s, *namespace.enter_prefix(self._hub), *heal))
            self._set(name, "down")

    def heal(self, name: str) -> None:
        """End a partition."""
        self._set(name, "up")

    def remove(self) -> None:
        """Remove the network, including processes in its nodes."""
        remove(self.tag)

    def _set(self, name: str, state: str) -> None:
        ports = self._ports(self._member(name))
        ip_command.ip(*(" ".join(_link_set(port, state)) for port in ports), inside=namespace.enter_prefix(self._hub))

    def _make_hub(self) -> None:
        namespace.pin(self._hub, "hub")
        bridges = [f"br{index}" for index in range(len(self._subnets))]
        ip_command.ip(
            *(f"link add name {bridge} type bridge mcast_snooping 0" for bridge in bridges),
            *(f"link set dev {bridge} up" for bridge in bridges),
            inside=namespace.enter_prefix(self._hub),
        )

    def _attach(self) -> None:
        """Connect this process's network namespace to the hub."""
        host = _interface(self.tag)
        address = self._subnets[0][_OWNER]
        # A former owner's port may outlive it by some milliseconds, so each owner's port has a unique name.
        port = f"up{os.getpid()}"
        # The MAC address is set explicitly: udev changes unset ones, even under traffic.
        mac = "02:68:" + address.packed.hex(":")
        ip_command.ip(
            f"link add name {host} address {mac} type veth peer name {port} netns {self._hub / 'net'}",
            f"address add {address}/24 dev {host}",
            f"link set dev {host} up",
        )
        ip_command.ip(f"link set dev {port} master br0 up", inside=namespace.enter_prefix(self._hub))

    def _make(self, member: _Member) -> None:
        place = self._namespace_dir(member)
        namespace.pin(place, member.name)
        node = self._node(member)
        ports = self._ports(member)
        ip_command.ip(
            *(
                f"link add name {port} type veth peer name {interface} netns {place / 'net'}"
                for port, interface in zip(ports, node.addresses, strict=True)
            ),
            *(f"link set dev {port} master br{index} up" for index, port in enumerate(ports)),
            inside=namespace.enter_prefix(self._hub),
        )
        ip_command.ip(
            "link set dev lo up",
            *(f"address add {address}/24 dev {interface}" for interface, address in node.addresses.items()),
            *(f"link set dev {interface} up" for interface in node.addresses),
            inside=namespace.enter_prefix(place),
        )
        self._set_rates(member)

    def _set_rates(self, member: _Member) -> None:
        """Limit bandwidth: outgoing traffic in the node, incoming traffic in the hub."""
        limited = [
            (port, interface.name, _bucket(interface.mbit))
            for port, interface in zip(self._ports(member), self._state.interfaces, strict=True)
            if interface.mbit is not None
        ]
        if limited:
            ip_command.tc(
                *(f"qdisc add dev {port} root {bucket}" for port, _, bucket in limited),
                inside=namespace.enter_prefix(self._hub),
            )
            ip_command.tc(
                *(f"qdisc add dev {interface} root {bucket}" for _, interface, bucket in limited),
                inside=namespace.enter_prefix(self._namespace_dir(member)),
            )

    def _namespace_dir(self, member: _Member) -> Path:
        return self._folder / str(member.number)

    def _ports(self, member: _Member) -> list[str]:
        """The node's ports in the hub, one per interface."""
        return [f"n{member.number}i{index}" for index in range(len(self._subnets))]

    def _node(self, member: _Member) -> NetnsNode:
        names = (interface.name for interface in self._state.interfaces)
        own_mounts = ("unshare", "--mount", f"--propagation={self._propagation}", "--")
        settle = ("sh", "-c", _SETUP_SCRIPT, str(self._folder / "hosts"))
        return NetnsNode(
            name=member.name,
            aliases=member.aliases,
            number=member.number,
            addresses={name: str(one[member.number]) for name, one in zip(names, self._subnets, strict=True)},
            prefix=(*namespace.enter_prefix(self._namespace_dir(member)), *own_mounts, *settle),
        )

    def _member(self, name: str) -> _Member:
        for member in self._state.members:
            if member.name == name:
                return member
        raise failure(
            "netns-not-found",
            f"the network {self.tag} has no node {name}",
            exit_code=ExitCode.NOT_FOUND,
            evidence=tuple(member.name for member in self._state.members),
            remedy="name one of those that it has",
        )

    def _free_number(self, name: str) -> int:
        used = {member.number for member in self._state.members}
        places = range(_FIRST, _LAST + 1)
        start = self._state.last_number + 1 - _FIRST
        for index in range(len(places)):
            number = places[(start + index) % len(places)]
            if number not in used:
                return number
        raise failure(
            "netns-full",
            f"no address is left for {name}: the network {self.tag} has {len(places)} nodes",
            exit_code=ExitCode.CANNOT_RUN_HERE,
            remedy="ask for fewer nodes, or for `isolation: process`",
        )

    def _save(self, state: _State) -> None:
        """Store a new state: in this process, in network.json for the next owner, and in the hosts file."""
        self._state = state
        written = self._folder / "network.json.new"
        written.write_bytes(msgspec.json.encode(state))
        written.replace(self._folder / "network.json")
        _overwrite(self._folder / "hosts", "".join(f"{line}\n" for line in self._hosts()))

    def _hosts(self) -> Iterator[str]:
        yield "127.0.0.1 localhost"
        yield "::1 localhost ip6-localhost ip6-loopback"
        yield f"{self.address} {CONTROLLER}"
        for node in self.nodes.values():
            yield " ".join((node.address, node.name, *node.aliases))
            yield from (f"{there} {node.name}-{name}" for name, there in list(node.addresses.items())[1:])


def remove(tag: str) -> None:
    """Remove all that is left of the network with this tag, including processes in its nodes; idempotent."""
    namespace.kill(lambda: _processes_in_network(tag))
    # Before the hub: the kernel would remove the interface with the hub, but at an unknown time.
    if _interface(tag) in _interface_names():
        _delete_interface(tag)
    folder = _folder(tag)
    for place in _namespace_dirs(folder):
        namespace.unpin(place)
    namespace.unmount(folder)
    with suppress(FileNotFoundError):
        folder.rmdir()


def leftovers(tag: str) -> list[str]:
    """Descriptions of the leftovers of the network with this tag; empty if there are none."""
    folder = _folder(tag)
    return [
        *(f"process {pid}" for pid in _processes_in_network(tag)),
        *(f"namespaces {place}" for place in _namespace_dirs(folder)),
        *([f"folder {folder}"] if folder.exists() else []),
        *([f"interface {_interface(tag)}"] if _interface(tag) in _interface_names() else []),
    ]


def _processes_in_network(tag: str) -> list[int]:
    folder = _folder(tag)
    if namespace.privileged():
        return namespace.processes_in(*_namespace_dirs(folder))
    # From outside its user namespace a network is visible only in its processes' mounts. As root this would be wrong:
    # other mount namespaces may have a copy of root's mounts.
    return [pid for pid in namespace.processes() if folder.exists() and _has_mounted(pid, folder)]


def _has_mounted(pid: int, folder: Path) -> bool:
    try:
        return f" {folder} " in Path(f"/proc/{pid}/mountinfo").read_text()
    except OSError:
        return False


def _namespace_dirs(folder: Path) -> list[Path]:
    return sorted(place for place in folder.glob("*") if place.is_dir())


def _folder(tag: str) -> Path:
    """Path of the tmpfs: the same for the network's owner and for a later cleanup."""
    if not _TAG.fullmatch(tag):
        raise ValueError(f"a network's tag is 1 to 13 of a-z and 0-9, not {tag!r}")
    home = Path("/run") if os.access("/run", os.W_OK) else Path("/tmp")
    return home / f"holdfast-net-{tag}"


def _interface(tag: str) -> str:
    return f"hf{tag}"


def _delete_interface(tag: str) -> None:
    try:
        ip_command.ip(f"link delete dev {_interface(tag)}")
    except HoldfastError:
        # The hub, and with it the interface, may end concurrently with its last process.
        if _interface(tag) in _interface_names():
            raise


def _interface_names() -> set[str]:
    return {name for _, name in socket.if_nameindex()}


def _propagation() -> str:
    """Mount propagation between a node and this process.

    A node's mounts must not propagate to this process, so they are slaves if it has shared mounts. In a user namespace
    mounts from outside are slaves already; only the pins remain, which must stay shared to outlive the first owner.
    """
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        if " shared:" in line and "/holdfast-net-" not in line:
            return "slave"
    return "unchanged"


def _link_set(port: str, state: str) -> tuple[str, ...]:
    return ("link", "set", "dev", port, state)


def _bucket(mbit: int) -> str:
    """A token bucket for 2 ms of traffic, at least 128 KiB (a segment is 64 KiB), with a queue of 50 ms."""
    return f"tbf rate {mbit}mbit burst {max(128 * 1024, mbit * 250)} latency 50ms"


def _require(interfaces: tuple[NetnsInterface, ...]) -> None:
    rates = any(interface.mbit is not None for interface in interfaces)
    reason = rates_unavailable() if rates else unavailable()
    if reason is None and not namespace.privileged():
        reason = "this process has no privileges; call enter_rootless first"
    if reason is not None:
        raise failure(
            "netns-unavailable",
            "this machine cannot give each node its own network",
            exit_code=ExitCode.CANNOT_RUN_HERE,
            evidence=(reason,),
            remedy="Do what the evidence says, or use `isolation: process`.",
        )


def _load(path: Path) -> _State:
    raw = json.loads(path.read_text())
    return _State(
        interfaces=tuple(NetnsInterface(**one) for one in raw["interfaces"]),
        subnets=tuple(raw["subnets"]),
        members=tuple(_Member(**one | {"aliases": tuple(one["aliases"])}) for one in raw["members"]),
        last_number=raw["last_number"],
    )


def _overwrite(path: Path, text: str) -> None:
    """Change a file in place, because the bind mount refers to the inode; readers never see an empty file."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        written = os.pwrite(descriptor, text.encode(), 0)
        os.ftruncate(descriptor, written)
        os.fchmod(descriptor, 0o644)
    finally:
        os.close(descriptor)
