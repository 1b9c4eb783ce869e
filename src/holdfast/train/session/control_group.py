"""Control-plane process group of one replica, and its consensus on what to do after a step.

Ranks receive requests (from the agent, SIGTERM, rank 0's clock) at different moments; a checkpoint or a stop is only
possible when all ranks do it after the same step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from enum import IntFlag
from typing import TypeVar, cast

import torch
import torch.distributed as dist

from holdfast.errors import ExitCode, HoldfastError, failure
from holdfast.findings import Finding
from holdfast.train.metrics.profiler import unrecorded

T = TypeVar("T")

CONSENSUS_EVERY_S = 0.25
"""Minimum seconds between two consensus rounds; with longer steps there is one round per step."""

MAX_SKIPPED_STEPS = 1000

BACKGROUND_TIMEOUT_S = 2 * 3600.0
"""Timeout for collectives between background threads: longer than the slowest checkpoint write."""


class StepAction(IntFlag):
    """Action at the end of a step; an action that any rank requests is taken by all ranks."""

    NOTHING = 0
    PROFILE = 1
    """Profile the next steps."""
    CHECKPOINT = 2
    STOP = 4
    """Checkpoint, then exit."""
    TRANSFER_STATE = 8
    """Transfer the state to the processes that replace these ranks, then exit."""
    PEER_CHECKPOINT = 16
    """Copy the state to another node's memory."""
    STOP_TOGETHER = 32
    """Stop after a step that all replicas agree on."""
    RECORD_MEMORY = 64
    """Record allocations of GPU memory while the next steps are profiled."""


NOTHING = StepAction.NOTHING
"""The result of nearly every step. Python 3.11 takes ten times as long to look it up through its class."""


@dataclass(frozen=True, kw_only=True)
class ControlGroup:
    """The ranks that step together, and this rank's index among them."""

    rank: int = 0
    world_size: int = 1
    group: dist.ProcessGroup | None = None
    """A separate Gloo group, so that its messages never queue behind gradients or wait for a GPU.

    None for a single rank.
    """

    @classmethod
    def join(cls, *, announced: int) -> ControlGroup:
        """Create the group on every rank; `announced` is the WORLD_SIZE that this rank was started with."""
        if not (dist.is_available() and dist.is_initialized()):
            if announced == 1:
                return cls()
            raise failure(
                "process-group-missing",
                f"a session of {announced} ranks was made before torch.distributed was initialised",
                exit_code=ExitCode.USAGE,
                evidence=(f"WORLD_SIZE={announced}",),
                remedy="call torch.distributed.init_process_group() before making the Session",
            )
        if dist.get_world_size() == 1:
            return cls()
        group = cast("dist.ProcessGroup", dist.new_group(backend="gloo"))  # Every rank is a member.
        return cls(rank=dist.get_rank(), world_size=dist.get_world_size(), group=group)

    def background_group(self) -> ControlGroup:
        """A second group of the same ranks, for background threads: one group would mix collectives of two threads."""
        if self.group is None:
            return self
        group = cast(
            "dist.ProcessGroup", dist.new_group(backend="gloo", timeout=timedelta(seconds=BACKGROUND_TIMEOUT_S))
        )
        return replace(self, group=group)

    def all(self, holds: bool) -> bool:
        """Whether the condition holds on every rank."""
        if self.group is None:
            return holds
        flag = torch.tensor([holds], dtype=torch.uint8)
        dist.all_reduce(flag, op=dist.ReduceOp.MIN, group=self.group)
        return bool(flag.item())

    def broadcast(self, value: T) -> T:
        """Return rank 0's value on every rank."""
        if self.group is None:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0, group=self.group)
        return values[0]

    def run_on_first(self, act: Callable[[], T]) -> T:
        """Run `act` on rank 0; every rank returns its result or raises its HoldfastError."""
        done: tuple[list[T], tuple[Finding, ...], ExitCode] = ([], (), ExitCode.OK)
        if self.rank == 0:
            try:
                done = ([act()], (), ExitCode.OK)
            except HoldfastError as error:
                done = ([], error.findings, error.exit_code)
        returned, findings, exit_code = self.broadcast(done)
        if findings:
            raise HoldfastError(findings, exit_code)
        return returned[0]

    def gather(self, value: T) -> list[T]:
        """Return every rank's value, by rank, on rank 0; an empty list on the others."""
        if self.group is None:
            return [value]
        values = [value] * self.world_size if self.rank == 0 else []
        dist.gather_object(value, values or None, dst=0, group=self.group)
        return values

    def all_gather(self, numbers: Sequence[int]) -> list[list[int]]:
        """Every rank's numbers, by rank, on every rank; all ranks give as many, of 64 bits."""
        own = torch.tensor([*map(int, numbers)], dtype=torch.int64)
        if self.group is None:
            return [own.tolist()]
        rows = [torch.empty_like(own) for _ in range(self.world_size)]
        dist.all_gather(rows, own, group=self.group)
        return [row.tolist() for row in rows]

    def send(self, tensor: torch.Tensor, to: int) -> Callable[[], None]:
        """Send a host tensor to one rank; the returned function waits until the send is complete."""
        work = dist.isend(tensor, to, self.group) if tensor.numel() else None
        return lambda: None if work is None else work.wait()  # pyright: ignore[reportReturnType]

    def receive(self, tensor: torch.Tensor, source: int) -> None:
        """Receive a tensor of the same size from one rank; empty tensors are neither sent nor awaited."""
        if tensor.numel():
            dist.recv(tensor, source, self.group)

    def first_not_none(self, value: T | None) -> T | None:
        """Return the value of the lowest rank that has one, on every rank; None if no rank has one."""
        return self.broadcast(next((each for each in self.gather(value) if each is not None), None))


