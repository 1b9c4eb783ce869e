"""Owns packing: documents of any length, one after the other, cut into windows of one length, exactly also in between.

Where it stands is the documents' own state and the tokens that are left of those it has read; documents that are found
by number need only that number.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import torch

from holdfast.train.data.cursor import Cursor
from holdfast.train.data.documents import text_of
from holdfast.train.data.order import VERSION, Order
from holdfast.train.data.tokens import Tokens, tokenizer_of


class Packed:
    """Windows of `length` tokens out of documents: a stream for `Data`, whose items are int64 of [length]."""

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

        A document is text or a sequence of tokens, or a row with one of them in `column`. Text becomes bytes, or the
        tokens of a tokenizer of transformers', given itself or by its name. Documents that are found by number come in
        an order that `seed` makes anew for each epoch. What is left at an epoch's end, less than a window, is dropped.
        """
        self._documents, self._length, self._column = documents, length, column
        self._tokenizer = tokenizer_of(tokenizer)
        numbered = hasattr(documents, "__getitem__") and hasattr(documents, "__len__")
        self._shelf = _Numbered(documents, seed=seed, shuffle=shuffle) if numbered else documents
        self._unread = Cursor.state_of(self._shelf)
        self._epoch = 0
        self._begin: dict[str, Any] | None = None
        self._cursor: Cursor | None = None
        self._left: Tokens = np.array([], dtype=np.int64)
        name = getattr(documents, "fingerprint", None) or type(documents).__name__
        order = f", {self._shelf.order}" if isinstance(self._shelf, _Numbered) else ""
        self.fingerprint = f"{name}, windows of {length}, {self._tokenizer.name}{order}"

    def set_epoch(self, epoch: int) -> None:
        """Of which epoch the next pass is, from 0."""
        self._epoch = epoch

    def state_dict(self) -> dict[str, Any] | None:
        """Where the pass stands; None where the documents cannot tell."""
        if self._cursor is None:
            return {"documents": self._unread, "left": self._left} if self._unread is not None else None
        state = self._cursor.state()
        return None if state is None else {"documents": state, "left": self._left.copy()}

    def load_state_dict(self, state: dict[str, Any] | None, /) -> None:
        """Let the next pass begin there."""
        self._begin = state

    def __iter__(self) -> Iterator[torch.Tensor]:
        begin, self._begin = self._begin, None
        self._left = np.array([], dtype=np.int64) if begin is None else begin["left"]
        self._cursor = Cursor(self._shelf, epoch=self._epoch, state=begin and begin["documents"])
        yield from self._windows()  # of what an interrupted pass had read: no document may follow
        for document in self._cursor:
            self._left = np.concatenate([self._left, *self._tokens(document)])
            yield from self._windows()

    def _windows(self) -> Iterator[torch.Tensor]:
        while len(self._left) >= self._length:
            window, self._left = self._left[: self._length], self._left[self._length :]
            yield torch.from_numpy(window.copy())

    def _tokens(self, document: Any) -> list[Tokens]:
        given = cast("dict[str, Any]", document).get(self._column) if isinstance(document, dict) else document
        if isinstance(given, list | tuple | np.ndarray | torch.Tensor):
            return [np.asarray(given, dtype=np.int64)]
        text = text_of(document, self._column, type(self._documents).__name__)
        return [self._tokenizer.tokens(text).astype(np.int64), self._tokenizer.separator().astype(np.int64)]


class _Numbered:
    """Documents that are found by number, as a stream that knows where it stands."""

    def __init__(self, documents: Any, *, seed: int, shuffle: bool) -> None:
        self._documents = documents
        self._order = Order(len(documents), seed=seed, shuffle=shuffle) if len(documents) else None
        self.order = f"{len(documents)} documents, order {VERSION}, seed {seed}" if shuffle else "as they come"
        self._epoch = self._place = 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch, self._place = epoch, 0

    def state_dict(self) -> dict[str, int]:
        return {"place": self._place}

    def load_state_dict(self, state: dict[str, int], /) -> None:
        self._place = state["place"]

    def __iter__(self) -> Iterator[Any]:
        while self._order is not None and self._place < self._order.length:
            sample = np.array([self._epoch * self._order.length + self._place])
            self._place += 1
            yield self._documents[int(self._order.items(sample)[0])]
