"""Owns the built-in text: real English as byte tokens, the same on every machine, with nothing to download.

Refuses to own tokenizers and streams, which come with the data layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path

import torch

from holdfast.errors import ExitCode, failure

VOCABULARY = 256
"""Every byte is a token."""


class Text:
    """Windows of text, each seen once an epoch in an order that `seed` shuffles anew for every epoch.

    What a sample's number stands for depends on nothing but the constructor's arguments, so a run that goes on, on as
    many ranks or others, continues exactly.
    """

    def __init__(
        self,
        paths: Sequence[Path | str] = (),
        *,
        length: int,
        seed: int = 0,
    ) -> None:
        """Read files and folders, or Python's own documentation (0.5 MB of text); a sample is `length` tokens."""
        raw = b"\n\n".join(_contents(paths) if paths else _documentation())
        self._windows = len(raw) // length
        self._seed = seed
        if self._windows == 0:
            raise failure(
                "text-too-short",
                f"the text has {len(raw)} bytes, fewer than one sample",
                exit_code=ExitCode.USAGE,
                evidence=(f"a sample has {length} tokens",),
                remedy="give more text, or a smaller length",
            )
        self._tokens = torch.frombuffer(bytearray(raw), dtype=torch.uint8)[: self._windows * length].view(-1, length)
        self._order = lru_cache(maxsize=2)(self._shuffled)

    def tokens(self, samples: range) -> torch.Tensor:
        """The tokens of these samples, counted from 0: int64 of [len(samples), length]."""
        places = [divmod(sample, self._windows) for sample in samples]
        windows = [self._order(epoch)[place] for epoch, place in places]
        return self._tokens[torch.stack(windows)].long()

    def _shuffled(self, epoch: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
        return torch.randperm(self._windows, generator=generator)


def _documentation() -> Iterator[bytes]:
    from pydoc_data.topics import topics

    return (text.encode() for _, text in sorted(topics.items()))


def _contents(paths: Sequence[Path | str]) -> Iterator[bytes]:
    for path in map(Path, paths):
        files = sorted(each for each in path.rglob("*") if each.is_file()) if path.is_dir() else (path,)
        yield from (file.read_bytes() for file in files)
