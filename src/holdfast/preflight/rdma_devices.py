"""Reads the RDMA devices of a node from sysfs, and selects the ports that NCCL uses."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable
from ipaddress import IPv6Address

from msgspec import Struct

from holdfast.preflight.node_view import NodeView, NotLookedAt
from holdfast.protocol.node_requirements import NodeRequirements

DEVICES = "sys/class/infiniband"
VERBS_NETWORKS = ("IB", "gIB")
"""Of transports over verbs: NCCL's own, `IBext_v8` and the like of NVIDIA's plugin, and Google's."""
LIBFABRIC_NETWORKS = ("AWS Libfabric", "Libfabric", "OFI")
"""Names that the aws-ofi-nccl plugin has had: https://github.com/aws/aws-ofi-nccl/pull/530."""
EFA_DRIVER = "efa"
FULL_MEMBER = 0x8000
"""Bit of a partition key; two ports that both lack it cannot reach each other."""

_NATURAL = re.compile(r"(\d+)")
_RATE = re.compile(r"([\d.]+) Gb/sec")  # `400 Gb/sec (4X NDR)`, `2.5 Gb/sec (1X SDR)`


class Port(Struct, frozen=True, kw_only=True):
    """One port of an RDMA device."""

    device: str
    number: int
    driver: str
    """Kernel driver of the PCI device, such as `mlx5_core`; empty for a virtual device."""
    model: str
    """Board or adapter type; empty if the driver names none."""
    firmware: str
    node_type: str
    """`1: CA` for InfiniBand and RoCE, `4: RNIC` for iWARP."""
    state: str
    """`4: ACTIVE`."""
    phys_state: str
    """`5: LinkUp`."""
    rate: str
    """`400 Gb/sec (4X NDR)`."""
    link_layer: str
    """`InfiniBand`, `Ethernet`; `Unknown` on EFA; empty, for InfiniBand, on simulators."""

    @property
    def name(self) -> str:
        """As in NCCL's log."""
        return f"{self.device}:{self.number}"

    @property
    def folder(self) -> str:
        """Its folder in sysfs."""
        return f"{DEVICES}/{self.device}/ports/{self.number}"

    @property
    def kind(self) -> tuple[str, str, str]:
        """Equal for ports that do the same work on a healthy node."""
        return self.driver, self.model, self.link_layer

    @property
    def active(self) -> bool:
        """Whether it carries data."""
        return self.state.endswith("ACTIVE") and (not self.phys_state or self.phys_state.endswith("LinkUp"))

    @property
    def rate_gbps(self) -> float:
        """Its rate in Gbit/s; 0 if it names none."""
        found = _RATE.match(self.rate)
        return float(found[1]) if found else 0.0

    @property
    def is_infiniband(self) -> bool:
        """Whether a subnet manager configures it."""
        return self.link_layer in ("InfiniBand", "")

    @property
    def awaits_subnet_manager(self) -> bool:
        """Whether its link is up and no subnet manager has configured it."""
        return self.is_infiniband and self.state.endswith(("INIT", "ARMED")) and self.phys_state.endswith("LinkUp")

    @property
    def is_roce(self) -> bool:
        """Whether it is RDMA over Ethernet with GIDs made from IP addresses."""
        return self.link_layer == "Ethernet" and not self.node_type.endswith("RNIC")


class Gid(Struct, frozen=True, kw_only=True):
    """One address of a RoCE port."""

    index: int
    address: IPv6Address
    type: str
    """`RoCE v2`; `IB/RoCE v1`."""
    interface: str
    """Network interface whose address it is; empty if the kernel does not tell."""

    @property
    def is_v2(self) -> bool:
        return self.type == "RoCE v2"

    @property
    def routable(self) -> bool:
        """Whether it comes from an address that is not link-local."""
        return not (self.address.ipv4_mapped or self.address).is_link_local

    @property
    def family(self) -> str:
        return "IPv4" if self.address.ipv4_mapped else "IPv6"


