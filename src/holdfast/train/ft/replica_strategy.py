"""Owns a replica's part in training with others: who takes part, when a step counts, and how one that was away is back.

Before a step the replicas find each other, and one that is behind takes the others' state. The optimiser's step is
held back until all that this replica has heard of is sound; where a replica was lost it changes nothing, the step
counts for nobody who noticed, and is done again with the same samples. Refuses to own the gradients' way
(gradient_reducer.py), TorchFT (replica_group.py), and what a step is (session.py).
"""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import wraps
from types import MethodType
from typing import Any, NamedTuple, Protocol, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from holdfast.errors import ExitCode, HoldfastError, failure
from holdfast.train.checkpoint import rng
from holdfast.train.checkpoint.train_state import PostStepState, TrainState
from holdfast.train.ft import live_recovery
from holdfast.train.ft.gradient_reducer import GradientReducer
from holdfast.train.ft.wrappers import GradientSync, refuse_unsupported
from holdfast.train.session.rank_config import RankConfig
from holdfast.train.session.rank_coordinator import RankCoordinator


class TrainingProgress(NamedTuple):
    """How far training is."""

    step: int
    samples: int | None


class StoppedWhileWaiting(Exception):
    """This replica was told to end while it waited for the others, and they have not come."""

    def __init__(self, progress: TrainingProgress) -> None:
        super().__init__(progress)
        self.progress = progress
        """How far its training is."""


class ReplicaStrategy(Protocol):
    """What a session asks of the replicas."""

    @property
    def count(self) -> int:
        """That take part in the step in hand."""
        ...

    @property
    def replica_index(self) -> int:
        """Of this one among them, from 0."""
        ...

    @property
    def metrics(self) -> dict[str, float]:
        """What a report of the step says of them."""
        ...

    def begin_step(self, progress: TrainingProgress, *, ended: bool) -> TrainingProgress:
        """Get ready for the step after this; says after which step training stands in truth. All ranks call it.

        Also after the last, where training has `ended`: there may be one that it does not count for. Raises Unmet, as
        `settle` does.
        """
        ...

    def before_backward(self, *, last: bool) -> None:
        """Say whether the backward pass that follows is the step's last: gradients are exchanged in that one."""
        ...

    @property
    def stopping(self) -> bool:
        """Whether all that took the step which was settled last leave after it."""
        ...

    def request_stop(self) -> None:
        """Have all replicas leave, after a step of which they all hear that one wishes it."""
        ...

    def end_step(self, after: TrainingProgress) -> TrainingProgress | None:
        """Where training stands now that the step was ended: `after` it, or where others stand.

        None where it doesn't count: then everything is as it was before it.
        """
        ...


class SingleReplica:
    """The only replica: every step counts."""

    count = 1
    replica_index = 0
    metrics: dict[str, float] = {}
    stopping = False

    def __init__(self, model: nn.Module) -> None:
        self._gradient_sync = GradientSync(model, nested=False)

    def begin_step(self, progress: TrainingProgress, *, ended: bool) -> TrainingProgress:
        return progress

    def request_stop(self) -> None:
        pass

    def before_backward(self, *, last: bool) -> None:
        self._gradient_sync.set(enabled=last)

    def end_step(self, after: TrainingProgress) -> TrainingProgress | None:
        return after


