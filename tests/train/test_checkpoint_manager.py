from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from tests.conftest import SmallDisk, fill
from tests.train.forged_manifests import rewrite

from holdfast.errors import HoldfastError
from holdfast.findings import Owner
from holdfast.train.checkpoint import dcp_io, staging
from holdfast.train.checkpoint.manager import CheckpointManager
from holdfast.train.checkpoint.retention_policy import RetentionPolicy
from holdfast.train.checkpoint.storage import SharedStorage, save_failed
from holdfast.train.checkpoint.train_state import TrainState
from holdfast.train.checkpoint.writer_fence import WriterFence, WriterId, to_error
from holdfast.train.session.control_group import ControlGroup

ALONE = WriterId()


class Counter:
    """Some state of the user's own."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.count = state_dict["count"]


def training(width: int = 4) -> TrainState:
    model = torch.nn.Linear(width, width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)
    return TrainState(model=model, optimizer=optimizer, scheduler=scheduler, state={"count": Counter()})


def train(loop: TrainState) -> None:
    loop.optimizer.zero_grad()
    loop.model(torch.randn(2, loop.model.in_features)).square().sum().backward()
    loop.optimizer.step()
    loop.scheduler.step()
    loop.state["count"].count += 1


def checkpoints(
    folder: Path,
    loop: TrainState,
    *,
    keep: int = 3,
    world_size: int = 1,
    writer: WriterId = ALONE,
    lasting: bool = True,
) -> CheckpointManager:
    ranks = ControlGroup(world_size=world_size)
    storage = SharedStorage(folder, retention=RetentionPolicy(keep=keep), ranks=ranks, writer=writer)
    return CheckpointManager(storage, train_state=loop, ranks=ranks, writer=writer, durable=lasting)


def save(manager: CheckpointManager, step: int, samples: int | None = None) -> str:
    """Save a checkpoint and wait until it is complete; returns its path."""
    manager.start_save(step, samples)
    saved = manager.wait_saved()
    assert saved is not None
    if saved.problem is not None:
        raise to_error(saved.problem)
    assert saved.size_bytes > 0
    return saved.path


def complete(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("step-*"))


def weights(loop: TrainState) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in loop.model.parameters()]


def same(ones: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(ones, others, strict=True))


@pytest.fixture
def trained(tmp_path: Path) -> tuple[Path, dict[int, list[torch.Tensor]]]:
    """A folder with checkpoints of steps 1 and 2, and the weights of each."""
    loop, kept = training(), {}
    for step in (1, 2):
        train(loop)
        save(checkpoints(tmp_path, loop), step)
        kept[step] = weights(loop)
    return tmp_path, kept


def test_restore_of_an_empty_or_missing_folder_starts_at_0(tmp_path: Path):
    assert checkpoints(tmp_path / "none yet", training()).restore()[:2] == (0, [])


def test_restored_loop_continues_exactly_as_the_saved_one(tmp_path: Path):
    first, second = training(), training()
    train(first)
    save(checkpoints(tmp_path, first), 1)
    train(first)
    drawn = torch.rand(1), random.random()

    assert checkpoints(tmp_path, second).restore()[:2] == (1, [])
    train(second)
    assert (torch.rand(1), random.random()) == drawn
    assert same(weights(second), weights(first))
    assert second.optimizer.state_dict()["param_groups"] == first.optimizer.state_dict()["param_groups"]
    assert second.state["count"].count == 2


class Seen(Counter):
    """Has nothing in it yet, and is there all the same."""

    def __len__(self) -> int:
        return 0


def test_state_of_the_users_own_that_counts_as_empty_is_saved(tmp_path: Path):
    def empty() -> TrainState:
        loop = training()
        return TrainState(model=loop.model, optimizer=loop.optimizer, state={"count": Seen()})

    first, second = empty(), empty()
    first.state["count"].count = 7
    save(checkpoints(tmp_path, first), 1)
    checkpoints(tmp_path, second).restore()
    assert second.state["count"].count == 7


def test_every_generator_continues_where_it_stood(tmp_path: Path):
    def draw() -> tuple[float, ...]:
        return random.random(), random.gauss(0, 1), *np.random.rand(2), np.random.randn(), torch.randn(1).item()

    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(7)
    draw()  # of a pair of normal numbers the second is kept back
    save(checkpoints(tmp_path, training()), 1)
    unfailed = [draw() for _ in range(3)]
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(8)
    other = training()
    assert draw() != unfailed[0]
    checkpoints(tmp_path, other).restore()
    assert [draw() for _ in range(3)] == unfailed


class Odd(torch.nn.Module):
    """Tensors of many types, and in orders that a file's bytes have or have not."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(seed)
        drawn = torch.randn(6, 4, 3, 5, generator=random)
        kinds = (torch.float64, torch.bfloat16, torch.complex64, torch.float8_e4m3fn, torch.int16, torch.bool)
        odd = [drawn.to(kind) for kind in kinds]
        odd += [drawn[0, 0, 0, 0], drawn[:0], drawn.to(memory_format=torch.channels_last), drawn.transpose(0, 1)]
        odd += [drawn[1:3], drawn[:, 1:3]]
        for number, tensor in enumerate(odd):
            self.register_buffer(f"odd{number}", tensor)
        self.weight = torch.nn.Parameter(drawn.clone().transpose(2, 3))


