"""Built-in text dataset: the user's files, or English text that is on every machine without a download.

Text too large for a disk, or text that is a stream: data/packed.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from holdfast.errors import ExitCode, failure
from holdfast.findings import Finding
from holdfast.train.data import text_files
from holdfast.train.data.index_shuffle import IndexShuffle
from holdfast.train.data.token_cache import default_cache_folder, load_or_build
from holdfast.train.data.tokenizers import Tokenizer, Tokens, make_tokenizer
from holdfast.train.session.agent_client import log_line


class Text:
    """Windows of text: a dataset for `Data` whose items are `length` tokens, int64.

    An item depends only on the files and the constructor's arguments.
    """

    def __init__(
        self,
        paths: Sequence[Path | str] = (),
        *,
        length: int,
        tokenizer: Any = None,
        column: str = "text",
        cache: Path | str | None = None,
        seed: int = 0,
    ) -> None:
        """Read files and folders, or Python's own documentation (0.5 MB of text).

        A file is text, `.json`, `.jsonl` (each also with `.gz` or `.zst`) or `.parquet`; rows have the text in
        `column`. Tokens are bytes, or those of `tokenizer`: a transformers tokenizer or its name. The folder `cache`
        (default: the user's cache folder) keeps them while the files keep their size and modification time. Documents
        are concatenated; tokens at the end that do not fill a window are dropped. `seed` only affects the order of
        `tokens`.
        """
        made = make_tokenizer(tokenizer)
        self.findings: tuple[Finding, ...] = ()
        """Findings about the cache, for a Session to report; also printed on stderr, for loops without `Data`."""
        if paths:
            found = text_files.expand_paths(paths)
            versions = [f"{path} {path.stat().st_size} {path.stat().st_mtime_ns}" for path in map(Path.resolve, found)]
            key = "\n".join([made.name, column, *versions])
            folder = Path(cache) if cache is not None else default_cache_folder()
            tokens, digest, self.findings = load_or_build(folder, key, made.dtype, _tokens(found, column, made))
            self.fingerprint = f"text {digest}, tokens of {made.name}"
        else:
            tokens = made.tokens("\n\n".join(_documentation()))
            self.fingerprint = f"documentation, {made.name}"
        self.fingerprint += f", windows of {length}"
        for finding in self.findings:
            log_line(f"{finding.what} ({'; '.join(finding.evidence)})")
        count = len(tokens) // length
        if count == 0:
            raise failure(
                "text-too-short",
                f"the text has {len(tokens)} tokens, fewer than one sample",
                exit_code=ExitCode.USAGE,
                evidence=(f"a sample has {length} tokens",),
                remedy="give more text, or a smaller length",
            )
        self._windows = tokens[: count * length].reshape(count, length)
        self._order = IndexShuffle(count, seed=seed)

    def __len__(self) -> int:
        return len(self._windows)

    def __getitem__(self, item: int) -> torch.Tensor:
        return torch.from_numpy(self._windows[item].astype(np.int64))

    def tokens(self, samples: range) -> torch.Tensor:
        """Tokens of these samples, counted from 0, each window once per epoch: int64 of [len(samples), length]."""
        items = self._order.item_indices(np.arange(samples.start, samples.stop))
        return torch.from_numpy(self._windows[items].astype(np.int64))


def _tokens(files: Sequence[Path], column: str, tokenizer: Tokenizer) -> Iterator[Tokens]:
    parted = True
    for text, last in text_files.read_documents(files, column):
        if not parted:
            yield tokenizer.separator()
        yield tokenizer.tokens(text)
        parted = not last


def _documentation() -> Iterator[str]:
    from pydoc_data.topics import topics

    return (text for _, text in sorted(topics.items()))
