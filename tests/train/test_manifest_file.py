"""Checkpoints of which anything at all was changed: never resumed from, and the older one is, with a finding."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.train.forged_manifests import as_format_1
from tests.train.test_checkpoint_manager import save

from holdfast.errors import HoldfastError
from holdfast.train.checkpoint import manifest_file
from holdfast.train.checkpoint.digested_json import with_digest
from holdfast.train.checkpoint.manager import CheckpointManager
from holdfast.train.checkpoint.manifest_file import Manifest
from holdfast.train.checkpoint.retention_policy import RetentionPolicy
from holdfast.train.checkpoint.storage import SharedStorage
from holdfast.train.checkpoint.train_state import TrainState
from holdfast.train.checkpoint.writer_fence import WriterId
from holdfast.train.session.control_group import ControlGroup


def checkpoints(folder: Path) -> tuple[torch.nn.Linear, CheckpointManager]:
    model = torch.nn.Linear(1, 1)
    training = TrainState(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    storage = SharedStorage(folder, retention=RetentionPolicy(keep=9), ranks=ControlGroup(), writer=WriterId())
    return model, CheckpointManager(storage, train_state=training, ranks=ControlGroup())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With checkpoints of steps 10 and 20, whose weights are the steps."""
    model, saving = checkpoints(tmp_path)
    for step in (10, 20):
        torch.nn.init.constant_(model.weight, step)
        save(saving, step, samples=4 * step)
    return tmp_path


def assert_older_is_resumed_from(folder: Path) -> None:
    model, loading = checkpoints(folder)
    restored = loading.restore()
    assert (restored.step, restored.samples, model.weight.item()) == (10, 40, 10)
    assert [finding.code for finding in restored.findings] == ["checkpoint-corrupt"]
    shutil.rmtree(folder / "step-00000020.damaged")


def test_every_flipped_bit_of_a_manifest_is_damage_and_never_a_later_version(folder: Path):
    newest = folder / "step-00000020"
    whole = (newest / manifest_file.NAME).read_bytes()
    assert isinstance(manifest_file.read(newest, 20), Manifest)
    assert isinstance(manifest_file.read(newest, 10), str)
    for place in range(len(whole)):
        for bit in range(8):
            flipped = bytearray(whole)
            flipped[place] ^= 1 << bit
            assert isinstance(manifest_file.decode(bytes(flipped), 20), str), (place, bit)
    for length in range(len(whole)):
        assert isinstance(manifest_file.decode(whole[:length], 20), str), length


@pytest.mark.slow
def test_every_byte_of_the_files_of_a_checkpoint_that_is_flipped_is_damage(folder: Path):
    newest = folder / "step-00000020"
    manifest = manifest_file.read(newest, 20)
    assert isinstance(manifest, Manifest)
    assert {*manifest.files} == {path.name for path in newest.iterdir()} - {manifest_file.NAME}
    for name, expected in manifest.files.items():
        path = newest / name
        assert manifest_file.find_damage(path, expected) is None
        whole = path.read_bytes()
        with path.open("r+b", buffering=0) as file:
            for place, byte in enumerate(whole):
                os.pwrite(file.fileno(), bytes([byte ^ 1 << place % 8]), place)
                assert manifest_file.find_damage(path, expected) is not None, (name, place)
                os.pwrite(file.fileno(), whole[place : place + 1], place)
        assert manifest_file.find_damage(path, expected) is None


@pytest.mark.parametrize(
    ("was", "becomes"),
    [
        (b'"samples":80', b'"samples":90'),
        (b'"step":20', b'"step":30'),
        (b'"format":2', b'"format":3'),
        (b'"world_size":1', b'"world_size":3'),
        (b'"node_s":0.0', b'"node_s":8.0'),
    ],
)
def test_seal_whose_number_was_changed_has_the_older_one_resumed_from(folder: Path, was: bytes, becomes: bytes):
    file = folder / "step-00000020" / manifest_file.NAME
    assert was in file.read_bytes()
    file.write_bytes(file.read_bytes().replace(was, becomes))
    assert_older_is_resumed_from(folder)


