"""Trains a small model in each way a program may wrap it, by two replicas of two ranks that are forked once for all.

Each case starts from other weights in each replica, takes a few steps through a Session, and saves what each rank ended
with. One rank also saves the weights that training began with, so that a test can train them alone.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # an optimizer would import it in every rank
from tests.train import replica_forks
from tests.train.replica_forks import leave, local, whole
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from holdfast.train import Session
from holdfast.train.session.rank_config import RankConfig

REPLICAS, RANKS, STEPS = 2, 2, 4
SCALE = 2
PER_RANK = 4
"""Samples of a rank in a step."""
GLOBAL = REPLICAS * RANKS * PER_RANK

Model = Any
"""A module, or one in wrappers whose methods a case calls."""


class Net(torch.nn.Module):
    """Two layers; also a branch that few samples use and one that none does, if it `branches`."""

    def __init__(self, *, recompute: bool | None = None, branches: bool = False) -> None:
        """`recompute`: whether activation checkpointing is reentrant; None: there is none."""
        super().__init__()
        self.first = torch.nn.Linear(4, 16)
        self.rare = torch.nn.Linear(16, 16) if branches else None
        self.unused = torch.nn.Linear(16, 16) if branches else None
        self.last = torch.nn.Linear(16, 1)
        self._recompute = recompute

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.first(inputs)
        if self._recompute is not None:
            hidden = checkpoint(torch.tanh, hidden, use_reentrant=self._recompute)
        else:
            hidden = hidden.tanh()
        rare = inputs[:, 2:3] == 5
        if self.rare is not None and bool(rare.any()):
            hidden = hidden + self.rare(hidden) * rare
        return self.last(hidden)


class Scaled(torch.nn.Module):
    """A plain wrapper with a DDP module inside."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = DistributedDataParallel(inner)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.inner(inputs) * SCALE


def compiled(model: Model, backend: str = "eager") -> Model:
    return torch.compile(model, backend=backend)


def compiled_in_place(model: Model) -> Model:
    model.compile(backend="eager")
    return model


def sharded(model: Model) -> Model:
    for layer in (model.first, model.last):
        fully_shard(layer, mesh=init_device_mesh("cpu", (RANKS,)))
    return fully_shard(model, mesh=init_device_mesh("cpu", (RANKS,)))


