"""Fault-tolerant data parallelism over replicas: who takes part, when a step counts, and how a lost replica rejoins.

Before a step the replicas form a quorum, and lagging ones receive the others' state. The optimizer's step waits until
this replica knows that all gradients arrived. After a loss it changes nothing: the step is discarded by every replica
that noticed, and repeated with the same samples. Gradients: gradient_reducer.py; TorchFT: replica_group.py; steps:
session.py.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from functools import wraps
from types import MethodType
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from holdfast.errors import ExitCode, HoldfastError, failure, require_extra
from holdfast.train.checkpoint import rng
from holdfast.train.checkpoint.train_state import PostStepState, TrainState
from holdfast.train.ft import live_recovery
from holdfast.train.ft.gradient_reducer import GradientReducer
from holdfast.train.ft.state_verifier import CheckpointTrust, StateVerifier
from holdfast.train.ft.wrappers import GradientSync, refuse_unsupported
from holdfast.train.session.rank_config import RankConfig
from holdfast.train.session.rank_coordinator import RankCoordinator
from holdfast.train.torch_private import nccl_problem


class TrainingProgress(NamedTuple):
    """Finished steps and samples of a training."""

    step: int
    samples: int | None


class StoppedWhileWaiting(Exception):
    """A stop request arrived while this replica waited for the others, and they have not come."""

    def __init__(self, progress: TrainingProgress) -> None:
        super().__init__(progress)
        self.progress = progress
        """Its progress."""


Resume = Callable[[], TrainingProgress]
"""Loads the newest checkpoint; called by all ranks of a replica."""


class ReplicaStrategy:
    """How steps count for a session; without other replicas, as here, every step does."""

    stopping = False
    """Whether all replicas exit after the step that ended last."""
    count = 1
    """Replicas that take part in the current step."""
    replica_index = 0
    """Index of this replica among them, from 0."""
    metrics: Mapping[str, float] = {}
    """Metrics about replicas for the step's report."""

    def __init__(self, model: nn.Module) -> None:
        self._gradient_sync = GradientSync(model, nested=False)

    def begin_step(self, progress: TrainingProgress, *, total: int) -> TrainingProgress:
        """Prepare the next step; returns the actual progress of training. All ranks call it.

        Also called after the last step, `total`: that step may have been discarded. Raises StoppedWhileWaiting, as
        `end_step` does.
        """
        return progress

    def before_backward(self, *, last: bool) -> None:
        """Set whether the next backward pass is the step's last: only the last exchanges gradients."""
        self._gradient_sync.set(enabled=last)

    def request_stop(self) -> None:
        """Make all replicas exit, after a step in which all of them receive the request."""

    def end_step(self, after: TrainingProgress) -> TrainingProgress | None:
        """Progress after the step ended: `after`, or the progress of other replicas.

        None if the step is discarded: then everything is as before it.
        """
        return after


