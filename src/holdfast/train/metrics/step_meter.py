"""Measures a rank's steps: the given metrics as plain numbers, waits, memory, and throughput.

Never waits for a GPU. Numbers that are still on one: late_numbers.py. Reporting: rank_coordinator.py.
"""

from __future__ import annotations

import math
import resource
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, SupportsFloat, TypeVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from holdfast.metrics.devices import find_device
from holdfast.metrics.flops import FlopsPerToken, ModelShape, model_shape
from holdfast.metrics.throughput import Throughput
from holdfast.protocol.metric_validation import invalid_name_reason
from holdfast.protocol.rank_messages import GpuMemory
from holdfast.train.accelerator import Accelerator, accelerator_of
from holdfast.train.metrics.late_numbers import LateNumbers
from holdfast.train.metrics.profiler import waiting_for_data
from holdfast.train.torch_private import COMPILED_MODULE

Item = TypeVar("Item")

MEMORY_EVERY_S = 1.0
"""Minimum seconds between two allocator queries, which take 0.1 ms each."""


class _Wait(NamedTuple):
    """A wait for samples, and from where."""

    seconds: float = 0.0
    loader: str = ""


class StepMeter:
    """Measures the steps of one rank."""

    def __init__(
        self,
        model: nn.Module | None = None,
        *,
        flops_per_token: FlopsPerToken | float | None = None,
        sequence_length: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """A plain number of FLOPs per token counts attention in full; without one, it uses a transformers config."""
        given = (
            FlopsPerToken(full=float(flops_per_token)) if isinstance(flops_per_token, float | int) else flops_per_token
        )
        self._device = _gpu(model)
        self._throughput = Throughput(
            model_flops=given or (_shape(model) if model is not None else None),
            sequence_length=sequence_length,
            peak_tflops=_peak_tflops(self._device),
        )
        self._clock = clock
        self._data_wait_s: float | None = None
        self._longest_wait = _Wait()
        self.before_item: Callable[[], None] = _nothing
        """Called before each item that the loop waits for."""
        self._memory: dict[str, float] = {}
        self._memory_at = -math.inf

    def timed(self, source: Iterable[Item], *, name: str = "") -> Iterator[Item]:
        """The same items; the wait for each counts as data wait. `name` is that of a source which is wrapped."""
        items, name = iter(source), name or _name_of(source)
        while True:
            began = self._clock()
            try:
                with waiting_for_data():
                    self.before_item()
                    item = next(items)
            except StopIteration:
                return
            finally:
                wait_s = self._clock() - began
                self._data_wait_s = (self._data_wait_s or 0.0) + wait_s
                if wait_s > self._longest_wait.seconds:
                    self._longest_wait = _Wait(wait_s, name)
            yield item

    def measure(self, given: Mapping[str, float], *, step_s: float, devices: int) -> dict[str, float]:
        """Metrics of a step of `step_s` on `devices` devices, by the names of the catalogue."""
        measured = self.rates(given, step_s=step_s, devices=devices)
        if self._data_wait_s is not None:
            measured["data_wait_s"], self._data_wait_s = self._data_wait_s, 0.0
        return measured | self._memory_now()

    def take_longest_wait(self) -> _Wait:
        """The longest wait for samples since the last call."""
        longest, self._longest_wait = self._longest_wait, _Wait()
        return longest

    def gpu_memory(self) -> GpuMemory | None:
        """What is used of the model's GPU; None on the host."""
        if self._device is None:
            return None
        free_bytes, _ = torch.cuda.mem_get_info(self._device)
        used_bytes = torch.cuda.memory_allocated(self._device)
        kept_bytes = torch.cuda.memory_reserved(self._device) - used_bytes
        return GpuMemory(used_bytes=float(used_bytes), free_bytes=float(free_bytes + kept_bytes))

    def rates(self, given: Mapping[str, float], *, step_s: float, devices: int) -> dict[str, float]:
        """Those of these metrics that follow from the given ones alone."""
        return self._throughput.rates(given, step_s=step_s, devices=devices)

    def _memory_now(self) -> dict[str, float]:
        now = self._clock()
        if now - self._memory_at >= MEMORY_EVERY_S:
            self._memory_at = now
            # Linux counts in KiB.
            self._memory = {"host_memory_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0}
            if self._device is not None:
                known: dict[str, Any] = torch.cuda.memory_stats(self._device)
                self._memory["memory_peak_bytes"] = float(known.get("allocated_bytes.all.peak", 0))
                self._memory["memory_reserved_bytes"] = float(known.get("reserved_bytes.all.current", 0))
        return self._memory


def _nothing() -> None:
    pass


def _name_of(source: object) -> str:
    """A loader by its class, a generator by its function."""
    return str(getattr(source, "__name__", type(source).__name__))


class StepNumbers(NamedTuple):
    """A step's metrics as plain numbers."""

    known: dict[str, float]
    dropped: dict[str, str]
    """By name, why a metric was dropped."""
    late: LateNumbers | None
    """Those that are still on a GPU."""


def to_numbers(
    given: Mapping[str, SupportsFloat | None],
    find_accelerator: Callable[[torch.device], Accelerator | None] = accelerator_of,
) -> StepNumbers:
    """Convert a step's metrics to plain numbers, without waiting for a GPU; skips None."""
    found: dict[str, float] = {}
    dropped: dict[str, str] = {}
    tensors: dict[str, torch.Tensor] = {}
    accelerator: Accelerator | None = None
    for name, value in given.items():
        if value is None:
            continue
        try:
            if reason := invalid_name_reason(name):
                raise _NoNumberError(reason)
            if not isinstance(value, torch.Tensor):
                found[name] = _number(value)
                continue
            scalar = _scalar(value)
            if (place := find_accelerator(scalar.device)) is not None and place.holds(scalar):
                tensors[name], accelerator = scalar, place
            else:
                found[name] = float(scalar.item())
        except _NoNumberError as error:
            dropped[name] = str(error)
    return StepNumbers(found, dropped, None if accelerator is None else LateNumbers(accelerator, tensors))


class _NoNumberError(Exception):
    """A metric that no event can hold; the message says why."""


def _scalar(value: torch.Tensor) -> torch.Tensor:
    """A plain tensor of one number."""
    if value.numel() != 1:
        raise _NoNumberError(f"its value is a tensor of {value.numel():,} elements, not one number")
    if value.is_meta or value.is_complex():
        raise _NoNumberError(f"its value is a {'meta' if value.is_meta else 'complex'} tensor, not one number")
    # A norm over shards needs all of them; every rank is here.
    value = (value.full_tensor() if isinstance(value, DTensor) else value).detach()
    return value.to_dense() if value.layout is not torch.strided else value


def _number(value: SupportsFloat) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise _NoNumberError(f"its value is of type {type(value).__name__}: {error!s:.100}") from error


def _gpu(model: nn.Module | None) -> torch.device | None:
    first = None if model is None else next(iter(model.parameters()), None)
    return first.device if first is not None and first.device.type == "cuda" else None


def _peak_tflops(device: torch.device | None) -> float | None:
    known = None if device is None else find_device(torch.cuda.get_device_name(device))
    return known and known.peak_tflops


def _shape(model: nn.Module) -> ModelShape | None:
    """The model's shape from its config; None if only a part of the model is trained, which needs fewer FLOPs."""
    inner: Any = model
    while (wrapped := _wrapped(inner)) is not None:
        inner = wrapped
    to_dict = getattr(getattr(inner, "config", None), "to_dict", None)
    if to_dict is None or not all(parameter.requires_grad for parameter in model.parameters()):
        return None
    return model_shape(to_dict())


def _wrapped(module: Any) -> Any:
    """The module inside a wrapper."""
    # Not by its truth: a compiled module has a length only if the module inside it has.
    inside = (getattr(module, name, None) for name in ("module", COMPILED_MODULE))
    return next((each for each in inside if each is not None), None)
