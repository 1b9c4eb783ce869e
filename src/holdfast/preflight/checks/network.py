"""Checks of a node's network: the interfaces that the job names, and the node's host name."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from ipaddress import IPv4Address, IPv6Address, ip_address

from msgspec import Struct

from holdfast.findings import Finding, Owner, Severity
from holdfast.preflight.interfaces import (
    Interface,
    ListInterfaces,
    chosen_by_nccl,
    named_exactly,
    system_interfaces,
)
from holdfast.preflight.node_view import NodeView, NotLookedAt
from holdfast.protocol.node_requirements import NodeRequirements

SLOW_MBIT_S = 10_000
"""An interface below this carries gradients of GPUs slower than one of them computes them."""
RESOLVE_TIMEOUT_S = 3.0
"""The resolver's own first retry comes after 5 s (resolv.conf)."""


class _IfnameVariable(Struct, frozen=True, kw_only=True):
    name: str
    choose: Callable[[str, Iterable[Interface]], Iterator[tuple[str, tuple[Interface, ...]]]]
    """The interfaces for a value, in groups of which each needs a good one."""
    certain: Callable[[NodeRequirements], bool]
    """Whether the job surely uses the library that reads the variable, so that it cannot start."""


SETTLE_S = 2.0
"""Seconds that an interface may take until it works: the kernel updates its state about once a second, and a pod may
have got it just now."""
SETTLE_POLL_S = 0.1

_VARIABLES = (
    _IfnameVariable(name="NCCL_SOCKET_IFNAME", choose=chosen_by_nccl, certain=lambda wanted: wanted.gpus > 0),
    _IfnameVariable(
        name="GLOO_SOCKET_IFNAME",
        choose=named_exactly,
        certain=lambda wanted: wanted.gpus == 0 or "GLOO_SOCKET_IFNAME" in wanted.env,
    ),
    _IfnameVariable(name="TP_SOCKET_IFNAME", choose=named_exactly, certain=lambda _: False),
)


def interface_exists(
    view: NodeView, interfaces: ListInterfaces = system_interfaces, *, settle_s: float = SETTLE_S
) -> Iterator[Finding]:
    """An interface that the job or the environment names is there, runs, and has an address."""
    named = [(each, value) for each in _VARIABLES if (value := _value(view, each.name))]
    until = time.monotonic() + settle_s
    while (found := [*_unusable_interfaces(view, named, interfaces())]) and time.monotonic() < until:
        time.sleep(SETTLE_POLL_S)
    yield from found


def _unusable_interfaces(
    view: NodeView, named: Iterable[tuple[_IfnameVariable, str]], known: Sequence[Interface]
) -> Iterator[Finding]:
    for variable, value in named:
        for words, found in variable.choose(value, known):
            running = [each for each in found if each.running]
            if not found:
                yield _unusable("interface-missing", f"this node has no interface {words}", variable, view, known)
            elif not running:
                what = f"the interface {words} is down, or has no carrier"
                yield _unusable("interface-down", what, variable, view, known)
            elif not any(each.usable for each in running):
                what = f"the interface {words} has no address but a link-local one"
                yield _unusable("interface-without-address", what, variable, view, known)


def _unusable(code: str, what: str, variable: _IfnameVariable, view: NodeView, known: Iterable[Interface]) -> Finding:
    return Finding(
        code=code,
        severity=Severity.ERROR if variable.certain(view.wanted) else Severity.WARNING,
        what=what,
        where=f"{variable.name}={_value(view, variable.name)}",
        evidence=tuple(_shown(each) for each in known),
        remedy=f"Set {variable.name} to the interface that reaches the other nodes, by a name that all nodes share "
        "(`ip -br addr` on each), or attach that network to the pod.",
        owner=Owner.CLUSTER,
    )


def host_name(view: NodeView, interfaces: ListInterfaces = system_interfaces) -> Iterator[Finding]:
    """The host name resolves to an address of the node that others reach: Gloo listens there unless told otherwise."""
    if _value(view, "GLOO_SOCKET_IFNAME"):
        return
    if not view.address:
        raise NotLookedAt("the address at which the other nodes reach this one is not known")
    if _is_loopback(view.address):
        return  # all nodes of the run are on this machine
    name = view.read("proc/sys/kernel/hostname")
    own = {address for each in interfaces() for address in each.usable if not address.is_loopback}
    found, source = _resolved(name, view, own)
    seen = f"{source}: {' '.join(map(str, found)) or 'no address'}"
    if not found:
        yield _misnamed("host-name-unresolved", f"the host name {name} does not resolve", name, seen, view)
    elif all(each.is_loopback for each in found):
        what = f"the host name {name} resolves to a loopback address, at which no other node reaches this one"
        yield _misnamed("host-name-loopback", what, name, seen, view)
    elif own and not own.intersection(found):
        what = f"the host name {name} resolves to no address of this node"
        yield _misnamed("host-name-elsewhere", what, name, seen, view)


def _misnamed(code: str, what: str, name: str, seen: str, view: NodeView) -> Finding:
    return Finding(
        code=code,
        severity=Severity.WARNING,
        what=what,
        where=name,
        evidence=(seen, f"the node's address: {view.address}"),
        remedy=f"Write `{view.address} {name}` in /etc/hosts instead of a line with 127.0.1.1, or set "
        "GLOO_SOCKET_IFNAME in the job's `env`. holdfast itself does not use the name.",
        owner=Owner.CLUSTER,
    )


