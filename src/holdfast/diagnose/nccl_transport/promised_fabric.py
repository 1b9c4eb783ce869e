"""Judges what a node has observed of a communicator against the fabric that the run was promised."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct
from msgspec.structs import replace

from holdfast.diagnose.nccl_transport.causes import Cause, Effect, first_cause
from holdfast.diagnose.nccl_transport.networks import Network, expected_network, network_of
from holdfast.diagnose.nccl_transport.transport_report import FabricOutcome
from holdfast.events import FabricObserved
from holdfast.fabric.catalog import CATALOG
from holdfast.findings import Finding, Owner, Severity

_TCP, _VERBS = "TCP", "IB"
_GDR = "/GDRDMA"
_DIRECT = frozenset({"IB", "OFI"})
"""Networks whose NICs reach GPU memory themselves, if the node lets them."""
_OF_PLUGINS = ("plugin failed", "no plugin")
"""Causes that come first for a network that NCCL has only by a plugin."""
_OF_SOCKETS = frozenset({"no interface"})
"""Causes of a failure that any network may have; the others are those of verbs."""


class FabricJudgement(Struct, frozen=True, kw_only=True):
    """Whether a communicator has the fabric that its run was promised, in one line."""

    outcome: FabricOutcome
    line: str
    """Such as `infiniband, 8 NICs, GPUDirect, as promised`; empty if nothing can be said."""
    finding: Finding | None = None
    other_network: bool = False
    """Whether the nodes are connected by another network than the fabric's."""


def judge(seen: FabricObserved) -> FabricJudgement:
    """The judgement on one communicator by one node's ranks."""
    fabric = CATALOG.get(seen.promised)
    used = {network_of(name).name for name in _networks(seen)}
    if fabric is None or not seen.spans_nodes:
        return FabricJudgement(outcome=FabricOutcome.UNKNOWN, line="")
    wanted, layer = expected_network(fabric)
    if wanted.name != _TCP and _TCP in used:
        return _fallback(seen, wanted)
    if used and wanted.name not in used:
        found = _degraded(seen, f"{_many(used)} instead of {seen.promised}", wanted.remedy)
        return replace(found, other_network=True)
    if failing := first_cause(
        {name for name in seen.causes if wanted.name == _VERBS or name in _OF_SOCKETS}, Effect.FAILURE
    ):
        return _failed(seen, failing)
    if not used:
        return FabricJudgement(outcome=FabricOutcome.UNKNOWN, line="")
    if seen.other_interfaces:
        what = f"{_many(used)} over {', '.join(seen.other_interfaces)}, which NCCL_SOCKET_IFNAME does not name"
        remedy = "Set NCCL_SOCKET_IFNAME in `fabric.env` only, and nowhere in the program or the image."
        return replace(_degraded(seen, what, remedy), other_network=True)
    if layer and (wrong := [device for device in seen.devices if not device.endswith(f"/{layer}")]):
        return _degraded(seen, f"{', '.join(wrong[:4])} are not {layer}", "Name those that are in NCCL_IB_HCA.")
    if seen.findings:
        worst = seen.findings[0]
        return _degraded(seen, worst.what, worst.remedy, worst.evidence)
    if seen.differing:
        return _degraded(seen, seen.differing[0], "Compare the devices and the variables of this rank with the others.")
    return FabricJudgement(outcome=FabricOutcome.VERIFIED, line=", ".join((*_facts(seen), "as promised")))


def _networks(seen: FabricObserved) -> Iterator[str]:
    """The networks in use between nodes; before any connection, the network that NCCL chose."""
    for route in seen.between:
        kind, _, name = route.removesuffix(_GDR).partition("/")
        if kind == "NET":
            yield name
    if not seen.between and seen.network:
        yield seen.network


def _facts(seen: FabricObserved) -> Iterator[str]:
    yield seen.promised
    if seen.nics:
        yield f"{seen.nics} NIC{'s' * (seen.nics > 1)}"
    direct = [route.endswith(_GDR) for route in seen.between if network_of(_name(route)).name in _DIRECT]
    if any(direct):
        yield "GPUDirect" if all(direct) else "GPUDirect in part"


def _name(route: str) -> str:
    return route.removesuffix(_GDR).partition("/")[2]


def _fallback(seen: FabricObserved, wanted: Network) -> FabricJudgement:
    plugin = next((name for name in _OF_PLUGINS if name in seen.causes), "")
    others = seen.causes.keys() - set(_OF_PLUGINS)
    cause = first_cause({plugin} if plugin and wanted.name != "IB" else others, Effect.SOCKETS)
    because = ": ".join((*seen.differing[:1], *((cause.phrase,) if cause else ())))
    line = f"{_TCP} instead of {seen.promised}"
    finding = Finding(
        code=FabricOutcome.TCP_FALLBACK.value,
        severity=Severity.WARNING,
        what=f"plain TCP sockets carry the traffic between nodes instead of {seen.promised}"
        + (f": {because}" if because else ""),
        where=f"node{seen.node}",
        evidence=(seen.causes[cause.name],) if cause else tuple(seen.between)[:2] or (f"Using network {seen.network}",),
        remedy=cause.remedy if cause else wanted.remedy,
        owner=Owner.CLUSTER,
    )
    return FabricJudgement(outcome=FabricOutcome.TCP_FALLBACK, line=line, finding=finding, other_network=True)


def _failed(seen: FabricObserved, cause: Cause) -> FabricJudgement:
    finding = Finding(
        code=FabricOutcome.FAILED.value,
        severity=Severity.WARNING,
        what=f"NCCL cannot connect the nodes by {seen.promised}: {cause.phrase}",
        where=f"node{seen.node}",
        evidence=(seen.causes[cause.name],),
        remedy=cause.remedy,
        owner=Owner.CLUSTER,
    )
    line = f"{seen.promised}, but NCCL cannot connect the nodes: {cause.phrase}"
    return FabricJudgement(outcome=FabricOutcome.FAILED, line=line, finding=finding)


def _degraded(seen: FabricObserved, what: str, remedy: str, evidence: tuple[str, ...] = ()) -> FabricJudgement:
    finding = Finding(
        code=FabricOutcome.DEGRADED.value,
        severity=Severity.WARNING,
        what=f"the fabric is not as good as {seen.promised} promises: {what}",
        where=f"node{seen.node}",
        evidence=evidence or tuple(seen.between)[:4],
        remedy=remedy,
        owner=Owner.CLUSTER,
    )
    line = ", ".join((*_facts(seen), f"but {what}"))
    return FabricJudgement(outcome=FabricOutcome.DEGRADED, line=line, finding=finding)


def _many(names: set[str]) -> str:
    return " and ".join(sorted(names))
