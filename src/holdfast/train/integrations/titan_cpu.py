"""What TorchTitan needs to train without an accelerator, as the tests do. docs/torchtitan.md lists it with reasons.

Nothing here is used where TorchTitan finds a GPU.
"""

from __future__ import annotations

import os
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.nn import Module
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask
from torch.nn.functional import scaled_dot_product_attention

from holdfast.train.integrations import titan_private

ON_CPU = not titan_private.has_accelerator()


def install() -> None:
    """Replace what needs a GPU; once, before a trainer is made."""
    titan_private.replace_device("cpu", _HostDevice("cpu"))
    titan_private.replace_flex_attention(masked_attention)
    titan_private.replace_block_mask(create_block_mask)


def adjust_model(model: Module) -> None:
    """Have FSDP sum gradients and scale them itself: Gloo cannot scale while it sums."""
    for each in model.modules():
        if isinstance(each, FSDPModule):
            each.set_force_sum_reduction_for_comms(True)


class _HostDevice(ModuleType):
    """`torch.cpu` with the functions that TorchTitan calls in `torch.cuda`, and that `torch.cpu` lacks."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def current_device(self) -> int:
        """The number for a barrier; `torch.cpu` answers "cpu"."""
        return 0

    def get_device_name(self, device: Any = None) -> str:
        return "CPU"

    def get_device_properties(self, device: Any = None) -> SimpleNamespace:
        return SimpleNamespace(name="CPU", total_memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))

    def memory_stats(self, device: Any = None) -> dict[str, int]:
        return dict.fromkeys(("active_bytes.all.peak", "reserved_bytes.all.peak", "num_alloc_retries", "num_ooms"), 0)

    def reset_peak_memory_stats(self) -> None:
        pass

    def empty_cache(self) -> None:
        pass


def masked_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    score_mod: Any,
    block_mask: BlockMask,
    scale: float | None,
    enable_gqa: bool,
    **_: Any,
) -> tuple[torch.Tensor, SimpleNamespace]:
    """FlexAttention's result by dense attention with the same mask: FlexAttention has no backward pass on a CPU."""
    if score_mod is not None:
        raise NotImplementedError("attention that changes scores needs a GPU")
    mask = create_mask(
        block_mask.mask_mod, query.shape[0], None, query.shape[-2], key.shape[-2], device=str(query.device)
    )
    out = scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale, enable_gqa=enable_gqa)
    return out, SimpleNamespace(lse=None)