class MultiReplica:
    """One replica of several, of which each may be lost and come back: what it gives them, and takes from them."""

    def __init__(
        self,
        config: RankConfig,
        train_state: TrainState,
        coordinator: RankCoordinator,
        *,
        resume: Callable[[], TrainingProgress],
    ) -> None:
        """`resume` reads the newest checkpoint, which is done where no replica has anything.

        Called by all ranks of the replica.
        """
        from holdfast.train.ft.replica_group import (
            ReplicaGroup,  # TorchFT takes time to import, and is needed here only
        )

        refuse_unsupported(train_state.model)
        self._train_state = train_state
        self._resume = resume
        self._progress = TrainingProgress(0, None)
        self._restored = False
        """Whether this replica, or the one it took its state from, has looked for a checkpoint."""
        self._replica_group = ReplicaGroup(
            config,
            coordinator.ranks,
            coordinator,
            nccl=_uses_nccl(train_state),
            export_state=self._export_state,
            import_state=self._import_state,
        )
        self.stopping = False
        self._has_inner_group = coordinator.ranks.world_size > 1
        """Whether DDP has something to exchange inside this replica."""
        self._gradient_sync = GradientSync(train_state.model)
        self._gradient_sync.set(enabled=self._has_inner_group)

    @property
    def count(self) -> int:
        return self._replica_group.count

    @property
    def replica_index(self) -> int:
        return self._replica_group.replica_index

    @property
    def metrics(self) -> dict[str, float]:
        return {"replicas": self.count}

    def request_stop(self) -> None:
        """Replicas that meet now and then stop where they are."""

    def _join(self, progress: TrainingProgress) -> None:
        """Meet the others, and stand where they do."""
        self._progress = progress
        self._join_quorum()
        if not self._restored:
            # Nobody here has: all of them look, and meet again. Who finds less takes it from one that finds more.
            self._progress = self._resume()
            self._restored = True
            self._join_quorum()

    def _join_quorum(self) -> None:
        # One that has not looked is behind all that have, those before their first step included.
        if not self._replica_group.join_quorum(self._progress.step + 1 if self._restored else 0):
            raise StoppedWhileWaiting(self._progress)

    def _export_state(self) -> dict[str, Any]:
        """What a replica that is behind needs. It is read where it lies, until this step is agreed on."""
        return {
            "progress": tuple(self._progress),
            "restored": self._restored,
            "tensors": live_recovery.export_state(self._train_state),
            "per_rank_state": self._train_state.per_rank_state()(),
            "seed": torch.initial_seed(),
        }

    def _import_state(self, state: dict[str, Any]) -> None:
        """Go on from there. Those that were sown alike draw alike; of others each keeps its own random numbers."""
        live_recovery.import_state(self._train_state, state["tensors"])
        stood = self._train_state.load_per_rank_state(
            io.BytesIO(state["per_rank_state"]), random=state["seed"] == torch.initial_seed()
        )
        if self._train_state.scheduler and stood is not None:
            self._train_state.scheduler.load_state_dict(stood)
        self._progress, self._restored = TrainingProgress(*state["progress"]), state["restored"]


class SyncReplicas(MultiReplica):
    """One replica of several that take every step together."""

    def __init__(
        self,
        config: RankConfig,
        train_state: TrainState,
        coordinator: RankCoordinator,
        *,
        resume: Callable[[], TrainingProgress],
    ) -> None:
        super().__init__(config, train_state, coordinator, resume=resume)
        self._ranks = coordinator.ranks
        self._reducer = GradientReducer(train_state.model, self._replica_group, ranks=self._ranks.world_size)
        self._optimizer_gate = _GatedOptimizer(
            train_state.optimizer, self._replica_group.should_commit, train_state.post_step_state
        )
        self._buffers = _BufferSnapshot(train_state.model)
        self._rng_state = rng.capture()

    def begin_step(self, progress: TrainingProgress, *, ended: bool) -> TrainingProgress:
        if ended or not self._replica_group.barrier_if_unchanged(progress.step):
            self._join(progress)
        else:
            self._standing = progress
        if ended:
            # Rank 0 answers for the quorum service: were it gone first, the others would not get their last answer.
            self._ranks.all(True)
        self._rng_state = rng.capture()
        self._buffers.save()
        self._optimizer_gate.open_step()
        self._reducer.armed, self._reducer.stop_requested = True, False
        return self._standing

    def request_stop(self) -> None:
        self._reducer.request_stop = True

    def before_backward(self, *, last: bool) -> None:
        self._reducer.armed = last
        self._gradient_sync.set(enabled=last and self._has_inner_group)

    def end_step(self, after: TrainingProgress) -> TrainingProgress | None:
        if (beside := self._optimizer_gate.close_step()) is None:
            self.parting = self._reducer.stop_requested or (self.count == 1 and self._reducer.request_stop)
            return after
        self._train_state.load_post_step_state(beside)
        self._buffers.restore()
        rng.restore(self._rng_state())
        return None