class HcaList(Struct, frozen=True, kw_only=True):
    """NCCL_IB_HCA: `mlx5_0:1,mlx5_2` are prefixes, `=mlx5_0` exact names, `^mlx5_bond` and `^=mlx5_4` exclude."""

    items: tuple[tuple[str, int | None], ...] = ()
    exact: bool = False
    exclude: bool = False

    @staticmethod
    def parse(text: str) -> HcaList:
        """As NCCL reads it: `^` comes before `=`; a port is the number after the colon."""
        exclude, text = text.startswith("^"), text.removeprefix("^")
        exact, text = text.startswith("="), text.removeprefix("=")
        items = [item.partition(":") for item in text.split(",") if item]
        return HcaList(
            items=tuple((name, int(port) if port.isdigit() else None) for name, _, port in items),
            exact=exact,
            exclude=exclude,
        )

    def selects(self, port: Port) -> bool:
        """Whether NCCL may use the port; an empty list selects all."""
        return not self.items or any(self._matches(item, port) for item in self.items) != self.exclude

    def names(self, port: Port) -> bool:
        """Whether the list asks for this very device, not for whatever begins with a prefix."""
        return not self.exclude and any(
            name == port.device and number in (None, port.number) for name, number in self.items
        )

    def unmatched(self, ports: Iterable[Port]) -> tuple[str, ...]:
        """Devices that the list asks for and the node does not have."""
        known = tuple(ports)
        if self.exclude:
            return ()
        return tuple(
            name for name, number in self.items if not any(self._matches((name, number), each) for each in known)
        )

    def _matches(self, item: tuple[str, int | None], port: Port) -> bool:
        name, number = item
        same = port.device == name if self.exact else port.device.startswith(name)
        return same and number in (None, port.number)


class UsedPorts(Struct, frozen=True, kw_only=True):
    """The ports that the job's collectives use."""

    ports: tuple[Port, ...]
    named: bool
    """Whether NCCL_IB_HCA names each; else they are the fastest kind, and one more or less is no proof of a fault."""


def needs_rdma(wanted: NodeRequirements) -> bool:
    """Whether the job's network is an RDMA one."""
    return uses_verbs(wanted) or uses_libfabric(wanted)


def uses_verbs(wanted: NodeRequirements) -> bool:
    """Whether NCCL itself, or NVIDIA's plugin, opens InfiniBand or RoCE devices."""
    return wanted.network.startswith(VERBS_NETWORKS)


def uses_libfabric(wanted: NodeRequirements) -> bool:
    """Whether the network is EFA through libfabric."""
    return wanted.network in LIBFABRIC_NETWORKS


def setting(view: NodeView, name: str) -> str:
    """A variable as NCCL in a rank sees it: the job's, the agent's, that of /etc/nccl.conf."""
    found = view.wanted.env.get(name, view.environ.get(name))
    if found is None and name.startswith("NCCL_"):
        lines = [line.strip().partition("=") for line in optional(view, "etc/nccl.conf").splitlines()]
        found = next((value for key, _, value in lines if key == name), None)
    return (found or "").strip()


def hca_list(view: NodeView) -> HcaList:
    """What NCCL_IB_HCA asks for; libfabric does not read it."""
    return HcaList.parse(setting(view, "NCCL_IB_HCA")) if uses_verbs(view.wanted) else HcaList()


def find_ports(view: NodeView) -> tuple[Port, ...]:
    """The ports of all devices that the job's network can use; raises NotLookedAt without sysfs."""
    names = sorted(view.list(DEVICES), key=lambda name: [int(x) if x.isdigit() else x for x in _NATURAL.split(name)])
    if not names and not view.list("sys/class"):
        raise NotLookedAt("/sys/class: sysfs is not mounted")
    ports = [port for name in names for port in _ports(view, name)]
    return tuple(port for port in ports if (port.driver == EFA_DRIVER) == uses_libfabric(view.wanted))


def used_ports(view: NodeView) -> UsedPorts:
    """The ports that NCCL_IB_HCA names, else those of the fastest kind that it selects and the container may open."""
    hcas, ports = hca_list(view), find_ports(view)
    named = tuple(port for port in ports if hcas.names(port))
    if named:
        return UsedPorts(ports=named, named=True)
    selected = [port for port in ports if hcas.selects(port)]
    openable = set(device_files(view)) & {port.device for port in selected}
    return UsedPorts(ports=_main_kind([p for p in selected if not openable or p.device in openable]), named=False)


