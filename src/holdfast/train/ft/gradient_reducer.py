"""Averages gradients over all replicas, in buckets whose all-reduce overlaps the backward pass.

A bucket is sent when its gradients are ready and the previous bucket was sent, so that all replicas send the same
order, whatever order autograd uses. The end of the backward pass waits for all buckets: later code, such as clipping,
sees the mean. Gradients that DDP may still change are sent after the backward pass. Connections between replicas, and
steps that lose one: replica_group.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from holdfast.errors import ExitCode, HoldfastError, failure
from holdfast.train.ft import device_sync
from holdfast.train.session.agent_client import log_line
from holdfast.train.torch_private import after_backward, local_part, sharded, version_of

if TYPE_CHECKING:  # TorchFT takes time to import
    from holdfast.train.ft.replica_group import ReplicaGroup

FIRST_BYTES = 1 << 20
"""Size of the first bucket: small, so that communication starts early, as in DDP."""
BUCKET_BYTES = 25 << 20
MAX_INTERRUPTED = 3
"""Backward passes in a row of which the last to raise an error, which the program catches, ends the program."""


class GradientReducer:
    """Averages the gradients of one model over the replicas, in each backward pass while it is `armed`."""

    def __init__(self, model: nn.Module, link: ReplicaGroup, *, ddp_reduces: bool) -> None:
        """`ddp_reduces`: whether a DDP module may reduce gradients inside this replica."""
        self.armed = True
        self.request_stop = False
        """Whether this replica requests a stop; sent with each step's gradients, and the same on all its ranks."""
        self.stop_requested = False
        """Whether any replica requests a stop in the current step: known to all that have its gradients."""
        self._link = link
        parameters = [each for each in reversed([*model.parameters()]) if each.requires_grad]
        # FSDP2 calls the hook with a reduced gradient. For any other parameter, DDP may still have to reduce the
        # gradient over several ranks: its wrapper may be invisible, as the model may be the module inside it. So these
        # gradients are sent after the backward pass.
        self._defer_all = ddp_reduces and not all(isinstance(each, DTensor) for each in parameters)
        parts = [*_bucketize(parameters)]
        self._buckets = [_Bucket(part) for part in parts]
        self._bucket_of: dict[torch.Tensor, _Bucket] = {
            each: bucket for part, bucket in zip(parts, self._buckets, strict=True) for each in part
        }
        self._launched = 0
        """Number of buckets sent."""
        self._finish_queued = False
        """Whether a callback for the end of this backward pass is queued."""
        self._interrupted = 0
        """Backward passes that raised an error, since the last whole one."""
        self._verified = False
        """Whether a backward pass has shown that no code overwrites the means."""
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._on_gradient)

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        """A gradient is ready; called by autograd, and by FSDP2 after it has reduced it."""
        if not self.armed or self._link.count == 1:
            return
        bucket = self._bucket_of[parameter]
        if bucket.sent:
            self.fail_if_interrupted()
        if not self._finish_queued:
            self._finish_queued = True
            after_backward(self._finish_late if self._defer_all else self._finish)
        if not self._defer_all:
            bucket.add(parameter, self._link.count)
            self._launch_buckets(whole=True)

    def fail_if_interrupted(self) -> None:
        """Fail the step if a backward pass of it raised an error, which the program may have caught.

        Torch has dropped the callback for its end, and a part of its gradients may be on their way. Raises
        HoldfastError if this comes again and again: the step would be repeated forever.
        """
        if self._finish_queued:
            self._interrupted += 1
            log_line("a backward pass raised an error while replicas exchanged gradients: the step is discarded")
            self._link.fail(RuntimeError("a backward pass raised an error"))
            self._reset()
            if self._interrupted == MAX_INTERRUPTED:
                raise _interrupted_again()

    def _launch_buckets(self, *, whole: bool) -> None:
        """Send the next buckets; incomplete ones only after the last gradient."""
        while self._launched < len(self._buckets) and (not whole or self._buckets[self._launched].complete):
            self._link.start_allreduce(
                self._buckets[self._launched].pack(self._link.count, request_stop=self.request_stop)
            )
            self._launched += 1

    def _finish_late(self) -> None:
        after_backward(self._finish)

    def _finish(self) -> None:
        self._launch_buckets(whole=False)
        arrived = self._link.wait_all()
        if not arrived:
            self._reset()
            return
        self._launched, self._finish_queued, self._interrupted = 0, False, 0
        self._unpack()
        if not self._verified:
            after_backward(self._verify)

    def _reset(self) -> None:
        self._launched, self._finish_queued = 0, False
        for bucket in self._buckets:
            bucket.reset()

    def _unpack(self) -> None:
        """Store the means, after a single read of what was sent behind the gradients of all buckets."""
        sent = [bucket.trailer for bucket in self._buckets]
        values = iter(device_sync.read_host(torch.cat([each.to(sent[0].device, torch.float32) for each in sent])))
        for bucket, trailer in zip(self._buckets, sent, strict=True):
            *present, stop_flags = islice(values, len(trailer))
            bucket.unpack(present)
            self.stop_requested = self.stop_requested or stop_flags > 0

    def _verify(self) -> None:
        """Raise HoldfastError if the same backward pass has changed the means: replicas would diverge.

        A wrapper around the session's model does that if it copies gradients back at the end. One check is enough: such
        a wrapper does it in every backward pass.
        """
        if (number := sum(bucket.overwritten() for bucket in self._buckets)) > 0:
            raise _overwritten(number)
        self._verified = True


