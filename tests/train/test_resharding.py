"""A checkpoint taken by ranks that share a model out in one way is loaded by ranks that do it in another."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

PROGRAM = Path(__file__).with_name("resharding.py")
PAIRS = (
    ("fsdp:4", "fsdp:2"),
    ("hsdp:4", "hsdp:4"),
    ("hsdp:4", "fsdp:2"),
    ("ddp:2", "fsdp:2"),
    ("fsdp:2", "plain:1"),
)


def flat(tree: object) -> list[object]:
    if isinstance(tree, dict):
        return [leaf for key in sorted(tree, key=str) for leaf in flat(tree[key])]
    return [leaf for each in tree for leaf in flat(each)] if isinstance(tree, list | tuple) else [tree]


def run(folder: Path, *ways: str) -> str:
    """Returns what the ranks said."""
    command = [sys.executable, str(PROGRAM), str(folder), *ways]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout + done.stderr


@pytest.mark.slow
def test_model_and_optimizer_are_the_same_to_the_bit_however_they_are_shared_out(tmp_path: Path):
    run(tmp_path, *(way for pair in PAIRS for way in pair))
    for number, (saving, loading) in enumerate(PAIRS):
        saved, loaded = (torch.load(tmp_path / f"{number}-{verb}.pt") for verb in ("saved", "loaded"))
        assert (saved[0], loaded[0]) == (0, 2)
        ones, others = flat(saved[1:]), flat(loaded[1:])
        tensors = [pair for pair in zip(ones, others, strict=True) if isinstance(pair[0], torch.Tensor)]
        assert len(tensors) > 20, saving
        assert all(torch.equal(*pair) for pair in tensors), (saving, loading)
        assert (tmp_path / str(number) / "step-00000003").is_dir()


@pytest.mark.slow
def test_checkpoint_that_lacks_one_ranks_shard_is_set_aside_by_all_and_named(tmp_path: Path):
    run(tmp_path, "fsdp:2", "-")
    newest = tmp_path / "0" / "step-00000002"
    (newest / "__1_0.distcp").unlink()
    said = run(tmp_path, "-", "fsdp:2")
    assert torch.load(tmp_path / "0-loaded.pt")[0] == 1
    assert "the checkpoint step-00000002 is damaged and was set aside" in said
    assert newest.with_name("step-00000002.damaged").is_dir()
    assert (newest / "__1_0.distcp").exists()  # taken again
