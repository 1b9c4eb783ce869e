"""Connects ranks for a probe, for a bounded time, whatever the others do.

Neither Gloo nor NCCL can be interrupted while it connects: the calls run in threads, which the probe abandons.
"""

from __future__ import annotations

import math
import os
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed import AllreduceOptions, ReduceOp

from holdfast.train.torch_private import NCCL_BLOCKING_WAIT, NCCL_CONNECT_TIMEOUT, gloo_group, nccl_group

T = TypeVar("T")


def prepare_nccl(connect_s: float) -> None:
    """Bound the connecting of communicators that the probe abandons; call it before there are other threads."""
    os.environ.setdefault(NCCL_BLOCKING_WAIT, "0")  # now, because later changes must not move the environment
    os.environ[NCCL_CONNECT_TIMEOUT] = str(math.ceil(connect_s))


class Channel(Protocol):
    """Connected ranks."""

    @property
    def size(self) -> int:
        """How many they are."""
        ...

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        ...

    def all_reduce(self, tensor: torch.Tensor, times: int = 1, *, largest: bool = False) -> None:
        """Sum in place, or take the largest, at least once; returns when the last of them is done."""
        ...

    def abort(self) -> None:
        """End all operations; called in any thread."""
        ...


class Connect(Protocol):
    """Connects the members of a group, of which this process is number `index`; blocks until all are there."""

    def __call__(self, name: str, index: int, size: int, timeout_s: float) -> Channel: ...


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """Where the store listens."""

    host: str
    port: int

    def client(self, timeout_s: float) -> dist.TCPStore:
        """A connection: each thread has one, because a call that waits blocks the connection's other calls."""
        timeout = timedelta(seconds=max(1.0, timeout_s))
        return dist.TCPStore(self.host, self.port, is_master=False, wait_for_workers=False, timeout=timeout)

    def host_store(self) -> dist.TCPStore:
        """The store itself, in this process."""
        return dist.TCPStore(self.host, self.port, is_master=True, wait_for_workers=False)


class TorchChannel:
    """A process group outside of torch's default group."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group, self._device = group, device

    @property
    def size(self) -> int:
        return self._group.size()

    @property
    def device(self) -> torch.device:
        return self._device

    def all_reduce(self, tensor: torch.Tensor, times: int = 1, *, largest: bool = False) -> None:
        options = AllreduceOptions()
        options.reduceOp = ReduceOp.MAX if largest else ReduceOp.SUM
        if self._device.type == "cpu":
            for _ in range(times):  # one by one: Gloo would run several side by side, on the same memory
                self._group.allreduce([tensor], options).wait()
            return
        works = [self._group.allreduce([tensor], options) for _ in range(times)]
        while not works[-1].is_completed():
            time.sleep(0)
        works[-1].wait()  # raises its error

    def abort(self) -> None:
        cast("Any", self._group).abort()


@dataclass(frozen=True, slots=True)
class ConnectTorch:
    """Connects by NCCL for a GPU, by Gloo for the CPU."""

    store: StoreAddress
    device: torch.device

    def __call__(self, name: str, index: int, size: int, timeout_s: float) -> Channel:
        store = dist.PrefixStore(f"probe/group/{name}", self.store.client(timeout_s))
        timeout = timedelta(seconds=max(1.0, timeout_s))
        if self.device.type == "cuda":
            group = nccl_group(store, index, size, timeout, self.device, timeout_s)
        else:
            group = gloo_group(store, index, size, timeout)
        return TorchChannel(group, self.device)
