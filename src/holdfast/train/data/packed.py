"""Sequence packing: concatenates documents of any length and cuts windows of one length, with exact resume.

Its state is the documents' own state and the remaining tokens of documents already read; map-style documents need only
an index as state.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import torch

from holdfast.train.data.index_shuffle import VERSION, IndexShuffle
from holdfast.train.data.stream_iterator import StreamIterator
from holdfast.train.data.text_files import text_column
from holdfast.train.data.tokenizers import Tokens, make_tokenizer


class Packed:
    """Windows of `length` tokens from documents: a stream for `Data`, whose items are int64 of [length]."""

    def __init__(
        self,
        documents: Any,
        *,
        length: int,
        tokenizer: Any = None,
        column: str = "text",
        seed: int = 0,
        shuffle: bool = True,
    ) -> None:
        """Pack a dataset or a stream of documents, such as one of `datasets`.

        A document is text, a sequence of tokens, or a row with either in `column`. Text becomes bytes, or tokens of
        `tokenizer`: a transformers tokenizer or its name. Map-style documents are read in a new order for each epoch,
        derived from `seed`. Tokens at an epoch's end that do not fill a window are dropped.
        """
        self._documents, self._length, self._column = documents, length, column
        self._tokenizer = make_tokenizer(tokenizer)
        numbered = hasattr(documents, "__getitem__") and hasattr(documents, "__len__")
        self._source = _MapStyleDocuments(documents, seed=seed, shuffle=shuffle) if numbered else documents
        self._unread = StreamIterator.state_of(self._source)
        self._epoch = 0
        self._resume_state: dict[str, Any] | None = None
        self._iterator: StreamIterator | None = None
        self._leftover: Tokens = np.array([], dtype=np.int64)
        name = getattr(documents, "fingerprint", None) or type(documents).__name__
        order = f", {self._source.order}" if isinstance(self._source, _MapStyleDocuments) else ""
        self.fingerprint = f"{name}, windows of {length}, {self._tokenizer.name}{order}"

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass, from 0."""
        self._epoch = epoch

    def state_dict(self) -> dict[str, Any] | None:
        """Position of the pass; None if the documents have no state."""
        if self._iterator is None:
            return {"documents": self._unread, "leftover": self._leftover} if self._unread is not None else None
        state = self._iterator.state()
        return None if state is None else {"documents": state, "leftover": self._leftover.copy()}

    def load_state_dict(self, state: dict[str, Any] | None, /) -> None:
        """Start the next pass at this position."""
        self._resume_state = state

    def __iter__(self) -> Iterator[torch.Tensor]:
        begin, self._resume_state = self._resume_state, None
        self._leftover = np.array([], dtype=np.int64) if begin is None else begin["leftover"]
        self._iterator = StreamIterator(self._source, epoch=self._epoch, state=begin and begin["documents"])
        yield from self._windows()  # from the leftover of an interrupted pass: there may be no further document
        for document in self._iterator:
            self._leftover = np.concatenate([self._leftover, *self._tokens(document)])
            yield from self._windows()

    def _windows(self) -> Iterator[torch.Tensor]:
        while len(self._leftover) >= self._length:
            window, self._leftover = self._leftover[: self._length], self._leftover[self._length :]
            yield torch.from_numpy(window.copy())

    def _tokens(self, document: Any) -> list[Tokens]:
        given = cast("dict[str, Any]", document).get(self._column) if isinstance(document, dict) else document
        if isinstance(given, list | tuple | np.ndarray | torch.Tensor):
            return [np.asarray(given, dtype=np.int64)]
        text = text_column(document, self._column, type(self._documents).__name__)
        return [self._tokenizer.tokens(text).astype(np.int64), self._tokenizer.separator().astype(np.int64)]


class _MapStyleDocuments:
    """Map-style documents as a stream with state."""

    def __init__(self, documents: Any, *, seed: int, shuffle: bool) -> None:
        self._documents = documents
        self._order = IndexShuffle(len(documents), seed=seed, shuffle=shuffle) if len(documents) else None
        self.order = f"{len(documents)} documents, order {VERSION}, seed {seed}" if shuffle else "unshuffled"
        self._epoch = self._position = 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch, self._position = epoch, 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self._position}

    def load_state_dict(self, state: dict[str, int], /) -> None:
        self._position = state["position"]

    def __iter__(self) -> Iterator[Any]:
        while self._order is not None and self._position < self._order.length:
            sample = np.array([self._epoch * self._order.length + self._position])
            self._position += 1
            yield self._documents[int(self._order.item_indices(sample)[0])]
