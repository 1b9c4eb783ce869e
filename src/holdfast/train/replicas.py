"""Owns a replica's part in training with others: who takes part, when a step counts, and how one that was away is back.

Before a step the replicas find each other, and one that is behind takes the others' state. The optimiser's step is
held back until all that this replica has heard of is sound; where a replica was lost it changes nothing, the step
counts for nobody who noticed, and is done again with the same samples. Refuses to own the gradients' way
(averaging.py), TorchFT (peers.py), and what a step is (session.py).
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
from holdfast.train import lending, rng
from holdfast.train.averaging import Averaging
from holdfast.train.environment import Environment
from holdfast.train.liaison import Liaison
from holdfast.train.training import Beside, Training
from holdfast.train.wrappers import GradientSync, refuse_unsupported


class Standing(NamedTuple):
    """How far training is."""

    step: int
    samples: int | None


class Unmet(Exception):
    """This replica was told to end while it waited for the others, and they have not come."""

    def __init__(self, standing: Standing) -> None:
        super().__init__(standing)
        self.standing = standing
        """How far its training is."""


class Replicas(Protocol):
    """What a session asks of the replicas."""

    @property
    def count(self) -> int:
        """That take part in the step in hand."""
        ...

    @property
    def place(self) -> int:
        """Of this one among them, from 0."""
        ...

    @property
    def metrics(self) -> dict[str, float]:
        """What a report of the step says of them."""
        ...

    def begin(self, standing: Standing, *, ended: bool) -> Standing:
        """Get ready for the step after this; says after which step training stands in truth. All ranks call it.

        Also after the last, where training has `ended`: there may be one that it does not count for. Raises Unmet, as
        `settle` does.
        """
        ...

    def expect(self, *, last: bool) -> None:
        """Say whether the backward pass that follows is the step's last: gradients are exchanged in that one."""
        ...

    @property
    def parting(self) -> bool:
        """Whether all that took the step which was settled last leave after it."""
        ...

    def part(self) -> None:
        """Have all replicas leave, after a step of which they all hear that one wishes it."""
        ...

    def settle(self, after: Standing) -> Standing | None:
        """Where training stands now that the step was ended: `after` it, or where others stand.

        None where it doesn't count: then everything is as it was before it.
        """
        ...


class Alone:
    """The only replica: every step counts."""

    count = 1
    place = 0
    metrics: dict[str, float] = {}
    parting = False

    def __init__(self, model: nn.Module) -> None:
        self._sync = GradientSync(model, nested=False)

    def begin(self, standing: Standing, *, ended: bool) -> Standing:
        return standing

    def part(self) -> None:
        pass

    def expect(self, *, last: bool) -> None:
        self._sync.set(enabled=last)

    def settle(self, after: Standing) -> Standing | None:
        return after


class Joined:
    """One replica of several, of which each may be lost and come back: what it gives them, and takes from them."""

    def __init__(
        self, told: Environment, training: Training, liaison: Liaison, *, resume: Callable[[], Standing]
    ) -> None:
        """`resume` reads the newest checkpoint, which is done where no replica has anything.

        Called by all ranks of the replica.
        """
        from holdfast.train.peers import Peers  # TorchFT takes time to import, and is needed here only

        refuse_unsupported(training.model)
        self._training = training
        self._resume = resume
        self._standing = Standing(0, None)
        self._looked = False
        """Whether this replica, or the one it took its state from, has looked for a checkpoint."""
        self._peers = Peers(told, liaison.ranks, liaison, nccl=_nccl(training), give=self._give, take=self._take)
        self.parting = False
        self._inner = liaison.ranks.world_size > 1
        """Whether DDP has something to exchange inside this replica."""
        self._sync = GradientSync(training.model)
        self._sync.set(enabled=self._inner)

    @property
    def count(self) -> int:
        return self._peers.count

    @property
    def place(self) -> int:
        return self._peers.place

    @property
    def metrics(self) -> dict[str, float]:
        return {"replicas": self.count}

    def part(self) -> None:
        """Replicas that meet now and then stop where they are."""

    def _meet(self, standing: Standing) -> None:
        """Meet the others, and stand where they do."""
        self._standing = standing
        self._gather()
        if not self._looked:
            # Nobody here has: all of them look, and meet again. Who finds less takes it from one that finds more.
            self._standing = self._resume()
            self._looked = True
            self._gather()

    def _gather(self) -> None:
        # One that has not looked is behind all that have, those before their first step included.
        if not self._peers.gather(self._standing.step + 1 if self._looked else 0):
            raise Unmet(self._standing)

    def _give(self) -> dict[str, Any]:
        """What a replica that is behind needs. It is read where it lies, until this step is agreed on."""
        return {
            "standing": tuple(self._standing),
            "looked": self._looked,
            "tensors": lending.lend(self._training),
            "own": self._training.own()(),
            "seed": torch.initial_seed(),
        }

    def _take(self, state: dict[str, Any]) -> None:
        """Go on from there. Those that were sown alike draw alike; of others each keeps its own random numbers."""
        lending.take(self._training, state["tensors"])
        stood = self._training.take_own(io.BytesIO(state["own"]), random=state["seed"] == torch.initial_seed())
        if self._training.scheduler and stood is not None:
            self._training.scheduler.load_state_dict(stood)
        self._standing, self._looked = Standing(*state["standing"]), state["looked"]


