"""Reads both ends of an InfiniBand port's link with infiniband-diags: the adapter's and the switch's."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence

from msgspec import Struct

from holdfast.preflight.node_view import NodeView, NotLookedAt
from holdfast.preflight.rdma_devices import Port, optional

MAD_TIMEOUT_MS = 100
"""For one attempt of three; a switch answers within 1 ms, unless a management key forbids it."""
PROGRAM_TIMEOUT_S = 2.0
MAD_DEVICES = "sys/class/infiniband_mad"

_FIELD = re.compile(r"^([A-Za-z][\w ]*):\.*(.*)$", re.MULTILINE)  # `LinkWidthActive:.................4X`
_NUMBER = re.compile(r"\d+(?:\.\d+)?")
COUNTERS = {
    "SymbolErrorCounter": "symbol_error",
    "LinkErrorRecoveryCounter": "link_error_recovery",
    "LinkDownedCounter": "link_downed",
    "PortRcvErrors": "port_rcv_errors",
}
"""Counters of a bad link as perfquery names them, and as sysfs does. Those of four bits are full on healthy nodes."""


class LinkEnd(Struct, frozen=True, kw_only=True):
    """One end of a link, by its PortInfo."""

    state: str
    """`Active`; `Initialize` until a subnet manager has configured the link."""
    width: float
    """Lanes."""
    widths_enabled: frozenset[float]
    widths_supported: frozenset[float]
    speed: float
    """Gbit/s of a lane, as the specification rounds it: 25.78125 for EDR."""
    speeds_enabled: frozenset[float]
    speeds_supported: frozenset[float]
    counters: Mapping[str, int]
    """By the names of perfquery; empty if they cannot be read."""

    @property
    def rate(self) -> str:
        return f"{self.width:g}X {self.speed:g} Gbit/s"


class Link(Struct, frozen=True, kw_only=True):
    """A port of this node, and what its cable leads to."""

    port: Port
    own: LinkEnd
    other: LinkEnd
    other_node: str
    """Description of the switch, such as `MF0;leaf1:MQM9700/U1`."""
    other_port: int

    @property
    def switch_port(self) -> str:
        return f"{self.other_node} port {self.other_port}"


def read_link(view: NodeView, port: Port) -> Link:
    """Ask the port and its neighbour.

    Raises NotLookedAt if a program or permission is missing, or an answer; TimeoutError if a program hangs.
    """
    _require_management_file(view, port)
    beyond = f"0,{port.number}"
    node = _fields(_ask(view, port, "nodeinfo", beyond))
    described = _fields(_ask(view, port, "nodedesc", beyond))
    if not node.get("LocalPort", "").isdigit():
        raise NotLookedAt(f"`smpquery -D nodeinfo {beyond}` through {port.name}: no LocalPort")
    number = int(node["LocalPort"])
    other = _ask(view, port, "portinfo", beyond, str(number))
    lid = _switch_lid(view, port, beyond) if node.get("NodeType") == "Switch" else 0
    return Link(
        port=port,
        own=link_end(_ask(view, port, "portinfo", "0", str(port.number)), own_counters(view, port)),
        other=link_end(other, _switch_counters(view, port, lid, number) if lid else {}),
        other_node=described.get("Node Description", node.get("Guid", "")),
        other_port=number,
    )


def _switch_lid(view: NodeView, port: Port, beyond: str) -> int:
    """0 if the switch does not tell."""
    lid = _fields(_ask(view, port, "portinfo", beyond, "0")).get("Lid", "")
    return int(lid) if lid.isdigit() else 0


def _require_management_file(view: NodeView, port: Port) -> None:
    """Raise NotLookedAt unless this process may send management datagrams through the port."""
    for name in view.list(MAD_DEVICES):
        folder = f"{MAD_DEVICES}/{name}"
        if name.startswith("umad") and optional(view, f"{folder}/ibdev") == port.device:
            if optional(view, f"{folder}/port") != str(port.number):
                continue
            if os.access(view.root / "dev/infiniband" / name, os.R_OK | os.W_OK):
                return
            raise NotLookedAt(f"/dev/infiniband/{name}: missing, or no permission (only root may ask switches)")
    raise NotLookedAt(f"{port.name} has no /dev/infiniband/umad*: load ib_umad")


def link_end(port_info: str, counters: Mapping[str, int]) -> LinkEnd:
    """One end from the output of `smpquery portinfo`."""
    fields = _fields(port_info)
    if "LinkState" not in fields:
        raise NotLookedAt(f"smpquery portinfo: {port_info.strip()[-200:] or 'no answer'}")

    def numbers(*names: str) -> frozenset[float]:
        return frozenset(float(each) for name in names for each in _NUMBER.findall(_listed(fields.get(name, ""))))

    return LinkEnd(
        state=fields["LinkState"],
        width=max(numbers("LinkWidthActive"), default=0.0),
        widths_enabled=numbers("LinkWidthEnabled"),
        widths_supported=numbers("LinkWidthSupported"),
        speed=max(numbers("LinkSpeedActive", "LinkSpeedExtActive", "LinkSpeedExtActive2"), default=0.0),
        speeds_enabled=numbers("LinkSpeedEnabled", "LinkSpeedExtEnabled", "LinkSpeedExtEnabled2"),
        speeds_supported=numbers("LinkSpeedSupported", "LinkSpeedExtSupported", "LinkSpeedExtSupported2"),
        counters=counters,
    )


def _listed(text: str) -> str:
    """The text of a list such as `1X or 4X`; empty for a bare number, which stands for no or an unknown bit."""
    return text if "X" in text or "Gbps" in text else ""


def error_counters(report: str) -> dict[str, int]:
    """The counters of a bad link from the output of perfquery; empty if it failed."""
    fields = _fields(report)
    return {name: int(fields[name]) for name in COUNTERS if fields.get(name, "").isdigit()}


def own_counters(view: NodeView, port: Port) -> dict[str, int]:
    """The same counters of a node's own port from sysfs, as far as its driver has them."""
    texts = {name: optional(view, f"{port.folder}/counters/{file}") for name, file in COUNTERS.items()}
    return {name: int(text) for name, text in texts.items() if text.isdigit()}


def _switch_counters(view: NodeView, port: Port, lid: int, number: int) -> dict[str, int]:
    return error_counters(view.run(("perfquery", *_through(port), str(lid), str(number)), PROGRAM_TIMEOUT_S))


def _ask(view: NodeView, port: Port, what: str, *where: str) -> str:
    answer = view.run(("smpquery", *_through(port), "-D", what, *where), PROGRAM_TIMEOUT_S)
    if not _FIELD.search(answer):
        raise NotLookedAt(f"`smpquery -D {what} {' '.join(where)}` through {port.name}: no answer")
    return answer


def _through(port: Port) -> Sequence[str]:
    return "-C", port.device, "-P", str(port.number), "-t", str(MAD_TIMEOUT_MS)


def _fields(report: str) -> dict[str, str]:
    return {name: value.strip() for name, value in _FIELD.findall(report)}