_FINAL = StepAction.STOP | StepAction.TRANSFER_STATE
"""After these no rank is left for another round."""


class ActionConsensus:
    """Turns requests of single ranks into one action that all ranks take after the same step.

    About every `CONSENSUS_EVERY_S` an all-reduce combines the requests while the next step computes; an action takes
    effect at the step boundary after that. A blocking all-reduce would cost 1 ms instead of 0.04 ms (two ranks, Gloo,
    one machine of two cores); one per step would cost short steps some per cent. The same all-reduce agrees on how
    many steps to skip, because every rank must skip the same ones. Reading a key in the TCPStore is no cheaper, and
    cannot guarantee that no rank has already passed the step.
    """

    def __init__(self, ranks: ControlGroup) -> None:
        self._group = ranks.group
        self._reduced = torch.zeros(1 + len(StepAction), dtype=torch.int32)
        """Minus the smallest number of steps that any rank would skip, then one flag per requested action."""
        self._in_flight: dist.Work | None = None
        self._pending = NOTHING
        self._skip_steps = 1
        """Step boundaries until the next proposal."""
        self._boundary_at = time.monotonic()

    def next_action(self, requested: StepAction, *, scheduled: StepAction) -> StepAction:
        """Propose this rank's request and return the action that all ranks take now.

        `scheduled` is known to all ranks at this boundary. It drops the requests that it fulfils: a checkpoint that
        several ranks request is taken once.
        """
        if self._group is None:
            return requested | scheduled if scheduled else requested
        now = time.monotonic()
        step_s, self._boundary_at = now - self._boundary_at, now
        self._pending |= requested
        agreed = scheduled | self._take_result()
        self._pending &= ~agreed
        self._skip_steps -= 1
        if self._skip_steps <= 0 and not agreed & _FINAL:
            self._propose(max(1, min(MAX_SKIPPED_STEPS, int(CONSENSUS_EVERY_S / max(step_s, 1e-6)))))
        return agreed

    def _take_result(self) -> StepAction:
        """The agreed action, at the boundary after its proposal."""
        if self._in_flight is None:
            return NOTHING
        self._in_flight.wait()
        self._in_flight = None
        folded = [int(each) for each in self._reduced]
        self._skip_steps, wished = -folded[0], folded[1:]
        return StepAction(sum(wish for wish, has in zip(StepAction, wished, strict=True) if has))

    def _propose(self, steps: int) -> None:
        self._reduced[:] = torch.tensor([-steps, *(wish in self._pending for wish in StepAction)])
        self._pending = NOTHING
        with unrecorded():
            self._in_flight = dist.all_reduce(self._reduced, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
