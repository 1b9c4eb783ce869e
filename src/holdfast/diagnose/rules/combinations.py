"""Combinations of weak matches that together decide a cause, where each alone leaves it open."""

from __future__ import annotations

from msgspec import Struct

from holdfast.diagnose.failure_classes import Confidence, FailureClass
from holdfast.diagnose.rules.nccl import GIVE_DEVICES


class Combination(Struct, frozen=True, kw_only=True):
    """Matches that together decide."""

    code: str
    requires: tuple[str, ...]
    """Codes of rules, all of which must match; the first is quoted first."""
    failure_class: FailureClass
    confidence: Confidence
    message: str
    remedy: tuple[str, ...]


_CONNECTION_FAILURES = ("connect-timeout", "connect-refused", "connection-closed", "nccl-unhandled")
"""Rules whose lines also appear where peers cannot reach one another."""

COMBINATIONS: tuple[Combination, ...] = (
    *(
        Combination(
            code="gid-index",
            requires=(failed, "gid-link-local"),
            failure_class=FailureClass.NETWORK_LOSS,
            confidence=Confidence.LIKELY,
            message=f"{what} while a port offers a link-local GID: the wrong GID index is in use",
            remedy=(
                "NCCL_IB_GID_INDEX of the `::ffff:` RoCE v2 entry of show_gids (mostly 3), the same on every node",
            ),
        )
        for failed, what in (
            ("queue-pair-timeout", "RDMA connections time out"),
            ("completion-retry", "the peer does not answer"),
        )
    ),
    Combination(
        code="rdma-device-missing",
        requires=("no-rdma-device", "rdma-requested"),
        failure_class=FailureClass.RDMA_DEVICE_MISSING,
        confidence=Confidence.LIKELY,
        message="the job is configured for RDMA, and no RDMA device is visible to the process",
        remedy=GIVE_DEVICES,
    ),
    *(
        Combination(
            code="oom-killed",
            requires=("host-oom-kill", died),
            failure_class=FailureClass.OOM_HOST,
            confidence=Confidence.CERTAIN,
            message="the kernel killed a rank because host memory ran out",
            remedy=(
                "raise the memory limit of the pod or Slurm step, or use less: fewer DataLoader workers, smaller buffers",
            ),
        )
        for died in ("killed", "data-worker-killed")
    ),
    *(
        Combination(
            code="single-process-work",
            requires=(waited, "single-process-work"),
            failure_class=FailureClass.STRAGGLER,
            confidence=Confidence.LIKELY,
            message="ranks waited for one that did long work alone: preparing data, or saving",
            remedy=(
                "do it before the process group is created, or split it over all ranks",
                "a longer timeout for that group only: init_process_group(timeout=...), new_group(timeout=...)",
            ),
        )
        for waited in ("watchdog-timeout", "gloo-timeout", "watchdog-stuck", "main-process-first")
    ),
    Combination(
        code="single-process-work",
        requires=("unique-id-timeout", "single-process-work"),
        failure_class=FailureClass.STRAGGLER,
        confidence=Confidence.LIKELY,
        message="ranks waited for rank 0 to begin their first collective, while it did long work alone: preparing data, "
        "or loading",
        remedy=(
            "do it before the process group is created, or split it over all ranks",
            "init_process_group(timeout=...) longer than that work",
        ),
    ),
    *(
        Combination(
            code="bridge-interface-used",
            requires=(failed, "bridge-listed"),
            failure_class=FailureClass.WRONG_INTERFACE,
            confidence=Confidence.LIKELY,
            message="a connection fails, and NCCL also uses a bridge interface that other nodes cannot reach",
            remedy=("NCCL_SOCKET_IFNAME=^lo,docker,veth,virbr,br-, or the one interface that reaches the other nodes",),
        )
        for failed in _CONNECTION_FAILURES
    ),
    *(
        Combination(
            code="loopback-interface-used",
            requires=(failed, "loopback-chosen"),
            failure_class=FailureClass.WRONG_INTERFACE,
            confidence=Confidence.LIKELY,
            message="ranks cannot reach one another, and NCCL chose an address that other nodes cannot reach: loopback, "
            "link-local or a container bridge",
            remedy=(
                "NCCL_SOCKET_IFNAME=eth0 and GLOO_SOCKET_IFNAME=eth0 (the interface that reaches the other nodes; `ip -br addr`)",
                "the host's own name must not resolve to 127.x in /etc/hosts",
            ),
        )
        for failed in _CONNECTION_FAILURES
    ),
    Combination(
        code="some-ranks-on-tcp",
        requires=("net-socket", "net-rdma"),
        failure_class=FailureClass.TCP_FALLBACK,
        confidence=Confidence.LIKELY,
        message="some ranks use the fast network and others plain TCP",
        remedy=("compare image, RDMA resource and plugin of the nodes whose lines show Socket with the other nodes",),
    ),
)
