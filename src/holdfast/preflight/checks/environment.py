"""Checks of the variables that ranks get: those that slow NCCL down, or fight the job's fabric."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from ipaddress import ip_address

from msgspec import Struct

from holdfast.findings import Finding, Owner, Severity
from holdfast.preflight.node_view import NodeView


class FightingVariable(Struct, frozen=True, kw_only=True):
    """A variable with values that make a run slow, or let it fail."""

    name: str
    fights: Callable[[str, NodeView], bool]
    """Whether this value is wrong on this node."""
    why: str
    severity: Severity = Severity.WARNING
    instead: str = "Unset it."


def _on(value: str, _: NodeView) -> bool:
    """NCCL and torch read every number but 0 as yes."""
    return value.lower() in {"1", "2", "y", "yes", "true", "on", "t"}


def _on_with_peers(value: str, view: NodeView) -> bool:
    return _on(value, view) and view.wanted.gpus > 1 and view.wanted.processes > 1


def _on_with_gpus(value: str, view: NodeView) -> bool:
    return _on(value, view) and view.wanted.gpus > 0


def _on_with_rdma(value: str, view: NodeView) -> bool:
    return _on(value, view) and view.wanted.network == "IB"


def _level_loc(value: str, view: NodeView) -> bool:
    return value.upper() in {"LOC", "0"} and view.wanted.gpus > 1


def _gdr_off(value: str, view: NodeView) -> bool:
    return value.upper() in {"LOC", "0"} and view.wanted.gpus > 0 and view.wanted.network == "IB"


def _only_sockets(value: str, view: NodeView) -> bool:
    return value.casefold() == "socket" and view.wanted.network != "Socket"


def _other_network(value: str, view: NodeView) -> bool:
    """`IBext_v10` is InfiniBand, and `Libfabric` is `AWS Libfabric`."""
    chosen, wanted = value.casefold(), view.wanted.network.casefold()
    return chosen != "socket" and not chosen.startswith(wanted) and not wanted.endswith(chosen)


def _is_loopback(value: str, view: NodeView) -> bool:
    with suppress(ValueError):
        return value.removeprefix("=") == "lo" and not ip_address(view.address).is_loopback
    return False


def _shared_file(value: str, view: NodeView) -> bool:
    return view.wanted.processes > 1 and "%p" not in value and not value.startswith("/dev/")


def _few_channels(value: str, view: NodeView) -> bool:
    return value.isdecimal() and 0 < int(value) <= 2 and view.wanted.gpus > 1  # NCCL uses 16 and more on a DGX


def _not_efa(value: str, view: NodeView) -> bool:
    return view.wanted.network == "AWS Libfabric" and "efa" not in value.lower()


def _no_plugin(value: str, view: NodeView) -> bool:
    return view.wanted.network == "AWS Libfabric" and value.lower() == "none"


def _few_devices(value: str, view: NodeView) -> bool:
    """The list ends before the first number that is not a device, as in `0,1,-1`."""
    devices = [word.strip() for word in value.split(",")]
    valid = next((at for at, word in enumerate(devices) if not word or word.startswith("-")), len(devices))
    return valid < view.wanted.gpus


def _blocks_in_job(_: str, view: NodeView) -> bool:
    """The launcher sets 0 for its ranks; only the job's `env` overrides it."""
    return _on(view.wanted.env.get("TORCH_NCCL_BLOCKING_WAIT", ""), view)


