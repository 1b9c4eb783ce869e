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

    A batch depends on nothing but the constructor's arguments and the step, so a resumed run continues exactly; the
    job's batch of a step is the same whatever number of ranks it is dealt to, if `batch * world_size` is.
    """

    def __init__(
        self,
        paths: Sequence[Path | str] = (),
        *,
        batch: int,
        length: int,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        """Read the files and folders given, or Python's own documentation texts (0.5 MB).

        A batch is `batch` windows on each rank, `length` tokens each.
        """
        raw = b"\n\n".join(_contents(paths) if paths else _documentation())
        self._windows = len(raw) // length
        self._length, self._batch, self._seed, self._rank, self._world_size = length, batch, seed, rank, world_size
        if self._windows < batch * world_size:
            raise failure(
                "text-too-short",
                f"the text makes {self._windows} windows, fewer than one step takes",
                exit_code=ExitCode.USAGE,
                evidence=(f"{len(raw)} bytes", f"{batch} windows of {length} on each of {world_size} ranks"),
                remedy="give more text, or a smaller batch",
            )
        self._tokens = torch.frombuffer(bytearray(raw), dtype=torch.uint8)[: self._windows * length].view(-1, length)
        self._order = lru_cache(maxsize=2)(self._shuffled)

    def batch(self, step: int) -> torch.Tensor:
        """This rank's tokens for a step (counted from 1): int64 of [batch, length]."""
        first = ((step - 1) * self._world_size + self._rank) * self._batch
        places = [divmod(sample, self._windows) for sample in range(first, first + self._batch)]
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