def _resolved(
    name: str, view: NodeView, own: set[IPv4Address | IPv6Address]
) -> tuple[tuple[IPv4Address | IPv6Address, ...], str]:
    """The addresses of a name as nsswitch.conf has the C library look it up, and where they come from."""
    sources = _sources(view)
    if {"files", "resolve"} & set(sources):
        listed = tuple(address for address, names in _hosts(view) if name in names)
        if listed:
            return listed, "/etc/hosts"
    if "myhostname" in sources:
        return tuple(own), "myhostname of nsswitch.conf"
    try:
        lines = view.run(("getent", "ahosts", name), RESOLVE_TIMEOUT_S).splitlines()
    except TimeoutError as error:
        return (), str(error)
    return tuple({address: None for line in lines if (address := _address(line.partition(" ")[0]))}), "getent ahosts"


def _sources(view: NodeView) -> list[str]:
    """The words of the line `hosts: files dns` in nsswitch.conf; without such a file the C library has the same."""
    try:
        lines = view.read("etc/nsswitch.conf").splitlines()
    except NotLookedAt:
        return ["files", "dns"]
    return next((line.split()[1:] for line in lines if line.startswith("hosts:")), ["files", "dns"])


def _hosts(view: NodeView) -> Iterator[tuple[IPv4Address | IPv6Address, list[str]]]:
    """The lines `127.0.1.1 node1.example node1 # comment` of /etc/hosts."""
    try:
        lines = view.read("etc/hosts").splitlines()
    except NotLookedAt:
        return
    for line in lines:
        words = line.partition("#")[0].split()
        if words and (address := _address(words[0])):
            yield address, words[1:]


def interface_speed(view: NodeView, interfaces: ListInterfaces = system_interfaces) -> Iterator[Finding]:
    """The interface that carries the gradients of GPUs over TCP is a fast one."""
    if not view.wanted.gpus or view.wanted.network != "Socket" or _is_loopback(view.address):
        return
    chosen = _data_interfaces(view, interfaces())
    speeds = {name: speed for name in chosen if (speed := _speed_mbit_s(view, name)) is not None}
    if chosen and not speeds:
        raise NotLookedAt(f"the driver of {', '.join(chosen)} does not say how fast it is")
    for name, speed in speeds.items():
        duplex = _duplex(view, name)
        if speed < SLOW_MBIT_S or duplex == "half":
            yield Finding(
                code="interface-slow",
                severity=Severity.WARNING,
                what=f"the interface {name} runs at {speed:,} Mbit/s{', half duplex' if duplex == 'half' else ''}, and "
                f"carries the gradients of {view.wanted.gpus} GPUs",
                where=name,
                evidence=(f"/sys/class/net/{name}/speed: {speed}", f"/sys/class/net/{name}/duplex: {duplex}"),
                remedy="Name a faster interface in NCCL_SOCKET_IFNAME. If this one should be faster, look at its cable "
                f"and switch port: `ethtool {name}`.",
                owner=Owner.CLUSTER,
            )


def network_facts(view: NodeView, interfaces: ListInterfaces = system_interfaces) -> Mapping[str, str]:
    """MTU and speed of the interfaces that carry the job's sockets."""
    try:
        chosen = _data_interfaces(view, interfaces())
    except NotLookedAt:
        return {}
    mtus = {mtu for name in chosen if (mtu := _read_or_none(view, f"sys/class/net/{name}/mtu"))}
    speeds = {f"{speed:,} Mbit/s" for name in chosen if (speed := _speed_mbit_s(view, name)) is not None}
    facts = {"MTU of the socket interface": mtus, "speed of the socket interface": speeds}
    return {label: ", ".join(sorted(values)) for label, values in facts.items() if values}


def _data_interfaces(view: NodeView, known: Iterable[Interface]) -> tuple[str, ...]:
    """The interfaces that NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME names, else the one with the node's address."""
    for variable in _VARIABLES[:2]:
        value = _value(view, variable.name)
        if value and not value.startswith("^"):
            chosen = [each for _, found in variable.choose(value, known) for each in found]
            return tuple(each.name for each in chosen if each.running and each.usable)
    address = _address(view.address)
    return tuple(each.name for each in known if address in each.addresses) if address else ()


def _speed_mbit_s(view: NodeView, name: str) -> int | None:
    """The rate in Mbit/s; drivers of virtual interfaces answer with an error or with -1."""
    words = _read_or_none(view, f"sys/class/net/{name}/speed")
    return int(words) if words and words.isdecimal() else None


def _duplex(view: NodeView, name: str) -> str:
    return _read_or_none(view, f"sys/class/net/{name}/duplex") or "unknown"


def _read_or_none(view: NodeView, path: str) -> str | None:
    try:
        return view.read(path)
    except NotLookedAt:
        return None


def _value(view: NodeView, name: str) -> str:
    """A variable as ranks get it: the job's, else the agent's."""
    return view.wanted.env.get(name, view.environ.get(name, "")).strip()


def _address(words: str) -> IPv4Address | IPv6Address | None:
    try:
        return ip_address(words.partition("%")[0])
    except ValueError:
        return None


def _is_loopback(words: str) -> bool:
    address = _address(words)
    return words == "localhost" if address is None else address.is_loopback


def _shown(each: Interface) -> str:
    addresses = " ".join(map(str, each.addresses)) or "no address"
    return f"{each.name}: {'running' if each.running else 'down'}, {addresses}"
