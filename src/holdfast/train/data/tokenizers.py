"""Converts text to tokens: bytes, or the tokens of a tokenizer."""

from __future__ import annotations

import json
from hashlib import blake2b
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from holdfast.errors import require_extra

Tokens = NDArray[Any]


class Tokenizer(Protocol):
    """Converts text to tokens."""

    @property
    def name(self) -> str:
        """Equal for tokenizers that produce the same tokens."""
        ...

    @property
    def dtype(self) -> type[np.unsignedinteger[Any]]: ...

    def tokens(self, text: str | bytes) -> Tokens:
        """The tokens of a piece of text."""
        ...

    def separator(self) -> Tokens:
        """The tokens between two documents."""
        ...


class ByteTokenizer:
    """Every byte is a token; an empty line separates documents."""

    name = "bytes"
    dtype = np.uint8

    def tokens(self, text: str | bytes) -> Tokens:
        return np.frombuffer(text.encode() if isinstance(text, str) else text, dtype=np.uint8)

    def separator(self) -> Tokens:
        return self.tokens(b"\n\n")


class HfTokenizer:
    """A transformers tokenizer; its end-of-sequence token, if any, separates documents."""

    dtype = np.uint32

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        end = tokenizer.eos_token_id
        self._separator = np.array([] if end is None else [end], dtype=np.uint32)
        fast = getattr(tokenizer, "backend_tokenizer", None)
        definition = fast.to_str() if fast is not None else json.dumps([repr(tokenizer), sorted(tokenizer.get_vocab())])
        self.name = f"{type(tokenizer).__name__} {blake2b(cast('str', definition).encode(), digest_size=8).hexdigest()}"

    def tokens(self, text: str | bytes) -> Tokens:
        plain = text.decode() if isinstance(text, bytes) else text
        return np.array(self._tokenizer.encode(plain, add_special_tokens=False), dtype=np.uint32)

    def separator(self) -> Tokens:
        return self._separator


def make_tokenizer(given: Any) -> Tokenizer:
    """The tokenizer for an argument: None is bytes, a string is a transformers name, else a transformers tokenizer."""
    if given is None:
        return ByteTokenizer()
    if isinstance(given, str):
        require_extra("hf", "transformers", "a tokenizer's name needs")
        from transformers import AutoTokenizer  # pyright: ignore[reportUnknownVariableType] - seconds; few need it

        given = cast("Any", AutoTokenizer).from_pretrained(given)
    return HfTokenizer(given)