# https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html
# https://docs.pytorch.org/docs/stable/torch_nccl_environment_variables.html
# https://docs.pytorch.org/docs/stable/cuda_environment_variables.html
FIGHTING_VARIABLES = (
    FightingVariable(
        name="NCCL_IB_DISABLE",
        fights=_on_with_rdma,
        why="it forbids NCCL the InfiniBand or RoCE of the job's fabric",
        severity=Severity.ERROR,
    ),
    FightingVariable(
        name="NCCL_NET",
        fights=_only_sockets,
        why="it forces NCCL to TCP, and the job's fabric is {network}",
        severity=Severity.ERROR,
        instead="Unset it, or choose the fabric `tcp` in the job.",
    ),
    FightingVariable(
        name="NCCL_NET",
        fights=_other_network,
        why="NCCL may use only this network, and the job's fabric is {network}",
        instead="Unset it: the fabric sets its own.",
    ),
    FightingVariable(
        name="NCCL_NET_PLUGIN",
        fights=_no_plugin,
        why="NCCL loads no plugin, and reaches EFA by one only",
        severity=Severity.ERROR,
    ),
    FightingVariable(
        name="FI_PROVIDER",
        fights=_not_efa,
        why="libfabric uses another provider than efa, such as TCP",
        instead="Set FI_PROVIDER=efa, as the fabric does.",
    ),
    FightingVariable(
        name="NCCL_NET_GDR_LEVEL",
        fights=_gdr_off,
        why="it switches GPUDirect RDMA off: every byte passes through the memory of the host",
    ),
    FightingVariable(
        name="NCCL_P2P_DISABLE",
        fights=_on_with_peers,
        why="GPUs of a node exchange data through the memory of the host instead of NVLink or PCIe",
    ),
    FightingVariable(
        name="NCCL_P2P_LEVEL",
        fights=_level_loc,
        why="GPUs of a node exchange data through the memory of the host instead of NVLink or PCIe",
    ),
    FightingVariable(
        name="NCCL_SHM_DISABLE",
        fights=_on_with_peers,
        why="ranks of a node without peer access exchange data over the network",
    ),
    *(
        FightingVariable(
            name=name,
            fights=_few_channels,
            why="NCCL drives each GPU's links with this many channels, too few for NVLink or several adapters",
        )
        for name in ("NCCL_MAX_NCHANNELS", "NCCL_MAX_CTAS")
    ),
    FightingVariable(
        name="NCCL_PROTO",
        fights=lambda value, view: value.upper() == "LL" and view.wanted.gpus > 0,
        why="the protocol LL carries half of the bandwidth, and is meant for a few KiB",
    ),
    *(
        FightingVariable(
            name=name,
            fights=_is_loopback,
            why="no other node reaches a rank that listens on the loopback interface",
            instead="Name the interface that reaches the other nodes: `ip -br addr`.",
        )
        for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
    ),
    FightingVariable(
        name="NCCL_DEBUG_FILE",
        fights=_shared_file,
        why="all ranks of the node write this one file, and overwrite each other's lines",
        instead="Put %h and %p in its name: NCCL replaces them by host name and process.",
    ),
    FightingVariable(
        name="TORCH_NCCL_BLOCKING_WAIT",
        fights=_blocks_in_job,
        why="each rank waits on the CPU for each collective, and replaces the value with which replicas survive",
    ),
    FightingVariable(
        name="TORCH_DISTRIBUTED_DEBUG",
        fights=lambda value, _: value.upper() == "DETAIL",
        why="torch exchanges a message between all ranks before each collective",
    ),
    FightingVariable(
        name="CUDA_LAUNCH_BLOCKING",
        fights=_on_with_gpus,
        why="the CPU waits for each kernel, so that nothing overlaps",
    ),
    FightingVariable(
        name="PYTORCH_NO_CUDA_MEMORY_CACHING",
        fights=lambda value, view: bool(value) and view.wanted.gpus > 0,
        why="torch asks the driver for each tensor, which stops the GPU each time",
    ),
    FightingVariable(
        name="CUDA_VISIBLE_DEVICES",
        fights=_few_devices,
        why="it shows fewer GPUs than the {gpus} that the job wants of this node",
        severity=Severity.ERROR,
        instead="Unset it in the environment that starts the agent, or ask for fewer GPUs.",
    ),
)


def fighting_variables(view: NodeView) -> Iterator[Finding]:
    """No variable of the job or of this node slows NCCL down or forbids it the fabric."""
    of_ranks = {**view.environ, **view.wanted.env}
    for row in FIGHTING_VARIABLES:
        value = of_ranks.get(row.name)
        if value is None or not row.fights(value.strip(), view):
            continue
        of_job = row.name in view.wanted.env
        yield Finding(
            code="fighting-variable",
            severity=row.severity,
            what=f"{row.name}={value}: {row.why.format(network=view.wanted.network, gpus=view.wanted.gpus)}",
            where="the job's `env`" if of_job else "environment of the agent",
            evidence=(f"{row.name}={value}",),
            remedy=row.instead,
            owner=Owner.USER if of_job else Owner.CLUSTER,
        )