def test_byte_that_is_flipped_in_any_file_has_the_older_one_resumed_from(folder: Path, tmp_path: Path):
    newest = folder / "step-00000020"
    whole = {path: path.read_bytes() for path in newest.iterdir()}
    for path, content in whole.items():
        for place in (0, len(content) // 2, len(content) - 1):
            newest.mkdir(exist_ok=True)
            for other, was in whole.items():
                other.write_bytes(was)
            path.write_bytes(content[:place] + bytes([content[place] ^ 64]) + content[place + 1 :])
            assert_older_is_resumed_from(folder)


def test_folder_of_another_step_has_the_older_one_resumed_from(folder: Path):
    shutil.rmtree(folder / "step-00000020")
    shutil.copytree(folder / "step-00000010", folder / "step-00000020")
    assert_older_is_resumed_from(folder)


def loop(path: Path) -> None:
    path.symlink_to(path.with_name("other end"))
    path.with_name("other end").symlink_to(path)


STRANGE: dict[str, Callable[[Path], object]] = {
    "FIFO": os.mkfifo,
    "link to a device without end": lambda path: path.symlink_to("/dev/zero"),
    "folder": Path.mkdir,
    "looping link": loop,
}


@pytest.mark.parametrize("kind", STRANGE)
@pytest.mark.parametrize("name", [manifest_file.NAME, ".metadata", "__0_0.distcp", "rank-00000.pt", ""])
@pytest.mark.timeout(30)
def test_what_is_no_file_in_place_of_one_has_the_older_one_resumed_from(folder: Path, name: str, kind: str):
    newest = folder / "step-00000020"
    path = newest / name
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    STRANGE[kind](path)
    if name or kind == "folder":
        assert_older_is_resumed_from(folder)
    else:
        assert checkpoints(folder)[1].restore().step == 10


def test_link_to_a_whole_file_is_as_good_as_the_file(folder: Path, tmp_path: Path):
    path = folder / "step-00000020" / "__0_0.distcp"
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert checkpoints(folder)[1].restore()[:2] == (20, [])


def test_seal_of_a_later_version_is_still_told_from_damage(folder: Path):
    file = folder / "step-00000020" / manifest_file.NAME
    file.write_bytes(with_digest(b'{"format":3,"how":"otherwise"}'))
    with pytest.raises(HoldfastError) as refused:
        checkpoints(folder)[1].restore()
    assert refused.value.findings[0].code == "checkpoint-from-later-version"
    assert file.exists()


def test_seal_of_an_earlier_version_is_refused_and_left_untouched_and_a_damaged_one_is_damage(folder: Path):
    file = folder / "step-00000020" / manifest_file.NAME
    as_format_1(file)
    for _ in range(2):
        with pytest.raises(HoldfastError) as refused:
            checkpoints(folder)[1].restore()
        assert refused.value.findings[0].code == "checkpoint-from-earlier-version"
    whole = file.read_bytes()
    assert isinstance(manifest_file.decode(whole, 10), str)
    assert all(isinstance(manifest_file.decode(whole[:length], 20), str) for length in range(len(whole)))


def test_signed_manifest_whose_format_was_changed_to_the_earlier_one_is_damage(folder: Path):
    file = folder / "step-00000020" / manifest_file.NAME
    file.write_bytes(file.read_bytes().replace(b'"format":2', b'"format":1'))
    assert_older_is_resumed_from(folder)


def test_seal_that_is_too_large_for_one_is_not_read(folder: Path):
    os.truncate(folder / "step-00000020" / manifest_file.NAME, manifest_file.MAX_BYTES + 1)
    assert_older_is_resumed_from(folder)


@pytest.mark.timeout(30)
def test_fifo_that_should_name_the_writer_does_not_block_the_start(folder: Path):
    (folder / "writer-0.json").unlink()
    os.mkfifo(folder / "writer-0.json")
    assert checkpoints(folder)[1].restore().step == 20
