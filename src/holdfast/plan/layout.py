"""One way to divide a model and its batch over GPUs."""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct


class Recompute(StrEnum):
    """Which activations the backward pass computes again."""

    NONE = "none"
    SELECTIVE = "selective"
    """Those that are large and cheap: attention scores, norms, activation functions."""
    FULL = "full"
    """All but each layer's input."""


class Sharding(StrEnum):
    """What data-parallel ranks divide among them."""

    DDP = "ddp"
    """Nothing."""
    OPTIMIZER = "optimizer"
    """Optimizer states (ZeRO-1, Megatron's distributed optimizer)."""
    FSDP = "fsdp"
    """Weights, gradients and optimizer states."""
    HSDP = "hsdp"
    """As FSDP within one node, replicated across nodes."""


class Layout(Struct, frozen=True, kw_only=True):
    """Sizes of the parallel groups, and how a batch passes through them.

    Ranks count up along `tp`, then `cp`, `dp`, `pp`; `ep` is taken from `cp` x `dp`, as in a job's `parallel`.
    """

    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    dp: int = 1
    interleave: int = 1
    """Model chunks per pipeline stage; 1 is plain 1F1B."""
    micro_batch: int = 1
    """Sequences per micro-batch."""
    recompute: Recompute = Recompute.NONE
    sharding: Sharding = Sharding.OPTIMIZER

    @property
    def gpus(self) -> int:
        """GPUs of the whole job."""
        return self.tp * self.pp * self.cp * self.dp

    def micro_batches(self, batch: int) -> int:
        """Micro-batches per step of each data-parallel rank, for a global batch of so many sequences."""
        return max(1, batch // (self.dp * self.micro_batch))

    def __str__(self) -> str:
        axes = (("TP", self.tp), ("PP", self.pp), ("CP", self.cp), ("EP", self.ep), ("DP", self.dp))
        shown = [f"{name} {size}" for name, size in axes if size > 1] or ["one GPU"]
        if self.interleave > 1:
            shown.append(f"{self.interleave} chunks")
        return ", ".join([*shown, f"micro-batch {self.micro_batch}"])
