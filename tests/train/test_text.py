from __future__ import annotations

from pathlib import Path

import pytest
import torch

from holdfast.errors import HoldfastError
from holdfast.train import Text


def windows(tokens: torch.Tensor) -> list[bytes]:
    return [bytes(row.tolist()) for row in tokens]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Twenty windows of four bytes, each different, in two files."""
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "first.txt").write_bytes(b"".join(b"%03d." % n for n in range(10))[:-2])
    (tmp_path / "second.txt").write_bytes(b"".join(b"%03d." % n for n in range(10, 20)))
    return tmp_path


def test_documentation_is_english_bytes_of_the_shape_asked_for():
    tokens = Text(length=65).tokens(range(4))
    assert tokens.shape == (4, 65)
    assert tokens.dtype == torch.int64
    assert b" the " in b"".join(windows(Text(length=65).tokens(range(64))))


def test_sample_is_the_same_in_another_process_life():
    samples = range(2800, 2804)
    assert torch.equal(Text(length=65).tokens(samples), Text(length=65).tokens(samples))
    assert not torch.equal(Text(length=65).tokens(samples), Text(length=65, seed=1).tokens(samples))


def test_epoch_sees_every_window_once(folder: Path):
    text = Text([folder], length=4)
    seen = [window for first in range(0, 20, 2) for window in windows(text.tokens(range(first, first + 2)))]
    assert len(seen) == len(set(seen)) == 20
    assert sorted(windows(text.tokens(range(20, 40)))) == sorted(seen) != seen


def test_text_shorter_than_a_sample_is_refused(folder: Path):
    with pytest.raises(HoldfastError) as refused:
        Text([folder / "second.txt"], length=41)
    assert refused.value.findings[0].code == "text-too-short"
