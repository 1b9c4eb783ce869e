"""Flips single bits of tensors, as a device does that computes or stores a wrong bit."""

from __future__ import annotations

from random import Random

import torch
from torch.distributed.tensor import DTensor

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MANTISSA_BITS = {torch.float64: 52, torch.float32: 23, torch.float16: 10, torch.bfloat16: 7}
HIGH_BITS = 8
"""Of a mantissa, from which the flipped one is taken: rounding hides changes of the lowest ones."""


@torch.no_grad()
def flip_bit(tensor: torch.Tensor, random: Random) -> bool:
    """Flip one of the high mantissa bits of an element that is not zero, in place; False if there is none."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()
    mantissa = _MANTISSA_BITS.get(local.dtype)
    places = local.nonzero() if mantissa else local.new_empty(0)
    if not mantissa or not len(places):
        return False
    place = tuple(map(int, places[random.randrange(len(places))]))
    word = local[place].reshape(1).view(_WORDS[local.element_size()])
    bit = mantissa - 1 - random.randrange(min(HIGH_BITS, mantissa))
    local[place] = (word ^ (1 << bit)).view(local.dtype)[0]
    return True
