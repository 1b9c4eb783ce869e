"""Numbers of a step that are still on a GPU when the step is committed: read once they have arrived on the host."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from holdfast.train.accelerator import Accelerator


class LateNumbers:
    """Numbers on their way to the host, by name; the loop does not wait for them."""

    def __init__(self, accelerator: Accelerator, tensors: Mapping[str, torch.Tensor]) -> None:
        """Start reading; every tensor has one element and may change as soon as this returns."""
        self._host = {name: accelerator.read(tensor) for name, tensor in tensors.items()}
        self._arrival = accelerator.mark()

    def wait(self) -> dict[str, float]:
        """The numbers, as soon as they have arrived; raises what went wrong on the GPU."""
        self._arrival.wait()
        return {name: float(tensor.item()) for name, tensor in self._host.items()}
