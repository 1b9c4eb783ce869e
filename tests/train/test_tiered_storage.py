"""Checkpoints on the nodes' own disks before a store: a folder, and a server that speaks S3 to its real client."""

from __future__ import annotations

import errno
import os
import shutil
import threading
import urllib.request
from collections.abc import Callable, Generator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from tests.train.forged_manifests import as_format_1, rewrite
from tests.train.test_checkpoint_manager import same, save, train, training, weights

from holdfast.errors import HoldfastError
from holdfast.findings import Finding
from holdfast.train.checkpoint.local_tier import LocalTier
from holdfast.train.checkpoint.manager import CheckpointManager
from holdfast.train.checkpoint.remote_tier import RemoteTier
from holdfast.train.checkpoint.retention_policy import RetentionPolicy
from holdfast.train.checkpoint.tiered_storage import TieredStorage
from holdfast.train.checkpoint.train_state import TrainState
from holdfast.train.checkpoint.writer_fence import WriterId
from holdfast.train.session.control_group import ControlGroup

if TYPE_CHECKING:
    import s3fs

BUCKET = "models"


@pytest.fixture(scope="module")
def endpoint() -> Generator[str]:
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    yield "http://{}:{}".format(*server.get_host_and_port())
    server.stop()


@pytest.fixture
def s3(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> s3fs.S3FileSystem:
    """A client of a server that has one bucket."""
    import s3fs

    told = {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "b",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_MAX_ATTEMPTS": "1",
    }
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    urllib.request.urlopen(urllib.request.Request(f"{endpoint}/moto-api/reset", method="POST"), timeout=60).close()
    s3fs.S3FileSystem.clear_instance_cache()  # it knows a client by its arguments, which do not hold the endpoint
    client = s3fs.S3FileSystem(use_listings_cache=False)
    client.mkdir(BUCKET)
    return client


@pytest.fixture(params=["folder", pytest.param("S3", marks=pytest.mark.slow)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A store of either kind."""
    if request.param == "folder":
        return str(tmp_path / "store")
    request.getfixturevalue("s3")
    return f"s3://{BUCKET}/run"


def tiers(local: Path, url: str, *, keep: int = 3, attempt: int = 0, run: str = "run-1") -> TieredStorage:
    writer = WriterId(run=run, attempt=attempt)
    return TieredStorage(local, RemoteTier(url, writer), retention=RetentionPolicy(keep=keep), ranks=ControlGroup())


def checkpoints(storage: TieredStorage, loop: TrainState) -> CheckpointManager:
    return CheckpointManager(storage, train_state=loop, ranks=ControlGroup())


def saved(storage: TieredStorage, *steps: int, loop: TrainState | None = None) -> TrainState:
    """Train and save, and see each step to the store."""
    loop = loop or training()
    saving = checkpoints(storage, loop)
    saving.restore()
    for step in steps:
        train(loop)
        save(saving, step)
        assert saving.close() is None
    return loop


def in_store(url: str) -> list[str]:
    return [folder for _, folder in RemoteTier(url, WriterId()).list_complete()]


def on_node(local: Path) -> list[str]:
    return sorted(path.name for path in local.glob("*/rank-00000/step-*"))


def files_of(local: Path, step: int) -> Path:
    (folder,) = local.glob(f"*/rank-00000/step-{step:08d}")
    return folder


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def test_checkpoints_come_to_the_store_and_are_loaded_on_a_new_node(url: str, tmp_path: Path):
    loop = saved(tiers(tmp_path / "node0", url, keep=2), 1, 2, 3)
    assert in_store(url) == ["step-00000003.0", "step-00000002.0"]
    assert on_node(tmp_path / "node0") == ["step-00000002", "step-00000003"]
    again = training()
    restored = checkpoints(tiers(tmp_path / "node1", url, attempt=1), again).restore()
    assert restored[:2] == (3, [])
    assert same(weights(again), weights(loop))
    assert not list((tmp_path / "node1").glob("*/*/reading/*"))


def test_what_a_rank_left_that_is_on_another_node_now_goes_with_what_is_too_old(tmp_path: Path):
    url, node = str(tmp_path / "store"), tmp_path / "node"
    loop = saved(tiers(node, url), 1, 2)
    own = files_of(node, 1).parent
    left, other_run = own.with_name("rank-00007"), node / "other" / "rank-00000"
    for folder in (left, other_run):
        shutil.copytree(own, folder)
    saved(tiers(node, url, attempt=1), 3, 4, loop=loop)
    assert on_node(node) == ["step-00000001", "step-00000002", "step-00000003", "step-00000004"]
    assert [*left.glob("step-*")] == []
    assert len([*other_run.glob("step-*")]) == 2


def test_node_reads_its_own_copy_and_fetches_only_what_it_lacks(url: str, tmp_path: Path, monkeypatch):
    saved(tiers(tmp_path / "node", url), 1)
    (files_of(tmp_path / "node", 1) / "rank-00000.pt").unlink()
    fetched: list[str] = []
    fetch = RemoteTier.download

    def noted(store: RemoteTier, folder: str, name: str, into: Path) -> None:
        fetched.append(name)
        fetch(store, folder, name, into)

    monkeypatch.setattr(RemoteTier, "download", noted)
    assert checkpoints(tiers(tmp_path / "node", url, attempt=1), training()).restore()[:2] == (1, [])
    assert fetched == ["rank-00000.pt"]


def test_damaged_copy_on_the_node_is_removed_and_the_stores_is_loaded(url: str, tmp_path: Path):
    loop = saved(tiers(tmp_path / "node", url), 1, 2)
    flip_a_bit(files_of(tmp_path / "node", 2) / "__0_0.distcp")
    again = training()
    restored = checkpoints(tiers(tmp_path / "node", url, attempt=1), again).restore()
    assert (restored.step, [finding.code for finding in restored.findings]) == (2, ["local-checkpoint-lost"])
    assert same(weights(again), weights(loop))
    assert on_node(tmp_path / "node") == ["step-00000001"]


def test_replica_that_begins_beside_another_leaves_what_that_one_loads_and_writes(tmp_path: Path):
    first, second = (LocalTier(tmp_path, "file:///store", 0, replica) for replica in (0, 1))
    for folder in (first.new_read_folder("step-00000001"), first.partial(2)):
        folder.mkdir(parents=True, exist_ok=True)
    second.clear()
    second.new_read_folder("step-00000001")
    assert len([*tmp_path.glob("*/rank-00000/reading/*"), *tmp_path.glob("*/rank-00000/writing/*")]) == 2


def truncate(store: RemoteTier, path: str) -> None:
    store._fs.pipe_file(path, store._fs.cat_file(path)[:100])


def remove(store: RemoteTier, path: str) -> None:
    store._fs.rm_file(path)


@pytest.mark.parametrize("damage", [truncate, remove])
@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "rank-00000.pt"])
def test_damaged_checkpoint_in_the_store_is_set_aside_and_the_one_before_loaded(
    url: str, tmp_path: Path, damage: Callable[[RemoteTier, str], None], name: str
):
    store = RemoteTier(url, WriterId())
    saved(tiers(tmp_path / "node0", url), 1, 2)
    damage(store, store._at("step-00000002.0", name))
    restored = checkpoints(tiers(tmp_path / "node1", url, attempt=1), training()).restore()
    assert (restored.step, [finding.code for finding in restored.findings]) == (1, ["checkpoint-corrupt"])
    assert restored.findings[0].where.endswith("step-00000002.0")
    assert in_store(url) == ["step-00000001.0"]
    assert store._fs.exists(store._at("step-00000002.0", "manifest.damaged.json"))


def test_save_waits_for_no_store_and_what_was_passed_over_is_brought_at_the_end(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    storage, go_on = tiers(tmp_path / "node", url), threading.Event()
    bring = storage.remote.upload

    def bring_late(step: int, files: list[Path]) -> None:
        assert go_on.wait(60)
        bring(step, files)

    monkeypatch.setattr(storage.remote, "upload", bring_late)
    loop = training()
    saving = checkpoints(storage, loop)
    saving.restore()
    for step in (1, 2, 3, 4):
        train(loop)
        save(saving, step)
    saving._pruning.result(60)
    assert in_store(url) == []
    assert on_node(tmp_path / "node") == ["step-00000001", "step-00000004"]
    go_on.set()
    assert saving.close() is None
    assert in_store(url) == ["step-00000004.0", "step-00000001.0"]


def test_checkpoint_that_only_its_node_has_is_gone_on_from_and_what_came_after_is_not_mixed_in(
    url: str, tmp_path: Path
):
    saved(tiers(tmp_path / "node", url), 1)
    loop, storage = training(), tiers(tmp_path / "node", url, attempt=1)
    saving = checkpoints(storage, loop)
    saving.restore()
    storage._start_upload = lambda whole: None  # the process was killed before it was brought
    train(loop)
    save(saving, 2)
    again = training()
    assert checkpoints(tiers(tmp_path / "node", url, attempt=2), again).restore()[:2] == (2, [])
    assert same(weights(again), weights(loop))
    flip_a_bit(files_of(tmp_path / "node", 2) / ".metadata")
    restored = checkpoints(tiers(tmp_path / "node", url, attempt=3), training()).restore()
    assert (restored.step, [finding.code for finding in restored.findings]) == (1, ["local-checkpoint-lost"])


def test_first_checkpoint_that_never_became_whole_is_no_reason_not_to_begin(url: str, tmp_path: Path):
    loop, storage = training(), tiers(tmp_path / "node", url)
    saving = checkpoints(storage, loop)
    saving.restore()
    storage._start_upload = lambda whole: None  # the ranks of the other node were killed before they had theirs
    save(saving, 1)
    (files_of(tmp_path / "node", 1) / "__0_0.distcp").unlink()
    restored = checkpoints(tiers(tmp_path / "node", url, attempt=1), training()).restore()
    assert (restored.step, [finding.code for finding in restored.findings]) == (0, ["local-checkpoint-lost"])
    assert on_node(tmp_path / "node") == []
    saved(tiers(tmp_path / "node", url, attempt=2), 1, loop=loop)
    assert in_store(url) == ["step-00000001.2"]


@pytest.mark.slow
def test_store_that_vanishes_in_the_middle_of_bringing_is_said_and_the_older_are_untouched(
    s3: s3fs.S3FileSystem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    url = f"s3://{BUCKET}/run"
    storage = tiers(tmp_path / "node", url)
    loop = saved(storage, 1)
    bring, away = storage.remote.upload, f"{BUCKET}-away"

    def bring_half(step: int, files: list[Path]) -> None:
        bring(step, files[:1])
        s3.mkdir(away)
        s3.copy(f"{BUCKET}/run", f"{away}/run", recursive=True)
        s3.rm(BUCKET, recursive=True)
        bring(step, files[1:])

    monkeypatch.setattr(storage.remote, "upload", bring_half)
    saving = checkpoints(storage, loop)
    train(loop)
    save(saving, 2)
    problem = saving.close()
    assert isinstance(problem, Finding)
    assert problem.code == "checkpoint-upload-failed"
    with pytest.raises(HoldfastError) as refused:
        checkpoints(tiers(tmp_path / "node", url, attempt=1), training()).restore()
    assert refused.value.findings[0].code == "checkpoint-store-unreachable"

    s3.mkdir(BUCKET)
    s3.copy(f"{away}/run", f"{BUCKET}/run", recursive=True)
    assert in_store(url) == ["step-00000001.0"]
    monkeypatch.undo()


def test_store_that_cannot_be_written_costs_no_save_on_the_node_and_is_said_with_the_next(tmp_path: Path):
    url = str(tmp_path / "store")
    storage, loop = tiers(tmp_path / "node", url), training()
    saving = checkpoints(storage, loop)
    saving.restore()
    shutil.rmtree(url)
    Path(url).touch()
    for step in (1, 2):
        train(loop)
        saving.start_save(step)
        done = saving.wait_saved()
        assert done.problem is None
        storage._uploading.exception(60)
    assert done.warning.code == "checkpoint-upload-failed"
    assert done.warning.evidence
    assert on_node(tmp_path / "node") == ["step-00000001", "step-00000002"]


def test_what_another_attempt_left_half_brought_is_removed(url: str, tmp_path: Path):
    saved(tiers(tmp_path / "node", url), 1)
    store = RemoteTier(url, WriterId(run="run-1"))
    store.upload(2, [files_of(tmp_path / "node", 1) / ".metadata"])
    assert checkpoints(tiers(tmp_path / "node", url, attempt=1), training()).restore()[:2] == (1, [])
    assert not store._fs.exists(store._at("step-00000002.0", ".metadata"))


@pytest.mark.parametrize(
    ("run", "number", "code"), [("run-1", 1, "attempt-superseded"), ("run-2", 0, "checkpoints-in-use")]
)
def test_writer_whose_store_was_taken_over_writes_no_manifest(
    url: str, tmp_path: Path, run: str, number: int, code: str
):
    loop = training()
    saving = checkpoints(tiers(tmp_path / "node0", url), loop)
    saving.restore()
    train(loop)
    save(saving, 1)
    assert saving.close() is None
    new = tiers(tmp_path / "node1", url, run=run, attempt=number)
    assert checkpoints(new, training()).restore()[:2] == (1, [])
    save(saving, 2)
    assert saving.close().code == code
    assert in_store(url) == ["step-00000001.0"]


def test_earlier_attempt_is_refused_at_its_start(url: str, tmp_path: Path):
    saved(tiers(tmp_path / "node", url, attempt=3), 1)
    with pytest.raises(HoldfastError) as refused:
        saved(tiers(tmp_path / "node", url, attempt=2))
    assert refused.value.findings[0].code == "attempt-superseded"


def test_checkpoints_after_a_divergence_are_hidden_on_the_node_and_in_the_store(url: str, tmp_path: Path):
    storage = tiers(tmp_path / "node", url, keep=1)
    storage.agreed_step = 2
    saved(storage, 1, 2, 3)
    assert in_store(url) == ["step-00000003.0", "step-00000002.0"]
    storage.set_aside_after(2)
    assert in_store(url) == ["step-00000002.0"]
    assert on_node(tmp_path / "node") == ["step-00000002"]
    assert storage.close() is None
    assert in_store(url) == ["step-00000002.0"]


def test_store_of_an_unknown_kind_is_named():
    with pytest.raises(HoldfastError) as refused:
        RemoteTier("nosuch://bucket/run", WriterId())
    assert refused.value.findings[0].code == "checkpoint-store-unknown"


@pytest.mark.parametrize("kind", ["file://{}/deep/store", "dir://deep/store::file://{}", "memory://{}/store"])
def test_stores_of_other_kinds_are_written_kept_small_and_loaded(tmp_path: Path, kind: str):
    url = kind.format(tmp_path)
    loop = saved(tiers(tmp_path / "node0", url, keep=2), 1, 2, 3)
    assert in_store(url) == ["step-00000003.0", "step-00000002.0"]
    store = RemoteTier(url, WriterId())
    truncate(store, store._at("step-00000003.0", "__0_0.distcp"))
    restored = checkpoints(tiers(tmp_path / "node1", url, attempt=1), training()).restore()
    assert (restored.step, [finding.code for finding in restored.findings]) == (2, ["checkpoint-corrupt"])
    saved(tiers(tmp_path / "node1", url, attempt=2), 4, loop=loop)
    assert in_store(url) == ["step-00000004.2", "step-00000002.0"]


@pytest.mark.slow
def test_bucket_that_does_not_exist_is_named_and_not_made(s3: s3fs.S3FileSystem, tmp_path: Path):
    with pytest.raises(HoldfastError) as refused:
        checkpoints(tiers(tmp_path, "s3://mistyped/run"), training()).restore()
    assert refused.value.findings[0].code == "checkpoint-store-unreachable"
    assert s3.ls("") == [BUCKET]


def test_tensors_of_the_store_load_with_torch_alone(url: str, tmp_path: Path):
    loop = saved(tiers(tmp_path / "node", url), 1)
    RemoteTier(url, WriterId())._fs.get(
        RemoteTier(url, WriterId())._at("step-00000001.0"), str(tmp_path / "got"), recursive=True
    )
    state = {"model": {"weight": torch.zeros(4, 4)}}
    torch.distributed.checkpoint.load(state, checkpoint_id=tmp_path / "got", no_dist=True)
    assert torch.equal(state["model"]["weight"], loop.model.weight)


def test_damaged_manifest_of_a_local_copy_is_reported_and_the_remote_copy_is_loaded(url: str, tmp_path: Path):
    loop = saved(tiers(tmp_path / "node", url), 1, 2)
    flip_a_bit(files_of(tmp_path / "node", 2) / "manifest.json")
    again = training()
    step, noticed, *_ = checkpoints(tiers(tmp_path / "node", url, attempt=1), again).restore()
    assert (step, [finding.code for finding in noticed]) == (2, ["local-checkpoint-lost"])
    assert "manifest.json" in noticed[0].evidence[0]
    assert same(weights(again), weights(loop))
    assert on_node(tmp_path / "node") == ["step-00000001"]


def test_damaged_manifest_in_the_store_loads_the_older_checkpoint(url: str, tmp_path: Path):
    saved(tiers(tmp_path / "node", url), 1, 2)
    store = RemoteTier(url, WriterId())
    path = f"{store._root}/step-00000002.0/manifest.json"
    store._fs.pipe_file(path, store._fs.cat_file(path).replace(b'"format":2', b'"format":3'))
    step, noticed, *_ = checkpoints(tiers(tmp_path / "other node", url, attempt=1), training()).restore()
    assert (step, [finding.code for finding in noticed]) == (1, ["checkpoint-corrupt"])


class Failing(MemoryFileSystem):
    """A remote store that lists files and answers reads with 502, which s3fs raises as EIO."""

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: object) -> bytes:
        if path.endswith("/manifest.json"):
            raise OSError(errno.EIO, "Bad Gateway")
        return super().cat_file(path, start, end)


def test_seal_that_a_remote_store_fails_to_return_is_no_damage_and_stays(tmp_path: Path):
    url = f"memory://{tmp_path}/store"
    saved(tiers(tmp_path / "node", url), 1, 2)
    storage = tiers(tmp_path / "other node", url, attempt=1)
    storage.remote._fs = Failing()
    with pytest.raises(HoldfastError) as refused:
        checkpoints(storage, training()).restore()
    assert refused.value.findings[0].code == "checkpoint-store-unreachable"
    assert in_store(url) == ["step-00000002.0", "step-00000001.0"]


@pytest.mark.parametrize("name", ["manifest.json", "rank-00000.pt"])
def test_what_is_no_file_in_a_store_that_is_a_folder_has_the_older_one_loaded(tmp_path: Path, name: str):
    saved(tiers(tmp_path / "node", str(tmp_path / "store")), 1, 2)
    path = tmp_path / "store" / "step-00000002.0" / name
    path.unlink()
    os.mkfifo(path)
    storage = tiers(tmp_path / "other node", str(tmp_path / "store"), attempt=1)
    step, noticed, *_ = checkpoints(storage, training()).restore()
    assert (step, [finding.code for finding in noticed]) == (1, ["checkpoint-corrupt"])


def test_copy_of_a_later_version_on_a_node_is_refused(tmp_path: Path):
    saved(tiers(tmp_path / "node", str(tmp_path / "store")), 1, 2)
    rewrite(files_of(tmp_path / "node", 2) / "manifest.json", {"format": 99})
    with pytest.raises(HoldfastError) as refused:
        checkpoints(tiers(tmp_path / "node", str(tmp_path / "store"), attempt=1), training()).restore()
    assert refused.value.findings[0].code == "checkpoint-from-later-version"


def test_copy_of_an_earlier_version_is_refused_and_not_brought_to_the_store(tmp_path: Path):
    url = str(tmp_path / "store")
    saved(tiers(tmp_path / "node", url), 1, 2)
    shutil.rmtree(tmp_path / "store" / "step-00000002.0")
    as_format_1(files_of(tmp_path / "node", 2) / "manifest.json")
    for attempt in (1, 2):
        with pytest.raises(HoldfastError) as refused:
            checkpoints(tiers(tmp_path / "node", url, attempt=attempt), training()).restore()
        assert refused.value.findings[0].code == "checkpoint-from-earlier-version"
    assert in_store(url) == ["step-00000001.0"]
    assert on_node(tmp_path / "node") == ["step-00000001", "step-00000002"]