class MultiReplica(ReplicaStrategy):
    """One of several replicas that may each be lost and rejoin: exports and imports their state."""

    def __init__(
        self,
        config: RankConfig,
        train_state: TrainState,
        coordinator: RankCoordinator,
        resume: Resume,
        trust: CheckpointTrust,
    ) -> None:
        """Called by all ranks; `resume` is called if no replica has any state."""
        require_extra("ft", "torchft", "replicas need")
        from holdfast.train.ft.replica_group import ReplicaGroup  # imported here: TorchFT takes time to import

        refuse_unsupported(train_state.model)
        self._train_state = train_state
        self._resume = resume
        self._progress = TrainingProgress(0, None)
        self._restored = False
        """Whether this replica, or the donor of its state, has looked for a checkpoint."""
        nccl = _uses_nccl(train_state, config)
        self._replica_group = ReplicaGroup(
            config,
            coordinator.ranks,
            coordinator,
            nccl=nccl,
            export_state=self._export_state,
            import_state=self._import_state,
        )
        device = next(train_state.model.parameters()).device if nccl else torch.device("cpu")
        self._verifier = StateVerifier(config, train_state, coordinator, self._replica_group, trust, device=device)
        self._gradient_sync = GradientSync(train_state.model)
        self._has_inner_group = coordinator.ranks.world_size > 1 or self._gradient_sync.has_static_graph
        """Whether DDP communicates inside this replica."""
        self._gradient_sync.set(enabled=self._has_inner_group)

    @property
    def count(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride] - only read
        return self._replica_group.count

    @property
    def replica_index(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride] - only read
        return self._replica_group.replica_index

    @property
    def metrics(self) -> Mapping[str, float]:  # pyright: ignore[reportIncompatibleVariableOverride] - only read
        return {"replicas": self.count}

    def before_backward(self, *, last: bool) -> None:
        self._gradient_sync.set(enabled=last and self._has_inner_group)

    def _join(self, progress: TrainingProgress) -> None:
        """Join the quorum, and adopt the others' progress."""
        self._progress = progress
        self._join_quorum()
        if self._restored:
            return
        # No replica has state: each looks for a checkpoint and joins again. Those that find less receive the state.
        self._progress = self._resume()
        self._verifier.restored(self._progress.step)
        while not self._restored:
            # If there is none, all ranks of all replicas begin with the state of one: of the first in this quorum.
            self._restored = self._progress.step > 0 or self._replica_group.replica_index == 0
            self._join_quorum()

    def _join_quorum(self) -> None:
        # A replica that has not looked is behind all that have, even those before their first step.
        behind = self._verifier.is_outlier or not self._restored
        if not self._replica_group.join_quorum(0 if behind else self._progress.step + 1):
            raise StoppedWhileWaiting(self._progress)

    def _export_state(self) -> dict[str, Any]:
        """State for a lagging replica. It is read in place, before this step is agreed on."""
        return {
            "progress": tuple(self._progress),
            "restored": self._restored,
            "agreed_step": self._verifier.agreed_step,
            "tensors": live_recovery.export_state(self._train_state),
            "per_rank_state": self._train_state.per_rank_state()(),
            "seed": torch.initial_seed(),
        }

    def _import_state(self, state: dict[str, Any]) -> None:
        """Resume from this state. Generators with equal seeds stay equal; otherwise each keeps its own random state."""
        live_recovery.import_state(self._train_state, state["tensors"])
        stood = self._train_state.load_per_rank_state(
            io.BytesIO(state["per_rank_state"]), random=state["seed"] == torch.initial_seed()
        )
        if self._train_state.scheduler and stood is not None:
            self._train_state.scheduler.load_state_dict(stood)
        self._progress, self._restored = TrainingProgress(*state["progress"]), state["restored"]
        self._verifier.restored(state["agreed_step"])


class SyncReplicas(MultiReplica):
    """One of several replicas that take every step together."""

    def __init__(
        self,
        config: RankConfig,
        train_state: TrainState,
        coordinator: RankCoordinator,
        resume: Resume,
        trust: CheckpointTrust,
    ) -> None:
        super().__init__(config, train_state, coordinator, resume, trust)
        self._ranks = coordinator.ranks
        self._reducer = GradientReducer(train_state.model, self._replica_group, ddp_reduces=self._has_inner_group)
        self._optimizer_gate = _GatedOptimizer(train_state.optimizer, self._should_commit, train_state.post_step_state)
        for each in train_state.state.values():
            if isinstance(each, GradScaler):
                self._optimizer_gate.decide_before_step_of(each)
        self._buffers = _BufferSnapshot(train_state.model)
        self._rng_state = rng.capture()

    def begin_step(self, progress: TrainingProgress, *, total: int) -> TrainingProgress:
        ended = progress.step >= total
        if ended or not self._replica_group.barrier_if_unchanged(progress.step):
            self._join(progress)
        else:
            self._progress = progress
        while not self._verifier.verify(self._progress.step, total):
            self._join(self._progress)
        if ended:
            # Rank 0 talks to the quorum service: if it exited first, the others would not get its last answer.
            self._ranks.all(True)
        self._rng_state = rng.capture()
        self._buffers.save()
        self._optimizer_gate.open_step()
        self._reducer.armed, self._reducer.stop_requested = True, False
        return self._progress

    def request_stop(self) -> None:
        self._reducer.request_stop = True

    def before_backward(self, *, last: bool) -> None:
        self._reducer.fail_if_interrupted()
        self._reducer.armed = last
        super().before_backward(last=last)

    def _should_commit(self) -> bool:
        self._reducer.fail_if_interrupted()
        return self._replica_group.should_commit()

    def end_step(self, after: TrainingProgress) -> TrainingProgress | None:
        if (beside := self._optimizer_gate.close_step()) is None:
            self.stopping = self._reducer.stop_requested or (self.count == 1 and self._reducer.request_stop)
            return after
        self._train_state.load_post_step_state(beside)
        self._buffers.restore()
        rng.restore(self._rng_state())
        return None


