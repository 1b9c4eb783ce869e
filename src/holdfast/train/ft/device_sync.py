"""Waits for a device, to read what it computes on the host: the one place where replicas' code does so.

A call here blocks until the device has done everything that was enqueued before, which is for ever if an operation
waits for a dead replica. So replica_group.py must have seen the operation complete.
"""

from __future__ import annotations

from typing import Any, cast

import torch

from holdfast.protocol.wait_frames import FOR_DEVICE, marked


@marked(FOR_DEVICE)
def read_host(tensor: torch.Tensor) -> list[Any]:
    """The values of a tensor, in one transfer: numbers, or lists of them."""
    return cast("list[Any]", tensor.tolist())


@marked(FOR_DEVICE)
def synchronize() -> None:
    """Wait until the device has computed everything, on any stream."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