class Several(Joined):
    """One replica of several that take every step together."""

    def __init__(
        self, told: Environment, training: Training, liaison: Liaison, *, resume: Callable[[], Standing]
    ) -> None:
        super().__init__(told, training, liaison, resume=resume)
        self._ranks = liaison.ranks
        self._averaging = Averaging(training.model, self._peers, ranks=self._ranks.world_size)
        self._held = _Held(training.optimizer, self._peers.agree, training.beside)
        self._buffers = _Buffers(training.model)
        self._random = rng.note()

    def begin(self, standing: Standing, *, ended: bool) -> Standing:
        if ended or not self._peers.stand(standing.step):
            self._meet(standing)
        else:
            self._standing = standing
        if ended:
            # Rank 0 answers for the quorum service: were it gone first, the others would not get their last answer.
            self._ranks.all(True)
        self._random = rng.note()
        self._buffers.keep()
        self._held.begin()
        self._averaging.armed, self._averaging.wished = True, False
        return self._standing

    def part(self) -> None:
        self._averaging.wish = True

    def expect(self, *, last: bool) -> None:
        self._averaging.armed = last
        self._sync.set(enabled=last and self._inner)

    def settle(self, after: Standing) -> Standing | None:
        if (beside := self._held.end()) is None:
            self.parting = self._averaging.wished or (self.count == 1 and self._averaging.wish)
            return after
        self._training.take_beside(beside)
        self._buffers.restore()
        rng.restore(self._random())
        return None


class _Held:
    """The optimiser's step, which changes nothing before the step in hand is agreed on, and nothing where it is not."""

    def __init__(self, optimizer: Optimizer, agree: Callable[[], bool], keep: Callable[[], Beside]) -> None:
        self._agree = agree
        self._keep = keep
        self._in_hand = False
        self._vain: Beside | None = None
        """What was before the end of a step that does not count."""
        step = cast("Callable[..., object]", optimizer.step)

        @wraps(step)
        def held(_: Optimizer, *given: Any, **named: Any) -> object:
            if any(each is not None for each in (*given, named.get("closure"))):
                raise _closure(optimizer)
            self._decide()
            return step(*given, **named) if self._vain is None else None

        # Not a hook, which could only make it step without gradients. A scheduler made later wraps a method.
        optimizer.step = MethodType(held, optimizer)
        hook: Any = torch.compiler.disable(self._refuse_bypass)
        optimizer.register_step_pre_hook(hook)

    def _refuse_bypass(self, optimizer: Optimizer, *_: object) -> None:
        """Raise HoldfastError where the method that the session has replaced is called all the same."""
        if self._in_hand:
            raise _bypassed(optimizer)

    def begin(self) -> None:
        self._in_hand, self._vain = True, None

    def end(self) -> Beside | None:
        """None where the step counts."""
        self._decide()
        vain, self._vain = self._vain, None
        return vain

    def _decide(self) -> None:
        """Once for each step, before anything that follows the gradients."""
        if self._in_hand:
            self._in_hand = False
            self._vain = None if self._agree() else self._keep()


class _Buffers:
    """What a forward pass changes of the model, such as BatchNorm's statistics, as it was before the step in hand.

    All that checkpoints hold is copied: whether it was changed cannot be asked, since BatchNorm does not count it.
    """

    def __init__(self, model: nn.Module) -> None:
        held = model.state_dict().keys()
        paths = [name.rpartition(".") for name, _ in model.named_buffers() if name in held]
        self._places = [(model.get_submodule(path), name) for path, _, name in paths]
        self._kept: list[torch.Tensor] = []

    def keep(self) -> None:
        self._kept = [buffer.clone() for buffer in self._now()]

    def restore(self) -> None:
        for buffer, kept in zip(self._now(), self._kept, strict=True):
            buffer.copy_(kept)

    def _now(self) -> list[torch.Tensor]:
        return [getattr(module, name).detach() for module, name in self._places]


def _closure(optimizer: Optimizer) -> HoldfastError:
    return failure(
        "optimizer-closure",
        "the optimiser's step was given a closure, which makes gradients after the replicas have agreed on the step",
        exit_code=ExitCode.USAGE,
        where=type(optimizer).__name__,
        remedy="call backward() before, and step() with nothing; an optimiser that needs a closure, such as LBFGS, "
        "trains without recovery.replicas",
    )


def _bypassed(optimizer: Optimizer) -> HoldfastError:
    return failure(
        "optimizer-step-bypassed",
        "the optimizer stepped before the replicas had agreed on the step",
        exit_code=ExitCode.USAGE,
        where=type(optimizer).__name__,
        evidence=("the call did not go through optimizer.step, which the session has replaced",),
        remedy="make the session before `torch.compile(optimizer.step)` or anything else that keeps the method",
    )


def _nccl(training: Training) -> bool:
    """Whether replicas reach each other as GPUs do, unless the ranks of each reach each other otherwise."""
    on_gpu = any(each.is_cuda for each in training.model.parameters())
    return on_gpu and (not dist.is_initialized() or "nccl" in dist.get_backend())