class _GatedOptimizer:
    """Delays the optimizer's step until the replicas agree on the current step, and skips it if they discard it."""

    def __init__(
        self, optimizer: Optimizer, should_commit: Callable[[], bool], snapshot: Callable[[], PostStepState]
    ) -> None:
        self._should_commit = should_commit
        self._snapshot = snapshot
        self._step_open = False
        self._before_step: PostStepState | None = None
        """State before the end of a step, to restore if the step is discarded."""
        step = cast("Callable[..., object]", optimizer.step)

        @wraps(step)
        def held(_: Optimizer, *given: Any, **named: Any) -> object:
            if any(each is not None for each in (*given, named.get("closure"))):
                raise _closure_unsupported(optimizer)
            self._decide()
            return step(*given, **named) if self._before_step is None else None

        # Not a hook, which could only make it step without gradients. A scheduler created later wraps a method.
        optimizer.step = MethodType(held, optimizer)
        hook: Any = torch.compiler.disable(self._refuse_bypass)
        optimizer.register_step_pre_hook(hook)

    def decide_before_step_of(self, scaler: GradScaler) -> None:
        """Decide before this scaler's step: it skips the optimizer's after an overflow, and then changes its scale."""
        step = cast("Callable[..., object]", scaler.step)

        @wraps(step)
        def held(_: GradScaler, *given: Any, **named: Any) -> object:
            self._decide()
            return step(*given, **named)

        scaler.step = MethodType(held, scaler)

    def _refuse_bypass(self, optimizer: Optimizer, *_: object) -> None:
        """Raise HoldfastError if the method that the session has replaced is called anyway."""
        if self._step_open:
            raise _step_bypassed(optimizer)

    def open_step(self) -> None:
        self._step_open, self._before_step = True, None

    def close_step(self) -> PostStepState | None:
        """The state to restore; None if the step counts."""
        self._decide()
        vain, self._before_step = self._before_step, None
        return vain

    def _decide(self) -> None:
        """Decide once per step, before anything that follows the gradients."""
        if self._step_open:
            self._step_open = False
            self._before_step = None if self._should_commit() else self._snapshot()


class _BufferSnapshot:
    """Buffers that a forward pass changes, such as BatchNorm's statistics, as they were before the current step.

    All buffers in checkpoints are copied: their version counters do not help, since BatchNorm does not raise them.
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
        "the optimizer's step was given a closure, which makes gradients after the replicas have agreed on the step",
        exit_code=ExitCode.USAGE,
        where=type(optimizer).__name__,
        remedy="call backward() before, and step() with nothing; an optimizer that needs a closure, such as LBFGS, "
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


def _uses_nccl(train_state: TrainState, config: RankConfig) -> bool:
    """Whether replicas communicate by NCCL: on GPUs, unless the ranks of each use another backend.

    Raises HoldfastError if they would, and this torch cannot abort NCCL, or not shrink it as configured.
    """
    on_gpu = any(each.is_cuda for each in train_state.model.parameters())
    if not on_gpu or not is_nccl(dist.get_backend_config() if dist.is_initialized() else "cuda:nccl"):
        return False
    if problem := nccl_problem(shrinks=config.nccl_shrinks):
        raise _nccl_refused(problem, "HOLDFAST_NCCL_SHRINK" if config.nccl_shrinks else "recovery.replicas")
    return True


def is_nccl(backends: str) -> bool:
    """Whether a group's backend for CUDA tensors is NCCL, from torch's list such as `cpu:gloo,cuda:nccl`.

    The list is complete for a group made without a backend as well, whose `get_backend` is "undefined".
    """
    return "cuda:nccl" in backends.split(",")


def _nccl_refused(problem: str, where: str) -> HoldfastError:
    return failure(
        "replicas-nccl-no-abort",
        "recovery.replicas needs an NCCL that can be aborted, or a lost replica would block the others for ever",
        exit_code=ExitCode.USAGE,
        where=where,
        evidence=(problem,),
        remedy="install a torch with NCCL 2.26 or later (2.27 for HOLDFAST_NCCL_SHRINK), or use "
        '`init_process_group("gloo")`',
    )
