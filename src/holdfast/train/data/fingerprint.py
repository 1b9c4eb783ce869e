"""Fingerprints that recognise a sample after a restart, in another process, whatever plain types it consists of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from hashlib import blake2b
from typing import Any, cast

import numpy as np
import torch


def sample_fingerprint(sample: object) -> str:
    """Equal for equal samples; of types other than Python's, numpy's and torch's, only the type counts."""
    made = blake2b(digest_size=16)
    _feed(sample, made.update)
    return made.hexdigest()


def _feed(value: Any, update: Callable[[bytes], None]) -> None:
    match value:
        case torch.Tensor():
            update(f"{value.dtype} {tuple(value.shape)}".encode())
            update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        case np.ndarray():
            update(f"{value.dtype} {value.shape}".encode())
            update(cast("Any", value).tobytes())
        case Mapping():
            for key, item in cast("Mapping[Any, Any]", value).items():
                _feed(key, update)
                _feed(item, update)
        case list() | tuple():
            for item in cast("list[Any]", value):
                _feed(item, update)
            update(f"{len(cast('list[Any]', value))} things".encode())
        case None | bool() | int() | float() | str() | bytes():
            update(repr(value).encode(errors="surrogatepass"))
        case _:
            update(type(value).__qualname__.encode())
