"""Replicas of which one changes a bit that it should not, in each place where a device may."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tests.train import replica_forks
from tests.train.replica_forks import leave, local
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from holdfast.errors import HoldfastError
from holdfast.train import Session
from holdfast.train.ft.semi_sync import _OuterSync
from holdfast.train.ft.state_digest import Digest, StateDigest
from holdfast.train.session.rank_config import OuterSyncConfig, RankConfig, SyncMethod

EVERY, STEPS = 4, 14
"""Steps between two comparisons; not a divisor of the steps, so that the last comes after the last step."""
FLIP_AFTER = 5
DAMAGED_SYNC = 3
"""The synchronization after step 6: those before are after steps 0 and 3."""

Flip = Callable[[Any, Any], torch.Tensor]
"""The tensor that is damaged, of a model and its optimizer."""


def weight(model: Any, _optimizer: Any) -> torch.Tensor:
    return local(model[0].weight)


def frozen(model: Any, _optimizer: Any) -> torch.Tensor:
    return local(model[2].bias)


def second_moment(model: Any, optimizer: Any) -> torch.Tensor:
    return local(optimizer.state[model[0].weight]["exp_avg_sq"])


def gradient(model: Any, _optimizer: Any) -> torch.Tensor:
    return local(model[0].weight.grad)


@dataclass(frozen=True, kw_only=True)
class Case:
    """Replicas, and what is damaged in one of them."""

    replicas: int = 3
    ranks: int = 1
    flip: Flip | None = None
    outlier: int | None = 1
    """The replica that is damaged; None: all are alike."""
    ddp: bool = False
    """Whether the ranks of a replica hold the same weights; else they share them out."""
    at: int = FLIP_AFTER
    bit: int = 10
    """Of the damaged number, from the lowest; rounding may undo the lowest bits before replicas are compared."""
    folder: str = ""
    """Of the checkpoints; without it there are none."""
    outer_sync: OuterSyncConfig | None = None


CASES: dict[str, Case] = {
    "clean": Case(),
    "weight": Case(flip=weight),
    "weight of the first replica": Case(flip=weight, outlier=0, folder="first"),
    "frozen weight": Case(flip=frozen),
    "optimizer state": Case(flip=second_moment, outlier=2),
    "gradient": Case(flip=gradient, bit=22),
    "after the last comparison but one": Case(flip=weight, at=STEPS - 1),
    "clean pair": Case(replicas=2),
    "no majority": Case(flip=weight, replicas=2, folder="pair"),
    "no majority, resumed": Case(replicas=2, folder="pair"),
    "local_sgd": Case(outer_sync=OuterSyncConfig(method=SyncMethod.LOCAL_SGD, every=3)),
    "diloco": Case(outer_sync=OuterSyncConfig(method=SyncMethod.DILOCO, every=3)),
    "local_sgd, restored": Case(flip=weight, outer_sync=OuterSyncConfig(method=SyncMethod.LOCAL_SGD, every=3)),
    "diloco, restored": Case(flip=weight, outer_sync=OuterSyncConfig(method=SyncMethod.DILOCO, every=3)),
    "clean shards": Case(ranks=2),
    "clean ddp": Case(ranks=2, replicas=2, ddp=True),
    "the same rank of all replicas": Case(flip=weight, ranks=2, replicas=2, ddp=True, outlier=None),
    "shard": Case(flip=weight, ranks=2),
    "shards of two replicas": Case(flip=second_moment, ranks=2, replicas=2),
}


CASES_OF = {
    "gloo": [*CASES],
    "nccl-like": ["weight", "no majority", "local_sgd", "diloco", "diloco, restored", "clean ddp", "shard"],
}
"""The cases of each group that replicas, and their ranks, communicate by; those of NCCL are one of each kind."""


def damage(tensor: torch.Tensor, bit: int) -> None:
    """Flip one bit of the last number."""
    tensor.view(torch.int32).view(-1)[-1] ^= 1 << bit


def damage_once_after_a_synchronization(case: Case) -> None:
    """Flip the bit after the replicas have adopted the same weights: before, it would only change their mean."""
    synchronize, calls = _OuterSync.synchronize, list[None]()

    def damaging(self: _OuterSync) -> bool:
        done = synchronize(self)
        calls.append(None)
        if len(calls) == DAMAGED_SYNC:
            damage(weight(self._model, None), case.bit)
        return done

    _OuterSync.synchronize = damaging


def counted() -> list[Digest]:
    """Digests that this process computes from now on."""
    digests: list[Digest] = []
    compute = StateDigest.compute

    def recording(self: StateDigest, **given: bool) -> Digest:
        digests.append(compute(self, **given))
        return digests[-1]

    StateDigest.compute = recording
    return digests


def train(name: str, config: RankConfig, out: Path) -> None:
    case = CASES[name]
    if case.folder:
        config = replace(config, checkpoint_path=out / case.folder, checkpoint_every_steps=1, checkpoint_keep=1)
    if case.outlier not in (None, config.replica) or config.rank != config.world_size - 1:
        case = replace(case, flip=None)
    place, digests, steps = out / f"{name}.{config.replica}.{config.rank}", counted(), list[int]()
    try:
        torch.save(trained(case, config, steps), f"{place}.end")
        code = ""
    except HoldfastError as error:
        code = error.findings[0].code
    told = {"steps": steps, "digests": len(digests), "code": code}
    Path(f"{place}.json").write_text(json.dumps(told))


def trained(case: Case, config: RankConfig, steps: list[int]) -> list[torch.Tensor]:
    """This rank's part of the state at the end; adds each step that it takes to `steps`."""
    torch.manual_seed(config.replica)
    model: Any = torch.nn.Sequential(torch.nn.Linear(4, 32), torch.nn.Tanh(), torch.nn.Linear(32, 2))
    model[2].bias.requires_grad_(requires_grad=False)
    given = model
    if case.ddp:
        given = DistributedDataParallel(model)
    elif config.world_size > 1:
        given = model = fully_shard(model, mesh=init_device_mesh("cpu", (config.world_size,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if case.flip is not None and case.outer_sync is not None:
        damage_once_after_a_synchronization(case)
    session = Session(model=given, optimizer=optimizer, config=config)
    try:
        for step in session.steps(STEPS):
            steps.append(step)
            for micro in session.micro_batches(4):
                inputs = torch.tensor([[n % 7, n % 11, n % 13, 1.0] for n in micro.samples])
                ((given(inputs) - inputs.sum(1, keepdim=True).sin()).square().mean() * micro.loss_scale).backward()
            if case.flip is gradient and step == case.at:
                damage(gradient(model, optimizer), case.bit)
            optimizer.step()
            optimizer.zero_grad()
            if case.flip not in (None, gradient) and case.outer_sync is None and step == case.at:
                damage(case.flip(model, optimizer), case.bit)
            session.commit()
    finally:
        leave(session)
    state = [each for of in optimizer.state.values() for each in of.values()]
    return [local(each).clone() for each in (*model.parameters(), *state)]


def run(out: Path, group: str) -> None:
    """Train all cases of a group."""
    configs = {
        name: RankConfig(
            world_size=case.ranks,
            replica_count=case.replicas,
            min_replicas=case.replicas,
            verify_every_steps=EVERY,
            outer_sync=case.outer_sync,
        )
        for name, case in CASES.items()
        if name in CASES_OF[group]
    }
    replica_forks.run(out, train, configs, group)
