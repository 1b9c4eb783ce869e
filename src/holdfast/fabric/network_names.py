"""The variable by which NCCL uses one network only."""

from __future__ import annotations

from holdfast.fabric.fabric import Variable

NCCL_ENV = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html"


def only_network(name: str) -> Variable:
    """NCCL_NET: the only network module that NCCL may use; if it is unavailable, NCCL fails instead of falling back."""
    return Variable("NCCL_NET", name, "NCCL fails without this network, instead of a slow run over TCP.")
