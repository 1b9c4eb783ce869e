"""Owns how the ranks of one replica speak among themselves and come to act as one at the same step.

Every rank can be asked for something (a request of its agent's, a SIGTERM, rank 0's clock), at moments that differ;
a checkpoint or a stop is only possible when all ranks do it after the same step.
"""

from __future__ import annotations

import time
from collections.abc import Callable
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
"""Seconds between two agreements where steps are shorter than that; else there is one at every step."""

MAX_SKIPPED_STEPS = 1000

BACKGROUND_TIMEOUT_S = 2 * 3600.0
"""Longest that one rank's second thread waits for another's: the slowest write of a checkpoint, and more."""


class StepAction(IntFlag):
    """What should happen at the end of a step; what any rank wishes all of them do."""

    NOTHING = 0
    PROFILE = 1
    """Profile the steps that follow."""
    CHECKPOINT = 2
    STOP = 4
    """Checkpoint, then leave."""
    TRANSFER_STATE = 8
    """Leave the state to the processes that take these ranks' places, then leave."""
    PEER_CHECKPOINT = 16
    """Copy the state to another node's memory."""
    STOP_TOGETHER = 32
    """Stop, after a step that all replicas agree on."""


NOTHING = StepAction.NOTHING
"""Nearly every step's. Python 3.11 takes ten times as long to find it through its class."""


@dataclass(frozen=True, kw_only=True)
class ControlGroup:
    """The ranks that step together, and which of them this is."""

    rank: int = 0
    world_size: int = 1
    group: dist.ProcessGroup | None = None
    """A Gloo group of the session's own, so that its words never queue behind gradients or wait for a GPU.

    None for a single rank.
    """

    @classmethod
    def join(cls, *, announced: int) -> ControlGroup:
        """Meet the other ranks, which all call this; `announced` is the WORLD_SIZE that this rank was started with."""
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
        """The same ranks with a group of their own, for a second thread of each: collectives of two would mix."""
        if self.group is None:
            return self
        group = cast(
            "dist.ProcessGroup", dist.new_group(backend="gloo", timeout=timedelta(seconds=BACKGROUND_TIMEOUT_S))
        )
        return replace(self, group=group)

    def all(self, holds: bool) -> bool:
        """Whether something holds on every rank."""
        if self.group is None:
            return holds
        held = torch.tensor([holds], dtype=torch.uint8)
        dist.all_reduce(held, op=dist.ReduceOp.MIN, group=self.group)
        return bool(held.item())

    def broadcast(self, value: T) -> T:
        """What rank 0 passed in, on every rank."""
        if self.group is None:
            return value
        held = [value]
        dist.broadcast_object_list(held, src=0, group=self.group)
        return held[0]

    def run_on_first(self, act: Callable[[], T]) -> T:
        """Have rank 0 do something: what it returns, or the HoldfastError that it raises, on every rank."""
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
        """What every rank passed in, by rank, on rank 0; nothing on the others."""
        if self.group is None:
            return [value]
        held = [value] * self.world_size if self.rank == 0 else []
        dist.gather_object(value, held or None, dst=0, group=self.group)
        return held

    def send(self, tensor: torch.Tensor, to: int) -> Callable[[], None]:
        """Send a tensor of the host's to one rank, which receives it; what is returned waits until that is done."""
        work = dist.isend(tensor, to, self.group) if tensor.numel() else None
        return lambda: None if work is None else work.wait()  # pyright: ignore[reportReturnType]

    def receive(self, tensor: torch.Tensor, source: int) -> None:
        """Wait for a tensor that one rank sends, of the same size; an empty one is neither sent nor awaited."""
        if tensor.numel():
            dist.recv(tensor, source, self.group)

    def first_not_none(self, value: T | None) -> T | None:
        """What the first rank that has something passed in, on every rank; None where none has."""
        return self.broadcast(next((each for each in self.gather(value) if each is not None), None))


_FINAL = StepAction.STOP | StepAction.TRANSFER_STATE
"""After these nobody is left to agree."""


class ActionConsensus:
    """Turns the wishes of single ranks into one action that all ranks take after the same step.

    About every `CONSENSUS_EVERY_S` the wishes are folded by an all-reduce that travels while the next step computes, so that a
    wish takes effect at the boundary after. Waiting for it at once would cost a round through all ranks (1 ms against
    0.04 ms here: two ranks, Gloo, one machine of two cores), and doing it at every step would cost quick steps some
    per cent. How many steps to let pass is agreed in the same all-reduce, for every rank must skip the same ones. A
    key in the TCPStore is no cheaper to ask for, and cannot promise that no rank has passed the step already.
    """

    def __init__(self, ranks: ControlGroup) -> None:
        self._group = ranks.group
        self._reduced = torch.zeros(1 + len(StepAction), dtype=torch.int32)
        """Minus the smallest number of steps that any rank would let pass, and for each wish whether one has it."""
        self._in_flight: dist.Work | None = None
        self._pending = NOTHING
        self._skip_steps = 1
        """Boundaries until the next proposal."""
        self._boundary_at = time.monotonic()

    def next_action(self, requested: StepAction, *, scheduled: StepAction) -> StepAction:
        """Give this rank's wish and what is `scheduled` at this boundary on all ranks anyhow; returns what all do now.

        A wish that this boundary fulfils is not passed on: asked of several ranks, a checkpoint is still taken once.
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
        """What was agreed, at the boundary after it was proposed."""
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
