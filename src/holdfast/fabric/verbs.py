"""What the fabrics over RDMA verbs share: the variable by which NCCL uses one network only, and a pod's device."""

from __future__ import annotations

from holdfast.fabric.fabric import PodAccess, Variable

NCCL_ENV = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html"


def only_network(name: str) -> Variable:
    """NCCL_NET: the only network module that NCCL may use; if it is unavailable, NCCL fails instead of falling back."""
    return Variable("NCCL_NET", name, "NCCL fails without this network, instead of a slow run over TCP.")


VERBS = (only_network("IB"),)
"""Variables for NCCL's own transport over InfiniBand or RoCE."""

# Clusters name it `rdma/ib`, `rdma/shared_ib` or otherwise; the target sets the name. RDMA pins memory, which the
# kernel limits for processes without IPC_LOCK.
SHARED_DEVICES = PodAccess(per_node=1, capabilities=("IPC_LOCK",))
"""One device of a device plugin gives the pod all adapters of its machine."""