def hybrid(model: Model) -> Model:
    mesh = init_device_mesh("cpu", (RANKS, 1), mesh_dim_names=("replicate", "shard"))
    fully_shard(model.first, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def ddp(**options: bool) -> Callable[[Model], Model]:
    return partial(DistributedDataParallel, **options)


def no_sync(wrapper: Model, *, last: bool) -> AbstractContextManager[None]:
    """As a program without `micro_batches` accumulates: DDP's way, in or outside `torch.compile`."""
    return nullcontext() if last else wrapper.no_sync()


def no_sync_inside(wrapper: Model, *, last: bool) -> AbstractContextManager[None]:
    return no_sync(wrapper._orig_mod, last=last)


def no_gradient_sync(wrapper: Model, *, last: bool) -> AbstractContextManager[None]:
    wrapper.set_requires_gradient_sync(last)
    return nullcontext()


@dataclass(frozen=True, kw_only=True)
class Case:
    """How a program wraps its model, and takes a step."""

    wrap: Callable[[Model], Model] = lambda model: model
    net: Callable[[], Net] = Net
    gives_wrapper: bool = True
    """Whether the session receives the wrapper, or the model inside."""
    scale: int = 1
    """Factor on the model's output by the wrapper."""
    dynamo: dict[str, Any] = field(default_factory=dict[str, Any])
    """Settings of `torch._dynamo.config`."""
    ranks: int = RANKS
    micro_batch: int = PER_RANK
    """Samples of a micro-batch of the session's `micro_batches`."""
    accumulate: Callable[..., AbstractContextManager[None]] | None = None
    """How the program's own loop over micro-batches keeps gradients from being reduced; None: it has no such loop."""
    interrupted: bool = False
    """Whether a backward pass of one replica raises an error, and the program repeats it in the same step."""


branching = partial(Net, branches=True)
recomputing = partial(Net, recompute=False)

CASES: dict[str, Case] = {
    "plain": Case(ranks=1),
    "plain, interrupted": Case(ranks=1, interrupted=True),
    "plain compiled": Case(wrap=compiled, ranks=1),
    "ddp": Case(wrap=ddp()),
    "compile(ddp)": Case(wrap=lambda model: compiled(ddp()(model))),
    "compile(ddp) by aot_eager": Case(wrap=lambda model: compiled(ddp()(model), "aot_eager")),
    "compile(ddp) by compiled autograd": Case(
        wrap=lambda model: compiled(ddp()(model)), dynamo={"compiled_autograd": True}
    ),
    "ddp(compile)": Case(wrap=lambda model: ddp()(compiled(model))),
    "ddp compiled in place": Case(wrap=lambda model: compiled_in_place(ddp()(model))),
    "compile(module with ddp inside)": Case(wrap=lambda model: compiled(Scaled(model)), scale=SCALE),
    "ddp that the session is not given": Case(wrap=ddp(), gives_wrapper=False),
    "fsdp2": Case(wrap=sharded),
    "compile(fsdp2)": Case(wrap=lambda model: compiled(sharded(model))),
    "fsdp2(compile)": Case(wrap=lambda model: sharded(compiled_in_place(model))),
    "hsdp": Case(wrap=hybrid),
    "ddp, micro-batches": Case(wrap=ddp(), micro_batch=1),
    "compile(ddp), micro-batches": Case(wrap=lambda model: compiled(ddp()(model)), micro_batch=1),
    "fsdp2, micro-batches": Case(wrap=sharded, micro_batch=1),
    "hsdp, micro-batches": Case(wrap=hybrid, micro_batch=1),
    "ddp, no_sync": Case(wrap=ddp(), accumulate=no_sync),
    "ddp with gradients as bucket views, no_sync": Case(wrap=ddp(gradient_as_bucket_view=True), accumulate=no_sync),
    "compile(ddp), no_sync": Case(wrap=lambda model: compiled(ddp()(model)), accumulate=no_sync_inside),
    "fsdp2, no gradient sync": Case(wrap=sharded, accumulate=no_gradient_sync),
    "hsdp, no gradient sync": Case(wrap=hybrid, accumulate=no_gradient_sync),
    "ddp, find_unused_parameters": Case(wrap=ddp(find_unused_parameters=True), net=branching),
    "ddp, find_unused_parameters, micro-batches": Case(
        wrap=ddp(find_unused_parameters=True), net=branching, micro_batch=1
    ),
    "compile(ddp), find_unused_parameters": Case(
        wrap=lambda model: compiled(ddp(find_unused_parameters=True)(model)), net=branching
    ),
    "ddp, static_graph": Case(wrap=ddp(static_graph=True)),
    "ddp, static_graph, micro-batches": Case(wrap=ddp(static_graph=True), micro_batch=1),
    "compile(ddp), static_graph": Case(wrap=lambda model: compiled(ddp(static_graph=True)(model))),
    "ddp, activation checkpointing": Case(wrap=ddp(), net=recomputing),
    "ddp, reentrant activation checkpointing": Case(wrap=ddp(static_graph=True), net=partial(Net, recompute=True)),
    "compile(ddp), activation checkpointing": Case(wrap=lambda model: compiled(ddp()(model)), net=recomputing),
    "fsdp2, activation checkpointing": Case(wrap=sharded, net=recomputing),
}


CASES_OF = {
    "gloo": [*CASES],
    "nccl-like": ["plain", "ddp", "ddp, no_sync", "ddp, static_graph", "fsdp2", "hsdp, micro-batches"],
}
"""The cases of each group that replicas, and their ranks, communicate by; those of NCCL are one of each kind."""


def loss_of(model: Callable[[torch.Tensor], torch.Tensor], samples: list[int]) -> torch.Tensor:
    """The mean loss of these samples."""
    inputs = torch.tensor([[n % 7, n % 11, n % 13, 1.0] for n in samples])
    return (model(inputs) - inputs.sum(1, keepdim=True).sin()).square().mean()


def samples_of(step: int) -> list[int]:
    """The samples of a step, in order."""
    return [*range(GLOBAL * (step - 1), GLOBAL * step)]


def micro_batches(case: Case, session: Session, wrapper: Model) -> Any:
    """The samples of each micro-batch, the factor on its loss, and how to run its backward pass."""
    ranks = REPLICAS * case.ranks
    for micro in session.micro_batches(GLOBAL // ranks, micro_batch_size=case.micro_batch * RANKS // case.ranks):
        if case.accumulate is None:
            yield micro.samples, micro.loss_scale, nullcontext()
            continue
        for at, sample in enumerate(micro.samples, 1):
            last = at == len(micro.samples)
            yield [sample], micro.loss_scale / len(micro.samples), case.accumulate(wrapper, last=last)


class OutOfMemory(Exception):
    """Stands for the device's."""


def interrupt(loss: torch.Tensor, model: Net) -> None:
    """Begin a backward pass, which raises an error before its last gradient, and drop its gradients."""

    def raise_error(_: torch.Tensor) -> None:
        raise OutOfMemory

    hook = model.first.weight.register_hook(raise_error)
    with suppress(OutOfMemory):
        loss.backward()
    hook.remove()
    model.zero_grad()


def train(name: str, config: RankConfig, out: Path) -> None:
    torch._dynamo.reset()
    with torch._dynamo.config.patch(CASES[name].dynamo):
        train_case(name, CASES[name], config, out)


def train_case(name: str, case: Case, config: RankConfig, out: Path) -> None:
    torch.manual_seed(config.replica)  # different weights, so that the session has to make them equal
    model = case.net()
    wrapper = case.wrap(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    session = Session(model=wrapper if case.gives_wrapper else model, optimizer=optimizer, config=config)
    began: dict[str, torch.Tensor] = {}
    interrupts = case.interrupted and config.replica == 0
    for _ in session.steps(STEPS):
        began = began or {key: whole(each) for key, each in model.named_parameters()}
        for samples, scale, sync in micro_batches(case, session, wrapper):
            if interrupts and session.step == 1:
                interrupts = False
                interrupt(loss_of(wrapper, samples) * scale, model)
            with sync:
                (loss_of(wrapper, samples) * scale).backward()
        optimizer.step()
        optimizer.zero_grad()
        session.commit()
    state = [each for of in optimizer.state.values() for each in of.values()]
    ended = {key: whole(each) for key, each in model.named_parameters()}
    own = [local(each).clone() for each in (*model.parameters(), *state)]
    torch.save((own, began, ended), out / f"{name}.{config.replica}.{config.rank}.end")
    leave(session)


def run(out: Path, group: str) -> None:
    """Train all cases of a group."""
    configs = {
        name: RankConfig(
            world_size=case.ranks,
            replica_count=REPLICAS,
            min_replicas=REPLICAS,
            batch_world_size=REPLICAS * case.ranks,
        )
        for name, case in CASES.items()
        if name in CASES_OF[group]
    }
    replica_forks.run(out, train, configs, group)