class _Bucket:
    """Gradients sent together, followed by the count of replicas that have each, and the stop request."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.sent = False
        """Whether an all-reduce of it has begun in this backward pass."""
        self._parameters = parameters
        self._added: set[torch.Tensor] = set()
        self._averaged: list[nn.Parameter] = []
        """Parameters that received the mean in the last backward pass."""
        self._version = 0
        """Version of the means' memory at that time."""
        self._allocate()

    def _allocate(self) -> None:
        like = local_part(self._parameters[0])
        sizes = [local_part(each).numel() for each in self._parameters]
        self._flat = like.new_empty(sum(sizes) + len(sizes) + 1)
        parts = cast("Sequence[torch.Tensor]", self._flat.split([*sizes, len(sizes), 1]))
        *_, self._present, self._stop_flags = parts
        self.trailer = self._flat[sum(sizes) :]
        """What is sent behind the gradients."""
        self._views: dict[torch.Tensor, torch.Tensor] = {
            each: part.view_as(local_part(each)) for each, part in zip(self._parameters, parts, strict=False)
        }

    @property
    def complete(self) -> bool:
        return len(self._added) == len(self._parameters)

    def add(self, parameter: torch.Tensor, count: int) -> None:
        """Copy a gradient in, divided by `count`; FSDP2 may deliver one twice."""
        assert parameter.grad is not None
        self._added.add(parameter)
        torch.mul(local_part(parameter.grad), 1 / count, out=self._views[parameter])

    def pack(self, count: int, *, request_stop: bool) -> torch.Tensor:
        """The tensor to send. Gradients that this backward pass did not compute may remain from the previous one."""
        self.sent = True
        self._stop_flags.fill_(request_stop)
        if self.complete:
            self._present.fill_(1)
            return self._flat
        for parameter, place in self._views.items():
            if parameter not in self._added and parameter.grad is not None:
                self.add(parameter, count)
            elif parameter not in self._added:
                place.zero_()
        self._present.copy_(torch.tensor([each in self._added for each in self._parameters]))
        return self._flat

    def reset(self) -> None:
        """Allocate new memory after a failed all-reduce: the aborted operation may still write to the old."""
        self.sent = False
        self._added.clear()
        self._allocate()

    def unpack(self, present: Sequence[float]) -> None:
        """Store the received mean as the gradients; gradients that no replica has (`present` is 0) stay None."""
        self.sent = False
        self._added.clear()
        self._averaged = [each for each, count in zip(self._parameters, present, strict=True) if count > 0]
        for parameter in self._averaged:
            _set_grad(parameter, self._views[parameter])
        self._version = version_of(self._flat)

    def overwritten(self) -> int:
        """Number of gradients that are no longer the mean; FSDP2's use separate memory and are not checked."""
        grads = [(each.grad, self._views[each]) for each in self._averaged if not isinstance(each, DTensor)]
        return sum(grad is not mean or version_of(mean) != self._version for grad, mean in grads)


def _set_grad(parameter: torch.Tensor, mean: torch.Tensor) -> None:
    if not isinstance(parameter, DTensor):
        parameter.grad = mean
    elif parameter.grad is not None:
        local_part(parameter.grad).copy_(mean)
    else:
        parameter.grad = sharded(mean.clone(), parameter)


def _overwritten(number: int) -> HoldfastError:
    return failure(
        "replicas-gradients-overwritten",
        f"{number} gradients were overwritten after they were averaged over the replicas",
        exit_code=ExitCode.USAGE,
        where="backward()",
        evidence=("the optimizer has not stepped: the replicas would end with different weights",),
        remedy="give Session(model=...) the outermost wrapper, such as the DistributedDataParallel, and not the module "
        "inside it; any other wrapper that reduces gradients by itself cannot be trained with recovery.replicas",
    )


def _interrupted_again() -> HoldfastError:
    return failure(
        "backward-interrupted",
        f"{MAX_INTERRUPTED} backward passes in a row ended before all gradients were there",
        exit_code=ExitCode.USAGE,
        where="backward()",
        evidence=("each step was discarded: a part of its gradients had been exchanged with the other replicas",),
        remedy="if the program catches an out-of-memory error of backward(), make the batch smaller; a module of FSDP2 "
        "that a forward pass uses twice cannot be trained with recovery.replicas",
    )


def _bucketize(parameters: Iterable[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Group consecutive parameters of one kind into buckets of limited size."""
    part: list[nn.Parameter] = []
    held, room = 0, FIRST_BYTES
    for parameter in parameters:
        local = local_part(parameter)
        alike = not part or (local.dtype, local.device) == (local_part(part[0]).dtype, local_part(part[0]).device)
        if part and (not alike or held >= room):
            yield part
            part, held, room = [], 0, BUCKET_BYTES
        part.append(parameter)
        held += local.nbytes
    if part:
        yield part
