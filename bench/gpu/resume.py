"""Whether training resumes bit-exactly on this device, in each precision and under each wrapper.

For each case the same program trains three times: twice without holdfast, which shows whether this device computes the
same twice at all; then with a Session that stops half way, after which another process state (other weights, other
random numbers) resumes from its checkpoint. Weights, optimizer, scaler and the device's random numbers are compared.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from bench.gpu.device import Device, open_device
from bench.gpu.promises import RESUME
from bench.gpu.section import NotLookedAt, Place, failed, measured, skipped
from bench.gpu.training import digest, tensors_of
from bench.result_file import Figure, Result
from holdfast.train import RankConfig, Session

STEPS, TINY_STEPS = 20, 4
"""Steps of a whole training; the Session stops after half of them."""
WIDTH, TINY_WIDTH, BATCH = 1024, 32, 64
SCALE_PER_WIDTH = 2.0**16
"""First scale of the loss over the width: too large, so that the first steps overflow in fp16 and are skipped."""
FP8_CAPABILITY = (8, 9)

Wrap = Callable[[torch.nn.Module, Place], torch.nn.Module]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One precision or wrapper."""

    weights: torch.dtype = torch.float32
    autocast: torch.dtype | None = None
    scaled: bool = False
    """Whether a GradScaler scales the loss."""
    wrap: Wrap = lambda model, place: model


def _compiled(model: torch.nn.Module, place: Place) -> Any:
    if not place.tiny and not any(map(shutil.which, ("cc", "gcc", "clang"))):
        raise NotLookedAt("torch.compile needs a C compiler")
    return torch.compile(model, backend="eager" if place.tiny else "inductor")


def _sharded(model: torch.nn.Module, place: Place) -> torch.nn.Module:
    if not dist.is_initialized():
        backend = "nccl" if place.device.kind == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return fully_shard(model, mesh=init_device_mesh(place.device.kind, (1,)))


def _float8(model: torch.nn.Module, place: Place) -> torch.nn.Module:
    if importlib.util.find_spec("torchao") is None:
        raise NotLookedAt("torchao is not installed")
    if place.device.capability < FP8_CAPABILITY:
        raise NotLookedAt(f"{place.device.name} has no fp8 products")
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True)
    return _sharded(convert_to_float8_training(model, config=config), place)


CASES = {
    "fp32": Case(),
    "bf16": Case(weights=torch.bfloat16),
    "fp16": Case(autocast=torch.float16, scaled=True),
    "compile": Case(autocast=torch.bfloat16, wrap=_compiled),
    "fsdp2": Case(autocast=torch.bfloat16, wrap=_sharded),
    "float8": Case(weights=torch.bfloat16, wrap=_float8),
}


class Training:
    """One training of a case from a seed, with dropout, random batches and a schedule."""

    def __init__(self, case: Case, place: Place, device: Device, seed: int) -> None:
        self.case, self._device = case, device
        self._width = width = TINY_WIDTH if place.tiny else WIDTH
        torch.manual_seed(seed)
        with device.torch:
            plain = torch.nn.Sequential(
                torch.nn.Linear(width, 2 * width),
                torch.nn.GELU(),
                torch.nn.Dropout(0.1),
                torch.nn.LayerNorm(2 * width),
                torch.nn.Linear(2 * width, width),
            ).to(case.weights)
        self.model = case.wrap(plain, place)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 100)
        self.scaler = torch.amp.GradScaler(
            device.torch.type, init_scale=SCALE_PER_WIDTH * width, growth_interval=3, enabled=case.scaled
        )
        self.skipped = 0
        """Steps whose gradients overflowed, in this process."""

    def step(self) -> torch.Tensor:
        """One optimizer step on numbers that the device draws."""
        batch = torch.randn(BATCH, self._width, device=self._device.torch, dtype=self.case.weights)
        self.optimizer.zero_grad()
        with torch.autocast(self._device.torch.type, self.case.autocast, enabled=self.case.autocast is not None):
            loss = (self.model(batch) - batch).square().mean()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        scale = self.scaler.get_scale()
        self.scaler.update()
        self.skipped += self.scaler.get_scale() < scale
        self.scheduler.step()
        return loss

    def state(self) -> list[int]:
        """A number for each tensor of the state, and for what else a resume must restore."""
        random = torch.cuda.get_rng_state() if self._device.torch.type == "cuda" else torch.get_rng_state()
        parts = (self.model.state_dict(), self.optimizer.state_dict()["state"], random)
        local = (each.to_local() if isinstance(each, DTensor) else each for each in tensors_of(parts))
        return [*digest(local), hash((self.scaler.get_scale(), self.scheduler.get_last_lr()[0]))]

    def session(self, folder: Path) -> Session:
        """A Session that saves and resumes all of it."""
        config = RankConfig(checkpoint_path=folder)
        state = {"scaler": self.scaler} if self.case.scaled else None
        return Session(model=self.model, optimizer=self.optimizer, scheduler=self.scheduler, state=state, config=config)


def measure(place: Place) -> Iterator[Result]:
    """Each case on its own: one that fails or cannot run here leaves the others."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # what deterministic products need, before the device is opened
    device = open_device(place.device)
    torch.use_deterministic_algorithms(True)
    for name, case in CASES.items():
        try:
            yield _resumed(name, case, place, device)
        except NotLookedAt as reason:
            yield skipped(RESUME[name], str(reason))
        except Exception:
            yield failed(RESUME[name])
        finally:
            torch.compiler.reset()
            device.release()
    if dist.is_initialized():
        dist.destroy_process_group()


def _resumed(name: str, case: Case, place: Place, device: Device) -> Result:
    steps = TINY_STEPS if place.tiny else STEPS
    begin = partial(Training, case, place, device)
    uninterrupted, again = (_trained(begin(seed=0), steps) for _ in range(2))
    plain = uninterrupted.state()
    if plain != again.state():
        raise NotLookedAt("two trainings without holdfast differ on this device")
    _train_in_session(begin(seed=0), steps // 2, place.folder / name)
    resumed = begin(seed=1)
    first = _train_in_session(resumed, steps, place.folder / name)
    assert first == steps // 2, f"resumed after step {first}"
    differ = sum(one != other for one, other in zip(plain, resumed.state(), strict=True))
    return measured(
        RESUME[name],
        Figure(value=differ, unit=f"of {len(plain)} parts differ"),
        goal="0",
        met=differ == 0,
        conditions=f"{steps} steps, resumed after {first}",
        details={"steps skipped": f"{uninterrupted.skipped}"} if case.scaled else {},
    )


def _trained(training: Training, steps: int) -> Training:
    for _ in range(steps):
        training.step()
    return training


def _train_in_session(training: Training, steps: int, folder: Path) -> int:
    """Train up to this step, and save; returns the step after which it resumed."""
    session = training.session(folder)
    first = session.step
    for _ in session.steps(steps):
        session.commit(loss=training.step())
    return first
