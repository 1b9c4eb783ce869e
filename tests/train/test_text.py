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
    tokens = Text(batch=4, length=65).batch(1)
    assert tokens.shape == (4, 65)
    assert tokens.dtype == torch.int64
    assert b" the " in b"".join(windows(Text(batch=64, length=65).batch(1)))


def test_batch_of_a_step_is_the_same_in_another_process_life():
    assert torch.equal(Text(batch=4, length=65).batch(700), Text(batch=4, length=65).batch(700))
    assert not torch.equal(Text(batch=4, length=65).batch(700), Text(batch=4, length=65, seed=1).batch(700))


def test_epoch_over_two_ranks_sees_every_window_once(folder: Path):
    ranks = [Text([folder], batch=2, length=4, rank=rank, world_size=2) for rank in range(2)]
    seen = [window for step in range(1, 6) for text in ranks for window in windows(text.batch(step))]
    assert len(seen) == len(set(seen)) == 20


def test_batch_of_a_step_is_the_same_dealt_to_one_rank_or_two(folder: Path):
    one = Text([folder], batch=4, length=4).batch(9)
    two = [Text([folder], batch=2, length=4, rank=rank, world_size=2).batch(9) for rank in range(2)]
    assert torch.equal(one, torch.cat(two))


def test_text_shorter_than_a_step_is_refused(folder: Path):
    with pytest.raises(HoldfastError) as refused:
        Text([folder / "second.txt"], batch=6, length=4, world_size=2)
    assert refused.value.findings[0].code == "text-too-short"