class _GatedOptimizer:
    """The optimiser's step, which changes nothing before the step in hand is agreed on, and nothing where it is not."""

    def __init__(
        self, optimizer: Optimizer, should_commit: Callable[[], bool], snapshot: Callable[[], PostStepState]
    ) -> None:
        self._should_commit = should_commit
        self._snapshot = snapshot
        self._step_open = False
        self._before_step: PostStepState | None = None
        """What was before the end of a step that does not count."""
        step = cast("Callable[..., object]", optimizer.step)

        @wraps(step)
        def held(_: Optimizer, *given: Any, **named: Any) -> object:
            if any(each is not None for each in (*given, named.get("closure"))):
                raise _closure_unsupported(optimizer)
            self._decide()
            return step(*given, **named) if self._before_step is None else None

        # Not a hook, which could only make it step without gradients. A scheduler made later wraps a method.
        optimizer.step = MethodType(held, optimizer)
        hook: Any = torch.compiler.disable(self._refuse_bypass)
        optimizer.register_step_pre_hook(hook)

    def _refuse_bypass(self, optimizer: Optimizer, *_: object) -> None:
        """Raise HoldfastError where the method that the session has replaced is called all the same."""
        if self._step_open:
            raise _step_bypassed(optimizer)

    def open_step(self) -> None:
        self._step_open, self._before_step = True, None

    def close_step(self) -> PostStepState | None:
        """None where the step counts."""
        self._decide()
        vain, self._before_step = self._before_step, None
        return vain

    def _decide(self) -> None:
        """Once for each step, before anything that follows the gradients."""
        if self._step_open:
            self._step_open = False
            self._before_step = None if self._should_commit() else self._snapshot()


class _BufferSnapshot:
    """What a forward pass changes of the model, such as BatchNorm's statistics, as it was before the step in hand.

    All that checkpoints hold is copied: whether it was changed cannot be asked, since BatchNorm does not count it.
    """

    def __init__(self, model: nn.Module) -> None:
        held = model.state_dict().keys()
        paths = [name.rpartition(".") for name, _ in model.named_buffers() if name in held]
        self._buffers = [(model.get_submodule(path), name) for path, _, name in paths]
        self._saved: list[torch.Tensor] = []

    def save(self) -> None:
        self._saved = [buffer.clone() for buffer in self._current()]

    def restore(self) -> None:
        for buffer, kept in zip(self._current(), self._saved, strict=True):
            buffer.copy_(kept)

    def _current(self) -> list[torch.Tensor]:
        return [getattr(module, name).detach() for module, name in self._buffers]


def _closure_unsupported(optimizer: Optimizer) -> HoldfastError:
    return failure(
        "optimizer-closure",
        "the optimiser's step was given a closure, which makes gradients after the replicas have agreed on the step",
        exit_code=ExitCode.USAGE,
        where=type(optimizer).__name__,
        remedy="call backward() before, and step() with nothing; an optimiser that needs a closure, such as LBFGS, "
        "trains without recovery.replicas",
    )


def _step_bypassed(optimizer: Optimizer) -> HoldfastError:
    return failure(
        "optimizer-step-bypassed",
        "the optimizer stepped before the replicas had agreed on the step",
        exit_code=ExitCode.USAGE,
        where=type(optimizer).__name__,
        evidence=("the call did not go through optimizer.step, which the session has replaced",),
        remedy="make the session before `torch.compile(optimizer.step)` or anything else that keeps the method",
    )


def _uses_nccl(train_state: TrainState) -> bool:
    """Whether replicas reach each other as GPUs do, unless the ranks of each reach each other otherwise."""
    on_gpu = any(each.is_cuda for each in train_state.model.parameters())
    return on_gpu and (not dist.is_initialized() or "nccl" in dist.get_backend())
