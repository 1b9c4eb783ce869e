"""Records one forward and backward pass of a DDP model, and repeats it on this rank or on another.

A pass is the model's arguments, the state of generators, buffers and autocast, and the gradients of its outputs: the
loss need not be known. The outputs, and the gradients of the weights before ranks reduce them, are digested, and again
when the pass is repeated, which leaves weights, gradients, buffers and generators as they were.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from holdfast.train.checkpoint import rng
from holdfast.train.checkpoint.rng import RandomState
from holdfast.train.ft.state_digest import TensorDigest

MAX_PAYLOAD_BYTES = 1 << 30
"""Of a recorded pass, which is sent to another rank."""


class RecordedPass(NamedTuple):
    """What a rank needs to repeat a pass, given equal weights."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    random: RandomState
    buffers: list[torch.Tensor]
    autocast: tuple[str, bool, torch.dtype, bool]
    """Device type, whether it is enabled, the type of its results, and whether it caches casts."""
    output_gradients: list[torch.Tensor | None]

    def pack(self) -> bytes:
        """The bytes for another rank."""
        packed = io.BytesIO()
        torch.save(tuple(self), packed)
        return packed.getvalue()

    @classmethod
    def unpack(cls, packed: bytes | bytearray, device: torch.device) -> RecordedPass:
        """The pass of another rank of the same program, with tensors of its device on this rank's."""

        def place(storage: Any, location: str) -> Any:
            own = "cpu" if location == "cpu" else str(device)
            return torch.serialization.default_restore_location(storage, own)

        return cls(*torch.load(io.BytesIO(packed), map_location=place, weights_only=False))


class PassRecorder:
    """Records the first pass of a step that is armed; has what it recorded until it is taken."""

    def __init__(self, model: DistributedDataParallel) -> None:
        self._module = cast("nn.Module", model.module)
        self._parameters = [each for each in self._module.parameters() if each.requires_grad]
        self._digests = TensorDigest()
        self._handles: list[Any] = []
        self._start: RecordedPass | None = None
        self._outputs: list[torch.Tensor | None] = []
        self._output_digest = 0
        self._gradients: dict[int, int] = {}
        self._forwards = 0
        self._closed = False
        self._problem = ""

    def arm(self) -> None:
        """Record the next pass."""
        self.disarm()
        self._start, self._outputs, self._gradients = None, [], {}
        self._forwards, self._closed, self._problem = 0, False, ""
        self._handles = [
            self._module.register_forward_pre_hook(self._before, with_kwargs=True),
            self._module.register_forward_hook(self._after),
            *(each.register_hook(self._on_gradient(index)) for index, each in enumerate(self._parameters)),
        ]

    def disarm(self) -> None:
        """Record nothing more."""
        for each in self._handles:
            each.remove()
        self._handles = []

    def take(self) -> tuple[RecordedPass, int] | str:
        """The recorded pass and its digest, or why there is none."""
        self.disarm()
        start, self._start = self._start, None
        outputs, self._outputs = self._outputs, []
        if start is None or not self._gradients:
            return self._problem or "the step made no forward and backward pass of the model"
        if self._problem:
            return self._problem
        return start._replace(output_gradients=outputs), _total(self._output_digest, self._gradients)

    def repeat(self, given: RecordedPass) -> int:
        """The digest of a pass that is repeated here. Raises what the model raises."""
        random, buffers = rng.capture()(), [each.clone() for each in self._module.buffers()]
        try:
            rng.restore(given.random)
            _copy(self._module.buffers(), given.buffers)
            with torch.enable_grad():
                with _autocast(given.autocast):
                    outputs = _tensors(self._module(*given.args, **given.kwargs))
                pairs = [pair for pair in zip(outputs, given.output_gradients, strict=True) if pair[1] is not None]
                found = torch.autograd.grad(
                    [output for output, _ in pairs],
                    self._parameters,
                    [cast("torch.Tensor", gradient) for _, gradient in pairs],
                    allow_unused=True,
                )
                gradients = cast(
                    "Sequence[torch.Tensor | None]", found
                )  # torch does not declare those of unused weights
        finally:
            _copy(self._module.buffers(), buffers)
            rng.restore(random)
        digests = {index: self._digests.compute([each]) for index, each in enumerate(gradients) if each is not None}
        return _total(self._digests.compute(outputs), digests)

    def _before(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._closed or not torch.is_grad_enabled():
            return
        if self._gradients:
            self._closed = True
            return
        self._forwards += 1
        if self._forwards > 1:
            self._problem = "the model ran forward twice before it ran backward"
            return
        kind = self._parameters[0].device.type
        autocast = (
            kind,
            torch.is_autocast_enabled(kind),
            torch.get_autocast_dtype(kind),
            torch.is_autocast_cache_enabled(),
        )
        buffers = [each.clone() for each in self._module.buffers()]
        self._start = RecordedPass(args, dict(kwargs), rng.capture()(), buffers, autocast, [])

    def _after(self, _module: nn.Module, _args: Any, output: Any) -> None:
        if self._closed or not torch.is_grad_enabled() or self._forwards != 1 or self._gradients:
            return
        tensors = _tensors(output)
        self._outputs = [None] * len(tensors)
        self._output_digest = self._digests.compute(tensors)
        for index, each in enumerate(tensors):
            if each.requires_grad:
                each.register_hook(self._on_output_gradient(index))

    def _on_output_gradient(self, index: int) -> Any:
        outputs = self._outputs

        def note(gradient: torch.Tensor) -> None:
            if self._closed or self._outputs is not outputs:
                return
            if outputs[index] is not None:
                self._problem = "an output of the model ran backward twice"
            outputs[index] = gradient

        return note

    def _on_gradient(self, index: int) -> Any:
        def note(gradient: torch.Tensor) -> None:
            if self._closed:
                return
            if index in self._gradients:
                self._problem = "weights received gradients twice in one pass"
            self._gradients[index] = self._digests.compute([gradient])

        return note


def _total(outputs: int, gradients: Mapping[int, int]) -> int:
    """One digest of the outputs, and of the gradients by the number of the weight."""
    return hash((outputs, *sorted(gradients.items())))


def _copy(into: Iterable[torch.Tensor], content: Sequence[torch.Tensor]) -> None:
    with torch.no_grad():
        for buffer, kept in zip(into, content, strict=True):
            buffer.copy_(kept)


def _autocast(state: tuple[str, bool, torch.dtype, bool]) -> AbstractContextManager[Any]:
    kind, enabled, dtype, caches = state
    return torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=caches)


def _tensors(value: Any) -> list[torch.Tensor]:
    """The floating-point tensors of what a model returns, in order."""
    if isinstance(value, torch.Tensor):
        return [value] if value.is_floating_point() else []
    if isinstance(value, Mapping):
        value = [*cast("Mapping[Any, Any]", value).values()]
    if isinstance(value, list | tuple):
        return [tensor for each in cast("Sequence[Any]", value) for tensor in _tensors(each)]
    return []
