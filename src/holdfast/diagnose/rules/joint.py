"""Owns what several weak facts mean together, where each alone leaves open what it was."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.diagnose.classes import Class
from holdfast.diagnose.rules.rdma import GIVE_DEVICES
from holdfast.diagnose.rules.row import Sureness


@dataclass(frozen=True, kw_only=True)
class Joint:
    """Facts that, all seen, decide."""

    code: str
    needs: tuple[str, ...]
    """Codes of rules, all of which must be there; the first is quoted first."""
    klass: Class
    sure: Sureness
    says: str
    remedy: tuple[str, ...]


_UNREACHED = ("connect-timeout", "connect-refused", "connection-closed", "nccl-unhandled")
"""Rules whose lines also come where peers cannot reach one another."""

JOINTS: tuple[Joint, ...] = (
    Joint(
        code="gid-index",
        needs=("queue-pair-timeout", "gid-link-local"),
        klass=Class.NETWORK_LOSS,
        sure=Sureness.LIKELY,
        says="RDMA connections time out while a port offers a link-local GID: the wrong GID index is in use",
        remedy=("NCCL_IB_GID_INDEX of the `::ffff:` RoCE v2 entry of show_gids (mostly 3), the same on every node",),
    ),
    Joint(
        code="gid-index",
        needs=("completion-retry", "gid-link-local"),
        klass=Class.NETWORK_LOSS,
        sure=Sureness.LIKELY,
        says="the peer does not answer while a port offers a link-local GID: the wrong GID index is in use",
        remedy=("NCCL_IB_GID_INDEX of the `::ffff:` RoCE v2 entry of show_gids (mostly 3), the same on every node",),
    ),
    Joint(
        code="rdma-device-missing",
        needs=("no-rdma-device", "rdma-meant"),
        klass=Class.RDMA_DEVICE_MISSING,
        sure=Sureness.LIKELY,
        says="the job was told to use RDMA, and no RDMA device is visible to the process",
        remedy=GIVE_DEVICES,
    ),
    *(
        Joint(
            code="killed-for-memory",
            needs=("host-memory-killer", died),
            klass=Class.OOM_HOST,
            sure=Sureness.CERTAIN,
            says="a rank was killed by the kernel because host memory ran out",
            remedy=(
                "raise the memory limit of the pod or Slurm step, or use less: fewer DataLoader workers, smaller buffers",
            ),
        )
        for died in ("killed", "data-worker-killed")
    ),
    *(
        Joint(
            code="work-of-one",
            needs=(waited, "work-of-one"),
            klass=Class.STRAGGLER,
            sure=Sureness.LIKELY,
            says="ranks waited for one that did long work alone: preparing data, or saving",
            remedy=(
                "do it before the process group is made, or on all ranks at once, each its part",
                "a longer timeout for that group only: init_process_group(timeout=...), new_group(timeout=...)",
            ),
        )
        for waited in ("watchdog-timeout", "gloo-timeout", "watchdog-stuck", "waits-first")
    ),
    Joint(
        code="work-of-one",
        needs=("unique-id-awaited", "work-of-one"),
        klass=Class.STRAGGLER,
        sure=Sureness.LIKELY,
        says="ranks waited for rank 0 to begin their first collective, and it did long work alone: preparing data, or loading",
        remedy=(
            "do it before the process group is made, or on all ranks at once, each its part",
            "init_process_group(timeout=...) longer than that work",
        ),
    ),
    *(
        Joint(
            code="bridge-taken",
            needs=(failed, "bridge-listed"),
            klass=Class.WRONG_INTERFACE,
            sure=Sureness.LIKELY,
            says="a connection fails, and NCCL spreads its connections over a bridge that other nodes cannot reach",
            remedy=("NCCL_SOCKET_IFNAME=^lo,docker,veth,virbr,br-, or the one interface that reaches the others",),
        )
        for failed in _UNREACHED
    ),
    *(
        Joint(
            code="loopback-taken",
            needs=(failed, "loopback-chosen"),
            klass=Class.WRONG_INTERFACE,
            sure=Sureness.LIKELY,
            says="ranks do not reach one another, and NCCL chose an address that other nodes cannot reach: loopback, link-local or a container bridge",
            remedy=(
                "NCCL_SOCKET_IFNAME=eth0 and GLOO_SOCKET_IFNAME=eth0 (the interface that reaches the other nodes; `ip -br addr`)",
                "the host's own name must not resolve to 127.x in /etc/hosts",
            ),
        )
        for failed in _UNREACHED
    ),
    Joint(
        code="one-node-on-tcp",
        needs=("net-socket", "net-fast"),
        klass=Class.TCP_FALLBACK,
        sure=Sureness.LIKELY,
        says="some ranks use the fast network and others plain TCP",
        remedy=(
            "compare image, RDMA resource and plugin of the nodes whose lines say Socket with those of the others",
        ),
    ),
)
