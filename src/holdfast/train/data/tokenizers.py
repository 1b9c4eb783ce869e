"""Owns making tokens of text: its bytes, or what a tokenizer says."""

from __future__ import annotations

import json
from hashlib import blake2b
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[Any]


class Tokenizer(Protocol):
    """Makes tokens of text."""

    @property
    def name(self) -> str:
        """The same for two that make the same tokens."""
        ...

    @property
    def dtype(self) -> type[np.unsignedinteger[Any]]: ...

    def tokens(self, text: str | bytes) -> Tokens:
        """Those of a piece of text."""
        ...

    def separator(self) -> Tokens:
        """Those between two documents."""
        ...


class ByteTokenizer:
    """Every byte is a token; documents are parted by an empty line."""

    name = "bytes"
    dtype = np.uint8

    def tokens(self, text: str | bytes) -> Tokens:
        return np.frombuffer(text.encode() if isinstance(text, str) else text, dtype=np.uint8)

    def separator(self) -> Tokens:
        return self.tokens(b"\n\n")


class HfTokenizer:
    """A tokenizer of transformers'; documents are parted by its end-of-sequence token, where it has one."""

    dtype = np.uint32

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        end = tokenizer.eos_token_id
        self._separator = np.array([] if end is None else [end], dtype=np.uint32)
        fast = getattr(tokenizer, "backend_tokenizer", None)
        said = fast.to_str() if fast is not None else json.dumps([repr(tokenizer), sorted(tokenizer.get_vocab())])
        self.name = f"{type(tokenizer).__name__} {blake2b(cast('str', said).encode(), digest_size=8).hexdigest()}"

    def tokens(self, text: str | bytes) -> Tokens:
        plain = text.decode() if isinstance(text, bytes) else text
        return np.array(self._tokenizer.encode(plain, add_special_tokens=False), dtype=np.uint32)

    def separator(self) -> Tokens:
        return self._separator


def make_tokenizer(given: Any) -> Tokenizer:
    """The tokenizer that is meant: None is bytes, a string what transformers finds by it, else one of theirs."""
    if given is None:
        return ByteTokenizer()
    if isinstance(given, str):
        from transformers import AutoTokenizer  # pyright: ignore[reportUnknownVariableType] - seconds; few need it

        given = cast("Any", AutoTokenizer).from_pretrained(given)
    return HfTokenizer(given)