def judged_ports(view: NodeView) -> UsedPorts:
    """The ports that the job uses; raises NotLookedAt if there is none."""
    used = used_ports(view)
    if not used.ports:
        raise NotLookedAt("there is no RDMA port")
    return used


def line_rates_gb_s(view: NodeView) -> tuple[float, ...]:
    """The rates of the active ports that the job uses, in GB/s and one direction; empty without RDMA, or if unknown."""
    if not needs_rdma(view.wanted):
        return ()
    try:
        return tuple(port.rate_gbps / 8 for port in used_ports(view).ports if port.active and port.rate_gbps)
    except NotLookedAt:
        return ()


def device_files(view: NodeView) -> dict[str, str]:
    """Devices that have a file in /dev/infiniband: device to file."""
    verbs = "sys/class/infiniband_verbs"
    files = set(view.list("dev/infiniband"))
    return {optional(view, f"{verbs}/{each}/ibdev"): each for each in view.list(verbs) if each in files}


def gids(view: NodeView, port: Port) -> tuple[Gid, ...]:
    """The addresses of a RoCE port; most of its table is empty."""
    found = ((int(index), optional(view, f"{port.folder}/gids/{index}")) for index in view.list(f"{port.folder}/gids"))
    filled = sorted((index, IPv6Address(text)) for index, text in found if text and text.strip("0:"))
    return tuple(
        Gid(
            index=index,
            address=address,
            type=optional(view, f"{port.folder}/gid_attrs/types/{index}"),
            interface=optional(view, f"{port.folder}/gid_attrs/ndevs/{index}"),
        )
        for index, address in filled
    )


def usable_gids(found: Iterable[Gid]) -> tuple[Gid, ...]:
    """GIDs that reach other subnets, in NCCL's order of preference: RoCE v2, IPv4 before IPv6."""
    return tuple(sorted((g for g in found if g.is_v2 and g.routable), key=lambda g: (g.family, g.index)))


def partition_keys(view: NodeView, port: Port) -> dict[int, int]:
    """The partition keys of an InfiniBand port by index, without empty places."""
    keys = {
        int(at): int(optional(view, f"{port.folder}/pkeys/{at}") or "0", 16) for at in view.list(f"{port.folder}/pkeys")
    }
    return {at: key for at, key in sorted(keys.items()) if key}


def interface_of(view: NodeView, port: Port, found: tuple[Gid, ...]) -> str:
    """The network interface of a RoCE port in this network namespace; empty if there is none."""
    of_gids = [gid.interface for gid in (*usable_gids(found), *found) if gid.interface]
    names = (*of_gids, *view.list(f"{DEVICES}/{port.device}/device/net"))
    return next((name for name in names if view.list(f"sys/class/net/{name}")), "")


def optional(view: NodeView, path: str) -> str:
    """The text of an attribute that some drivers lack; empty then."""
    try:
        return view.read(path)
    except NotLookedAt:
        return ""


def _ports(view: NodeView, device: str) -> list[Port]:
    folder = f"{DEVICES}/{device}"
    try:
        driver = os.path.basename(os.readlink(view.root / folder / "device/driver"))
    except OSError:
        driver = ""
    model = optional(view, f"{folder}/board_id") or optional(view, f"{folder}/hca_type")
    firmware, node_type = (optional(view, f"{folder}/{name}") for name in ("fw_ver", "node_type"))
    return [
        Port(
            device=device,
            number=int(number),
            driver=driver,
            model=model,
            firmware=firmware,
            node_type=node_type,
            state=view.read(f"{folder}/ports/{number}/state"),
            phys_state=optional(view, f"{folder}/ports/{number}/phys_state"),
            rate=optional(view, f"{folder}/ports/{number}/rate"),
            link_layer=optional(view, f"{folder}/ports/{number}/link_layer"),
        )
        for number in sorted(view.list(f"{folder}/ports"), key=int)
    ]


def _main_kind(ports: list[Port]) -> tuple[Port, ...]:
    """The ports of the fastest kind, of the most frequent one of several: the others serve storage and management."""
    if not ports:
        return ()
    count = Counter(port.kind for port in ports)
    rate = {kind: max(port.rate_gbps for port in ports if port.kind == kind) for kind in count}
    main = max(count, key=lambda kind: (rate[kind], count[kind]))
    return tuple(port for port in ports if port.kind == main)
