from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from tests.train.forged_manifests import as_format_1, rewrite

from holdfast.errors import HoldfastError
from holdfast.train.integrations.checkpoint_dir import CheckpointDir, FinalizeResult
from holdfast.train.session.control_group import ControlGroup

ALONE = ControlGroup()


def fill(checkpoint_dir: CheckpointDir, step: int) -> Path:
    """What a framework might leave there."""
    path = checkpoint_dir.path(step)
    (path / "shards").mkdir(parents=True)
    (path / "weights").write_bytes(bytes([step]) * 10)
    (path / "shards" / "0").write_bytes(b"shard")
    return path


def seal(checkpoint_dir: CheckpointDir, step: int) -> FinalizeResult:
    checkpoint_dir.start(step, ALONE, node_s=1.0 * step, began=0.0)
    result = checkpoint_dir.wait()
    assert result is not None
    return result


@pytest.fixture
def checkpoint_dir(tmp_path: Path) -> CheckpointDir:
    """With two that are sealed."""
    checkpoint_dir = CheckpointDir(tmp_path)
    for step in (9, 10):
        fill(checkpoint_dir, step)
        assert seal(checkpoint_dir, step).problem is None
    return checkpoint_dir


def test_newest_is_the_one_of_the_latest_step(checkpoint_dir: CheckpointDir):
    found = checkpoint_dir.latest(world_size=1)
    assert (found.path, found.node_s, found.findings) == (checkpoint_dir.path(10), 10.0, [])


def test_empty_folder_has_none(tmp_path: Path):
    assert CheckpointDir(tmp_path / "none").latest(world_size=1) == (None, None, [])


def unsealed(path: Path) -> None:
    (path / "manifest.json").unlink()


def torn(path: Path) -> None:
    (path / "manifest.json").write_bytes(b'{"format"')


def later(path: Path) -> None:
    rewrite(path / "manifest.json", {"format": 99})


def believed_no_more(path: Path) -> None:
    file = path / "manifest.json"
    file.write_text(file.read_text().replace('"format":2', '"format":3'))


def renamed(path: Path) -> None:
    shutil.rmtree(path)
    shutil.copytree(path.with_name("checkpoint-9"), path)


def fifo(path: Path) -> None:
    (path / "weights").unlink()
    os.mkfifo(path / "weights")


def flipped(path: Path) -> None:
    (path / "shards" / "0").write_bytes(b"sherd")


def missing(path: Path) -> None:
    (path / "weights").unlink()


@pytest.mark.parametrize("hurt", [unsealed, torn, flipped, missing, believed_no_more, renamed, fifo])
def test_checkpoint_that_differs_from_its_manifest_is_skipped_by_name(checkpoint_dir: CheckpointDir, hurt):
    hurt(checkpoint_dir.path(10))
    path, _, noticed = checkpoint_dir.latest(world_size=1)
    assert path == checkpoint_dir.path(9)
    assert [(finding.code, finding.where) for finding in noticed] == [
        ("checkpoint-skipped", str(checkpoint_dir.path(10)))
    ]
    has_manifest = hurt in (flipped, missing, fifo)
    assert noticed[0].remedy.startswith("Check the storage" if has_manifest else "Nothing, if it was cut")


def test_one_of_a_later_version_is_refused_and_left_untouched(checkpoint_dir: CheckpointDir):
    later(checkpoint_dir.path(10))
    with pytest.raises(HoldfastError) as refused:
        checkpoint_dir.latest(world_size=1)
    (finding,) = refused.value.findings
    assert (finding.code, finding.where) == ("checkpoint-from-later-version", str(checkpoint_dir.path(10)))
    assert "upgrade holdfast" in finding.remedy
    assert checkpoint_dir.path(10).is_dir()


def test_one_of_an_earlier_version_is_refused_and_left_untouched(checkpoint_dir: CheckpointDir):
    as_format_1(checkpoint_dir.path(10) / "manifest.json")
    with pytest.raises(HoldfastError) as refused:
        checkpoint_dir.latest(world_size=1)
    assert refused.value.findings[0].code == "checkpoint-from-earlier-version"
    assert checkpoint_dir.path(10).is_dir()


def test_another_number_of_ranks_is_said(checkpoint_dir: CheckpointDir):
    path, _, noticed = checkpoint_dir.latest(world_size=4)
    assert path == checkpoint_dir.path(10)
    assert [finding.code for finding in noticed] == ["world-size-changed"]


def test_checkpoint_that_cannot_be_read_back_gets_no_manifest(tmp_path: Path):
    checkpoint_dir = CheckpointDir(tmp_path)
    path = fill(checkpoint_dir, 1)
    (path / "manifest.json").mkdir()
    problem = seal(checkpoint_dir, 1).problem
    assert problem is not None
    assert problem.code == "checkpoint-manifest-missing"
    assert checkpoint_dir.latest(world_size=1).path is None