def test_tensors_of_any_type_and_order_are_loaded_as_they_were(tmp_path: Path):
    saved, loaded = (
        TrainState(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1)) for model in (Odd(1), Odd(2))
    )
    save(checkpoints(tmp_path, saved), 1)
    checkpoints(tmp_path, loaded).restore()
    for (name, was), now in zip(saved.model.state_dict().items(), loaded.model.state_dict().values(), strict=True):
        assert (now.dtype, now.stride()) == (was.dtype, was.stride()), name
        assert torch.equal(now.to(torch.complex64), was.to(torch.complex64)), name


def flip_a_bit(folder: Path) -> None:
    content = bytearray((folder / "__0_0.distcp").read_bytes())
    content[len(content) // 2] ^= 1
    (folder / "__0_0.distcp").write_bytes(content)


def truncate(folder: Path) -> None:
    with (folder / "__0_0.distcp").open("r+b") as file:
        file.truncate(100)


@pytest.mark.parametrize(
    "damage",
    [
        flip_a_bit,
        truncate,
        lambda folder: (folder / ".metadata").unlink(),
        lambda folder: (folder / "rank-00000.pt").unlink(),
        lambda folder: (folder / "manifest.json").unlink(),
        lambda folder: (folder / "manifest.json").write_text("{"),
    ],
    ids=["bit flipped", "truncated", "no index", "no host file", "no seal", "torn seal"],
)
def test_damaged_checkpoint_is_set_aside_and_the_one_before_loaded(trained, damage):
    folder, kept = trained
    damage(folder / "step-00000002")
    loop = training()
    step, noticed, *_ = checkpoints(folder, loop).restore()
    assert step == 1
    assert same(weights(loop), kept[1])
    assert [finding.code for finding in noticed] == ["checkpoint-corrupt"]
    assert noticed[0].where == str(folder / "step-00000002.damaged")
    assert noticed[0].evidence

    train(loop)
    save(checkpoints(folder, loop), 2)
    assert checkpoints(folder, training()).restore()[:2] == (2, [])


def test_partial_checkpoint_is_cleared_and_the_one_before_loaded(trained):
    folder, _ = trained
    (folder / "step-00000002").rename(folder / "writing-0-0" / "step-00000002")
    assert checkpoints(folder, training()).restore()[:2] == (1, [])
    assert sorted(path.name for path in folder.iterdir()) == ["lock-0", "step-00000001", "writer-0.json"]


def test_older_checkpoints_go_once_more_than_keep_are_complete(tmp_path: Path):
    loop = training()
    for step in (5, 9, 12, 100):
        saving = checkpoints(tmp_path, loop, keep=2)
        save(saving, step)
        saving.close()
    assert complete(tmp_path) == ["step-00000012", "step-00000100"]
    assert list((tmp_path / "writing-0-0").iterdir()) == []


def test_checkpoints_of_every_so_many_steps_stay(tmp_path: Path):
    loop = training()
    storage = SharedStorage(
        tmp_path, retention=RetentionPolicy(keep=1, keep_every_steps=10), ranks=ControlGroup(), writer=ALONE
    )
    kept = CheckpointManager(storage, train_state=loop, ranks=ControlGroup())
    for step in (5, 10, 15, 20, 25, 28):
        save(kept, step)
    kept.close()
    assert complete(tmp_path) == ["step-00000010", "step-00000020", "step-00000028"]


def test_save_is_over_before_older_checkpoints_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    go_on, drop = threading.Event(), WriterFence.drop

    def drop_late(fence: WriterFence, final: Path) -> None:
        assert go_on.wait(60)
        drop(fence, final)

    monkeypatch.setattr(WriterFence, "drop", drop_late)
    saving = checkpoints(tmp_path, training(), keep=1)
    save(saving, 1)
    save(saving, 2)
    assert complete(tmp_path) == ["step-00000001", "step-00000002"]
    go_on.set()
    saving.close()
    assert complete(tmp_path) == ["step-00000002"]


@pytest.mark.parametrize("damage", [flip_a_bit, lambda folder: (folder / "manifest.json").unlink()])
def test_folder_where_every_checkpoint_is_damaged_is_an_error_and_the_next_start_begins_anew(trained, damage):
    folder, _ = trained
    for step in (1, 2):
        damage(folder / f"step-{step:08d}")
    with pytest.raises(HoldfastError) as refused:
        checkpoints(folder, training()).restore()
    assert refused.value.findings[0].code == "no-valid-checkpoint"
    assert len(refused.value.findings[0].evidence) == 2
    assert checkpoints(folder, training()).restore()[:2] == (0, [])


def test_checkpoints_that_were_lost_with_a_pod_are_not_called_damaged(trained):
    folder, _ = trained
    for step in (1, 2):
        flip_a_bit(folder / f"step-{step:08d}")
    again: dict[str, Any] = {"writer": WriterId(run="run", attempt=1), "lasting": False}
    with pytest.raises(HoldfastError) as refused:
        checkpoints(folder, training(), **again).restore()
    (finding,) = refused.value.findings
    assert finding.code == "checkpoints-lost-with-pod"
    assert "no volume" in finding.evidence[0]
    assert "volume: {claim: NAME}" in finding.remedy
    step, noticed = checkpoints(folder, training(), **again).restore()[:2]
    assert (step, [each.code for each in noticed]) == (0, ["checkpoints-lost-with-pod"])
    assert checkpoints(folder, training(), lasting=False).restore()[:2] == (0, [])


def test_save_under_way_holds_what_was_true_when_it_began_and_the_optimizer_waits_for_its_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    loop = training(64)
    changed = threading.Event()
    loop.optimizer.register_step_post_hook(lambda *_: changed.set())
    copy = staging._copy

    def copy_late(pairs: list) -> None:
        changed.wait(0.3)  # in vain, where the optimizer waits
        copy(pairs)

    monkeypatch.setattr(staging, "_copy", copy_late)
    saving = checkpoints(tmp_path, loop)
    for step in (1, 2):
        train(loop)
        saved = weights(loop)
        changed.clear()
        saving.start_save(step)
        train(loop)
        assert saving.wait_saved().problem is None
        again = training(64)
        assert checkpoints(tmp_path, again).restore().step == step
        assert same(weights(again), saved)


def test_buffers_that_the_next_forward_pass_changes_are_saved_as_they_were(tmp_path: Path):
    def normed() -> TrainState:
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
        return TrainState(model=model, optimizer=torch.optim.AdamW(model.parameters()))

    loop, again = normed(), normed()
    loop.model(torch.randn(8, 4)).sum().backward()
    loop.optimizer.step()
    was = [buffer.clone() for buffer in loop.model.buffers()]
    saving = checkpoints(tmp_path, loop)
    saving.start_save(1)
    loop.model(torch.randn(8, 4))
    assert saving.wait_saved().problem is None
    assert not same(was, [*loop.model.buffers()])
    assert checkpoints(tmp_path, again).restore().step == 1
    assert same(was, [*again.model.buffers()])


def test_weights_changed_while_they_are_copied_cost_that_checkpoint_and_no_later_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    loop = training()
    train(loop)
    copying, changed = threading.Event(), threading.Event()
    copy = staging._copy

    def copy_late(pairs: list) -> None:
        copying.set()
        assert changed.wait(60)
        copy(pairs)

    monkeypatch.setattr(staging, "_copy", copy_late)
    saving = checkpoints(tmp_path, loop)
    changed.set()
    saving.prepare()
    changed.clear()
    # Copies of what nothing owns are made immediately: only those of the optimizer's own can lag behind the change.
    saving.start_save(1)
    assert copying.wait(60)
    with torch.no_grad():
        loop.model.weight.zero_()
    changed.set()
    assert saving.wait_saved().problem.code == "checkpoint-not-bit-exact"

    assert save(saving, 2) == str(tmp_path / "step-00000002")
    again = training()
    assert checkpoints(tmp_path, again).restore().step == 2
    assert same(weights(again), weights(loop))


def test_checkpoint_of_another_model_is_refused_and_left_untouched(trained):
    folder, _ = trained
    with pytest.raises(HoldfastError) as refused:
        checkpoints(folder, training(width=5)).restore()
    assert refused.value.findings[0].code == "checkpoint-incompatible"
    assert checkpoints(folder, training()).restore()[:2] == (2, [])


@pytest.mark.parametrize("later", [{"files": {}}, {"files": ["a", "b"], "step": "two"}])
def test_checkpoint_of_a_later_version_is_refused_and_left_untouched(trained, later: dict[str, Any]):
    folder, _ = trained
    manifest = folder / "step-00000002" / "manifest.json"
    rewrite(manifest, {"format": 99} | later)
    with pytest.raises(HoldfastError) as refused:
        checkpoints(folder, training()).restore()
    assert refused.value.findings[0].code == "checkpoint-from-later-version"
    assert manifest.exists()


def test_checkpoint_of_another_world_size_is_loaded_and_told_as_such(tmp_path: Path):
    save(checkpoints(tmp_path, training(), world_size=2), 7)
    restored = checkpoints(tmp_path, training()).restore()
    assert (restored.step, restored.saved_world_size, restored.findings) == (7, 2, [])


def test_rank_that_is_new_draws_no_random_numbers_that_another_rank_draws(tmp_path: Path):
    torch.manual_seed(1)
    save(checkpoints(tmp_path, training()), 7)
    first = torch.rand(1)
    for rank, draws_the_same in ((0, True), (1, False)):
        torch.manual_seed(2)
        storage = SharedStorage(tmp_path, retention=RetentionPolicy(keep=3), ranks=ControlGroup(), writer=ALONE)
        ranks = ControlGroup(rank=rank, world_size=2)
        assert CheckpointManager(storage, train_state=training(), ranks=ranks).restore().step == 7
        assert torch.equal(torch.rand(1), first) is draws_the_same


@pytest.mark.parametrize(
    ("folder", "code", "remedy"),
    [
        ("file", "checkpoint-store-unreachable", "A file is where a folder is needed"),
        ("file/below", "checkpoint-store-unreachable", "A file is"),
        ("/proc/none", "checkpoint-failed", "See whether the folder"),
    ],
)
def test_save_where_nothing_can_be_written_is_a_named_failure_with_what_to_do(
    tmp_path: Path, folder: str, code: str, remedy: str
):
    (tmp_path / "file").touch()
    with pytest.raises(HoldfastError) as raised:
        save(checkpoints(tmp_path / folder, training()), 1)
    (finding,) = raised.value.findings
    assert (finding.code, finding.owner) == (code, Owner.CLUSTER)
    assert finding.evidence
    assert finding.remedy.startswith(remedy)


@pytest.mark.root
@pytest.mark.parametrize("closed", [".", "step-00000001/manifest.json", "step-00000001/rank-00000.pt"])
def test_what_may_not_be_read_is_neither_damaged_nor_absent(closed: str):
    with TemporaryDirectory() as made:  # whose parents let everybody through, as pytest's own do not
        folder = Path(made)
        save(checkpoints(folder, training()), 1)
        (folder / closed).chmod(0o711 if closed == "." else 0)
        os.chown(folder, 0 if closed == "." else 65534, -1)
        again = training()
        os.seteuid(65534)
        try:
            with pytest.raises(HoldfastError) as raised:
                checkpoints(folder, again).restore()
        finally:
            os.seteuid(0)
        (finding,) = raised.value.findings
        assert finding.code == "checkpoint-store-unreachable"
        assert "Permission denied" in finding.evidence[0]
        assert complete(folder) == ["step-00000001"]


def test_folder_that_vanished_between_two_saves_is_said_once(tmp_path: Path):
    folder, saving = tmp_path / "checkpoints", checkpoints(tmp_path / "checkpoints", training())
    save(saving, 1)
    shutil.rmtree(folder)
    with pytest.raises(HoldfastError) as raised:
        save(saving, 2)
    assert raised.value.findings[0].code == "checkpoint-failed"
    assert "vanished since the last save" in raised.value.findings[0].evidence[0]
    save(saving, 3)
    assert complete(folder) == ["step-00000003"]


def test_folder_that_vanished_and_is_a_later_attempts_by_now_stays_that_ones(tmp_path: Path):
    folder = tmp_path / "checkpoints"
    old, new = (checkpoints(folder, training(), writer=attempt(number)) for number in range(2))
    save(old, 1)
    shutil.rmtree(folder)
    new.restore()
    assert refused(old, 2) == "attempt-superseded"
    save(new, 1)
    assert complete(folder) == ["step-00000001"]


def test_save_that_permissions_forbid_says_whose(tmp_path: Path):
    finding = save_failed(tmp_path / "step-00000001", 0, PermissionError(13, "Permission denied", str(tmp_path)))
    assert finding.remedy.startswith(f"Let user {os.geteuid()} read and write there")


def test_folder_that_vanishes_in_the_middle_of_a_save_is_named_and_the_next_save_makes_it_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    loop, folder, write = training(), tmp_path / "checkpoints", dcp_io.write
    train(loop)
    saving = checkpoints(folder, loop)
    save(saving, 1)

    def vanishing(*args: Any) -> list[Path]:
        written = write(*args)
        shutil.rmtree(folder)
        return written

    monkeypatch.setattr(dcp_io, "write", vanishing)
    with pytest.raises(HoldfastError) as raised:
        save(saving, 2)
    (finding,) = raised.value.findings
    assert finding.code == "checkpoint-failed"
    assert finding.remedy.startswith("See whether the folder was removed")
    monkeypatch.undo()
    save(saving, 3)
    again = training()
    assert checkpoints(folder, again).restore()[:2] == (3, [])
    assert same(weights(again), weights(loop))


@pytest.mark.root
def test_full_disk_leaves_nothing_of_the_failed_one_and_the_older_untouched(small_disk: SmallDisk):
    disk = small_disk(1 << 20)
    loop = training()
    train(loop)
    save(checkpoints(disk, loop), 1)
    saved = weights(loop)
    ballast = fill(disk)
    with ballast.open("r+b") as file:
        file.truncate(ballast.stat().st_size - (8 << 10))  # room for a beginning

    train(loop)
    with pytest.raises(HoldfastError) as failed:
        save(checkpoints(disk, loop), 2)
    (finding,) = failed.value.findings
    assert finding.code == "disk-full"
    assert any(line.startswith(f"tmpfs on {disk}: ") for line in finding.evidence)
    assert complete(disk) == ["step-00000001"]
    assert list((disk / "writing-0-0").iterdir()) == []
    again = training()
    assert checkpoints(disk, again).restore()[:2] == (1, [])
    assert same(weights(again), saved)

    ballast.unlink()
    save(checkpoints(disk, loop), 2)
    assert checkpoints(disk, training()).restore()[:2] == (2, [])


@pytest.mark.root
def test_folder_that_became_read_only_is_said_and_the_older_untouched(small_disk: SmallDisk):
    disk = small_disk(1 << 20)
    loop = training()
    train(loop)
    save(checkpoints(disk, loop), 1)
    deadline = time.monotonic() + 60
    # The lock on the folder, an open file, goes with its owner: not before the thread that tidies up has let that go.
    while subprocess.run(["mount", "-o", "remount,ro", disk], check=False, capture_output=True).returncode:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    with pytest.raises(HoldfastError) as failed:
        save(checkpoints(disk, loop), 2)
    assert failed.value.findings[0].code == "read-only-file-system"
    assert checkpoints(disk, training()).restore()[:2] == (1, [])


def attempt(number: int, *, run: str = "run-1") -> WriterId:
    return WriterId(run=run, attempt=number)


def refused(old: CheckpointManager, step: int) -> str:
    with pytest.raises(HoldfastError) as raised:
        save(old, step)
    return raised.value.findings[0].code


def test_attempt_that_was_replaced_commits_nothing_more(tmp_path: Path):
    old_loop, new_loop = training(), training()
    old, new = (checkpoints(tmp_path, loop, writer=attempt(n)) for n, loop in enumerate((old_loop, new_loop)))
    assert old.restore()[:2] == (0, [])
    train(old_loop)
    save(old, 1)
    assert new.restore()[:2] == (1, [])
    train(old_loop)
    assert refused(old, 2) == "attempt-superseded"
    with pytest.raises(HoldfastError):
        old.restore()
    train(new_loop)
    save(new, 2)
    assert complete(tmp_path) == ["step-00000001", "step-00000002"]
    third = training()
    assert checkpoints(tmp_path, third, writer=attempt(2)).restore()[:2] == (2, [])
    assert same(weights(third), weights(new_loop))


def test_step_that_another_replica_saved_before_it_was_lost_stays_and_the_next_is_saved(tmp_path: Path):
    loops = training(), training()
    of_each = (WriterId(run="run", replica=number) for number in range(2))
    lost, left = (checkpoints(tmp_path, loop, writer=each) for loop, each in zip(loops, of_each, strict=True))
    train(loops[0])
    save(lost, 1)
    train(loops[1])
    save(left, 1)
    save(left, 2)
    assert complete(tmp_path) == ["step-00000001", "step-00000002"]
    assert [*tmp_path.glob("writing-*/*")] == []
    found = training()
    (tmp_path / "step-00000002").rename(tmp_path / "later")
    assert checkpoints(tmp_path, found).restore()[:2] == (1, [])
    assert same(weights(found), weights(loops[0]))


def test_attempt_replaced_in_the_middle_of_a_commit_does_not_get_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The moment after it has read that the folder is its own is the worst."""
    old, new = (checkpoints(tmp_path, training(), writer=attempt(number)) for number in range(2))
    old.restore()
    look = old._storage._fence._refuse_successor

    def overtaken() -> None:
        look()
        monkeypatch.undo()
        assert new.restore()[:2] == (0, [])

    monkeypatch.setattr(old._storage._fence, "_refuse_successor", overtaken)
    assert refused(old, 1) == "attempt-superseded"
    assert complete(tmp_path) == []
    save(new, 1)
    assert complete(tmp_path) == ["step-00000001"]


def test_new_run_takes_over_the_checkpoints_of_an_old_one_with_more_attempts(tmp_path: Path):
    old = checkpoints(tmp_path, training(), writer=attempt(7))
    old.restore()
    save(old, 5)
    new = checkpoints(tmp_path, training(), writer=attempt(0, run="run-2"))
    assert new.restore()[:2] == (5, [])
    save(new, 6)
    assert complete(tmp_path) == ["step-00000005", "step-00000006"]


HOLD = """
import sys
from pathlib import Path
from holdfast.train.checkpoint.writer_fence import WriterFence, WriterId
fence = WriterFence(Path(sys.argv[1]), WriterId(run=sys.argv[2]))
fence.take_over()
print("held", flush=True)
sys.stdin.read()
"""


LOCK_AS_A_READER = """
import fcntl, os, sys
os.setgid(65534), os.setuid(65534)
try:
    held = open(sys.argv[1], "rb")
    fcntl.lockf(held, fcntl.LOCK_SH | fcntl.LOCK_NB)
except OSError as error:
    print(type(error).__name__, flush=True)
else:
    print("locked", flush=True)
sys.stdin.read()
"""


@pytest.mark.root
def test_folder_is_saved_in_though_somebody_who_may_only_read_it_would_lock_it(tmp_path: Path):
    with tempfile.TemporaryDirectory() as shared:
        folder = Path(shared, "checkpoints")
        folder.mkdir()
        for each in (Path(shared), folder):
            each.chmod(0o755)
        checkpoints(folder, training(), writer=attempt(0)).restore()
        (folder / "lock-0").chmod(0o644)  # as an earlier version made it
        checkpoints(folder, training(), writer=attempt(0)).restore()
        command = [sys.executable, "-c", LOCK_AS_A_READER, str(folder / "lock-0")]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as reader:
            assert reader.stdout.readline() == "PermissionError\n"
            new = checkpoints(folder, training(), writer=attempt(0, run="run-2"))
            new.restore()
            save(new, 5)
            reader.stdin.close()
        assert complete(folder) == ["step-00000005"]


def test_folder_that_another_live_run_saves_in_is_refused_until_that_has_ended(tmp_path: Path):
    command = [sys.executable, "-c", HOLD, str(tmp_path), "run-1"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(HoldfastError) as raised:
            checkpoints(tmp_path, training(), writer=attempt(0, run="run-2")).restore()
        (finding,) = raised.value.findings
        assert finding.code == "checkpoints-in-use"
        assert "run-1" in finding.what
        # A later attempt of the same run need not wait for one that is beyond reach.
        assert checkpoints(tmp_path, training(), writer=attempt(1)).restore()[:2] == (0, [])
        other.stdin.close()
        assert other.wait(60) == 0
    assert checkpoints(tmp_path, training(), writer=attempt(0, run="run-2")).restore()[:2] == (0, [])
