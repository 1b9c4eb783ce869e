"""Recognizes the taints by which a cluster announces the end of a machine, before it takes the machine's pods."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

HOSTNAME_LABEL = "kubernetes.io/hostname"
MACHINES_PER_REQUEST = 50
"""A machine's object has up to 20 KB, and a selector is part of the address."""

ANNOUNCING_TAINTS = (
    # https://github.com/aws/aws-node-termination-handler: spot interruptions, rebalancing, scheduled maintenance
    "aws-node-termination-handler/",
    # https://karpenter.sh/docs/concepts/disruption: interruption, consolidation, expiry; `disruption` before v1
    "karpenter.sh/disrupted",
    "karpenter.sh/disruption",
    # https://cloud.google.com/kubernetes-engine/docs/concepts/spot-vms: graceful shutdown of preempted VMs
    "cloud.google.com/impending-node-termination",
    # https://github.com/kubernetes/autoscaler: set right before the drain of a machine that is scaled down
    "ToBeDeletedByClusterAutoscaler",
)
"""Beginnings of the keys of taints after which a machine's pods are taken within minutes."""


def selectors(machines: Iterable[str]) -> Iterator[str]:
    """Label selectors that together select these machines."""
    names = sorted(machines)
    for first in range(0, len(names), MACHINES_PER_REQUEST):
        yield f"{HOSTNAME_LABEL} in ({','.join(names[first : first + MACHINES_PER_REQUEST])})"


def announced_end(machine: Mapping[str, Any]) -> str:
    """The key of the taint that announces the end of a machine; empty if none does."""
    taints = (taint for taint in machine["spec"].get("taints", ()) if taint["effect"] != "PreferNoSchedule")
    return next((taint["key"] for taint in taints if taint["key"].startswith(ANNOUNCING_TAINTS)), "")
