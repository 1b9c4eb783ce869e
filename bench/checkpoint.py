"""What a checkpoint costs the loop, and how long loading one takes, compared with torch.distributed.checkpoint.

.venv/bin/python -m bench.checkpoint [--quick] [--only PART] [--rounds N] [--loads N] [--layers N]
    [--folder FOLDER]

One process of one rank trains a model whose weights and AdamW state come to 1 GiB and more. In each round it saves once
with torch's `async_save` (A, its defaults), once with holdfast (B), and once with torch again (A'), in an order that
changes, with training steps during the writes. It measures for each save: the stall of the loop (the call, and the time
that an optimizer step waited for it), the time until it is on disk, and its size there. A training step comes right
before each call, as in a loop, because it changes the processor's caches.

Then it loads each side's checkpoint in turn from the page cache: verified, as holdfast always does, and without the
check. Copying the state once into allocated memory is the floor of any stall.
"""

from __future__ import annotations

import argparse
import functools
import random
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy.random
import torch
import torch.distributed as dist
from torch.distributed import checkpoint as dcp

from bench import result_file
from bench.paired_stats import OURS, PEER, PEER_AGAIN, Round, compare, estimate, headline, interleave, say, table
from holdfast.findings import Finding
from holdfast.train import RankConfig, Session
from holdfast.train.checkpoint.manager import CheckpointManager
from holdfast.train.checkpoint.manifest_file import FileChecksum, Manifest
from holdfast.train.checkpoint.retention_policy import RetentionPolicy
from holdfast.train.checkpoint.storage import CheckpointRef, SharedStorage
from holdfast.train.checkpoint.train_state import TrainState
from holdfast.train.checkpoint.writer_fence import WriterId
from holdfast.train.session.control_group import ControlGroup

STALL_GOAL, LOAD_GOAL, UNVERIFIED_GOAL, BYTES_GOAL, WALL_GOAL = 0.2, 1.1, 1.0, 1.01, 1.05
ROUNDS, LOADS = 12, 12
PARTS = ("saves", "rival", "loads")
WIDTH, LAYERS, BATCH = 4096, 6, 16
"""Six layers are 0.4 GB of weights, 1.2 GB with the optimizer's state."""
COMMITS, SAVES = 10, 8
"""Steps between saves where a Session saves, and the most steps that it does."""
STEPS = 3
"""Training steps right after each save has begun; more follow until it is on disk."""


@dataclass(frozen=True, kw_only=True)
class Save:
    """Measurements of one save."""

    stall_s: float
    steps_s: float
    """The call and the steps right after it, which share the cores with the writer."""
    wall_s: float
    disk_bytes: int


@dataclass(frozen=True)
class Believed:
    """A checkpoint that is loaded without verifying its files."""

    checkpoint: CheckpointRef

    @property
    def step(self) -> int:
        return self.checkpoint.step

    @property
    def where(self) -> str:
        return self.checkpoint.where

    @property
    def folder(self) -> Path:
        return self.checkpoint.folder

    def manifest(self) -> Manifest | str:
        return self.checkpoint.manifest()

    def fetch(self, names: Iterable[str]) -> None:
        self.checkpoint.fetch(names)

    def find_damage(self, name: str, expected: FileChecksum) -> str | None:
        return None

    def quarantine(self, damage: str) -> Finding:
        return self.checkpoint.quarantine(damage)


class Believing(SharedStorage):
    """A checkpoint directory that loads without verification."""

    def take_over(self) -> list[CheckpointRef]:
        return [Believed(copy) for copy in super().take_over()]


class Loop:
    """A training loop, and both ways to save it."""

    def __init__(self, folder: Path, layers: int) -> None:
        self._folder = folder
        model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(layers)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
        self.train_state = TrainState(model=model, optimizer=optimizer)
        self._batch = torch.randn(BATCH, WIDTH)
        self._count = 0
        self._theirs = folder / "theirs"
        self.train()
        self._checkpoints = self._opened(SharedStorage)
        self._checkpoints.prepare()

    @property
    def state_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in _tensors(self.train_state.tensors()))

    def _opened(self, kind: type[SharedStorage]) -> CheckpointManager:
        ranks = ControlGroup()
        storage = kind(self._folder / "ours", retention=RetentionPolicy(keep=1), ranks=ranks, writer=WriterId())
        return CheckpointManager(storage, train_state=self.train_state, ranks=ranks)

    def train(self) -> None:
        """One step."""
        self._forward()
        self.train_state.optimizer.step()

    def _forward(self) -> None:
        self.train_state.optimizer.zero_grad()
        self.train_state.model(self._batch).square().mean().backward()

    def _steps(self) -> None:
        for _ in range(STEPS):
            self.train()

    def ours(self) -> Save:
        """Save as a Session does."""
        self._count += 1
        self.train()
        self._checkpoints.take_stalled_s()
        began = time.perf_counter()
        self._checkpoints.start_save(self._count)
        stall_s = time.perf_counter() - began
        self._steps()
        steps_s = time.perf_counter() - began
        while (saved := self._checkpoints.poll()) is None:
            self.train()
        assert saved.problem is None, saved.problem
        stall_s += self._checkpoints.take_stalled_s()
        self._checkpoints.close()  # deletes the previous one, as the peer does
        return Save(stall_s=stall_s, steps_s=steps_s, wall_s=saved.took_s, disk_bytes=_disk_bytes(Path(saved.path)))

    def theirs(self) -> Save:
        """Save with torch's `async_save`, its defaults untouched; delete the previous one when this one is complete."""
        former, self._theirs = self._theirs, self._folder / f"theirs-{time.monotonic_ns()}"
        ended: list[float] = []
        self.train()
        began = time.perf_counter()
        saving = dcp.async_save(self.train_state.tensors(), checkpoint_id=self._theirs)
        stall_s = time.perf_counter() - began
        saving.add_done_callback(lambda _: ended.append(time.perf_counter()))
        self._steps()
        steps_s = time.perf_counter() - began
        while not ended:
            self.train()
        saving.result()
        shutil.rmtree(former, ignore_errors=True)
        return Save(stall_s=stall_s, steps_s=steps_s, wall_s=ended[0] - began, disk_bytes=_disk_bytes(self._theirs))

    def others(self, manager: Any, *, exact: bool) -> Save:
        """Save with torch_checkpointing, and wait for its `lock` before the optimizer changes anything.

        It receives the state as its tutorial shows, with or without the RNG state, which holdfast saves.
        """
        folder = self._folder / "others"
        shutil.rmtree(folder, ignore_errors=True)
        ended: list[float] = []
        self.train()
        began = time.perf_counter()
        model, optimizer = self.train_state.model.state_dict(), self.train_state.optimizer.state_dict()
        given = {"model": model, "optimizer": optimizer, "step": self._count}
        saving = manager.save(str(folder), given | _random() if exact else given)
        stall_s = time.perf_counter() - began
        saving.add_done_callback(lambda _: ended.append(time.perf_counter()))
        self._forward()
        asked = time.perf_counter()
        with manager.lock():
            stall_s += time.perf_counter() - asked
            self.train_state.optimizer.step()
        for _ in range(STEPS - 1):
            self.train()
        steps_s = time.perf_counter() - began
        while not ended:
            self.train()
        saving.result()
        return Save(stall_s=stall_s, steps_s=steps_s, wall_s=ended[0] - began, disk_bytes=_disk_bytes(folder))

    def load(self) -> float:
        """Resume from torch's checkpoint; return the seconds."""
        began = time.perf_counter()
        state = self.train_state.tensors()
        dcp.load(state, checkpoint_id=self._theirs)
        self.train_state.load_tensors(state)
        return time.perf_counter() - began

    def restore(self, kind: type[SharedStorage]) -> float:
        """Resume from holdfast's checkpoint; return the seconds."""
        checkpoints = self._opened(kind)
        began = time.perf_counter()
        restored = checkpoints.restore()
        took_s = time.perf_counter() - began
        assert (restored.step, restored.findings) == (self._count, [])
        checkpoints.close()
        return took_s

    def close(self) -> None:
        self._checkpoints.close()

    def floor_s(self) -> float:
        """Copy the whole state once, in one thread, into allocated memory."""
        sources = list(_tensors(self.train_state.tensors()))
        room = [tensor.clone() for tensor in sources]
        took_s: list[float] = []
        with torch.no_grad():
            for _ in range(5):
                began = time.perf_counter()
                for source, copy in zip(sources, room, strict=True):
                    copy.copy_(source)
                took_s.append(time.perf_counter() - began)
        return median(took_s)


def main() -> None:
    """Measure, and print a line per round and a table."""
    parser = argparse.ArgumentParser(prog="bench.checkpoint", description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--loads", type=int, default=LOADS)
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--folder", type=Path, help="where to save; a temporary folder, if not given")
    parser.add_argument(
        "--only", choices=PARTS, help="one part: saves, loads, or the stall compared with torch_checkpointing"
    )
    parser.add_argument("--quick", action="store_true", help="only to see that it works")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args()
    if options.quick:
        options.rounds = options.loads = 2
        options.layers = 1
    headline("checkpoint: one rank, saves during training and loads, compared with torch.distributed.checkpoint")
    warnings.filterwarnings("ignore", module="torch")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        loop = Loop(Path(folder), options.layers)
        say(f"state {loop.state_bytes / 2**30:.2f} GiB; copying it once takes {loop.floor_s():.3f} s")
        for warm in (loop.theirs, loop.ours):
            warm()
        saves: dict[str, list[Save]] = {PEER: [], OURS: [], PEER_AGAIN: []}

        def saved(side: str, save: Callable[[], Save]) -> Callable[[], float]:
            def one() -> float:
                saves[side].append(save())
                return saves[side][-1].stall_s

            return one

        sides = {
            PEER: saved(PEER, loop.theirs),
            OURS: saved(OURS, loop.ours),
            PEER_AGAIN: saved(PEER_AGAIN, loop.theirs),
        }
        rows: list[tuple[str, ...]] = []
        found: list[result_file.Result] = []
        rival: list[tuple[str, ...]] = []
        parts = (options.only,) if options.only else PARTS
        if "saves" in parts:
            stalls = interleave(sides, options.rounds, unit="s of stall")
            rows += _rows_of_saves(stalls, saves)
            found.append(
                result_file.from_rounds("stall of the loop per save", stalls, goal=STALL_GOAL, unit="s", peer="DCP")
            )
            floor_s, peer_s = loop.floor_s(), median(each[PEER] for each in stalls)
            say(f"one copy of the state: {floor_s:.3f} s, {floor_s / peer_s:.3f} of DCP's stall")
        if "rival" in parts:
            rival = _rival(loop, options.rounds)
            _anatomy(loop, Path(folder), saves=min(SAVES, options.rounds))
        loop.close()
        if "loads" in parts:
            for what, goal, kind in (
                ("every file verified", LOAD_GOAL, SharedStorage),
                ("without verification", UNVERIFIED_GOAL, Believing),
            ):
                loads = {PEER: loop.load, OURS: lambda kind=kind: loop.restore(kind), PEER_AGAIN: loop.load}
                rounds = interleave(loads, options.loads, unit=f"s to load, {what}")
                rows.append(_row(f"load, {what}", goal, rounds))
                found.append(result_file.from_rounds(f"load, {what}", rounds, goal=goal, unit="s", peer="DCP"))
    dist.destroy_process_group()
    result_file.save(options.json, "Cost of a checkpoint", found)
    if rows:
        say(table(("", "goal", "holdfast / DCP", "A/A floor", "DCP", "met"), rows))
    if rival:
        say(table(("stall of the loop compared with", "goal", "holdfast / peer", "A/A floor", "peer", "met"), rival))


def _rows_of_saves(stalls: list[Round], saves: Mapping[str, list[Save]]) -> list[tuple[str, ...]]:
    def of(measure: Callable[[Save], float]) -> list[Round]:
        return [{side: measure(each[index]) for side, each in saves.items()} for index in range(len(stalls))]

    return [
        _row("stall of the loop", STALL_GOAL, stalls),
        _row(f"the save's call and {STEPS} steps after it", None, of(lambda save: save.steps_s)),
        _row("save, until it is on disk", WALL_GOAL, of(lambda save: save.wall_s)),
        _row("bytes on disk", BYTES_GOAL, of(lambda save: save.disk_bytes)),
    ]


def _rival(loop: Loop, rounds: int) -> list[tuple[str, ...]]:
    """Measure the same stall compared with torch_checkpointing, where it is installed.

    All defaults except direct I/O, with which its version 0.1.1 cannot end a file that is not whole blocks.
    """
    try:
        from torch_checkpointing.checkpoint_manager import CheckpointManager
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig
    except ModuleNotFoundError:
        say("torch_checkpointing is not installed, so it is left out: pip install torch_checkpointing==0.1.1")
        return []
    storage = LocalFileSystemStorageConfig(use_direct_io=False)
    manager = CheckpointManager(CheckpointManager.Config(storage_config=storage))
    try:
        loop.others(manager, exact=True)
    except TimeoutError as error:  # its process has 30 s to start, which a busy machine may not give it
        say(f"torch_checkpointing is left out: {error}")
        return []

    rows: list[tuple[str, ...]] = []
    for what, exact in (("with the same state", True), ("without random numbers", False)):
        theirs = functools.partial(_stall_ms, functools.partial(loop.others, manager, exact=exact))
        sides = {PEER: theirs, OURS: functools.partial(_stall_ms, loop.ours), PEER_AGAIN: theirs}
        stalls_ms = interleave(sides, rounds, unit=f"ms of stall (peer: torch_checkpointing), {what}")
        stalls = [{side: ms / 1e3 for side, ms in each.items()} for each in stalls_ms]
        rows.append(_row(f"torch_checkpointing, {what}", STALL_GOAL, stalls))
    manager.close()
    return rows


def _anatomy(loop: Loop, folder: Path, *, saves: int) -> None:
    """Print the total time of a step's commit, with and without the start of a save."""
    told = RankConfig(checkpoint_path=folder / "session", checkpoint_every_steps=COMMITS, checkpoint_keep=1)
    session = Session(model=loop.train_state.model, optimizer=loop.train_state.optimizer, config=told)
    took_ms: dict[bool, list[float]] = {True: [], False: []}
    for step in session.steps(saves * COMMITS + 1):
        loop.train()
        began = time.perf_counter()
        session.commit(tokens=BATCH)
        took_ms[step % COMMITS == 0].append(1e3 * (time.perf_counter() - began))
    begins, others = took_ms[True][1:], took_ms[False][COMMITS:-1]  # the first save asks torch, the last step waits
    say(f"commit() of a step that begins a save: {estimate(begins)} ms; of another: {estimate(others)} ms")


def _stall_ms(save: Callable[[], Save]) -> float:
    return 1e3 * save().stall_s


def _row(what: str, goal: float | None, rounds: list[Round]) -> tuple[str, ...]:
    compared = compare(rounds)
    peer = median(each[PEER] for each in rounds)
    shown = f"{peer / 1e6:,.1f} MB" if peer > 1e6 else f"{peer:.2f} s" if peer > 0.1 else f"{peer * 1e3:.2f} ms"
    aim, met = ("", "") if goal is None else (f"<= {goal}", compared.verdict(goal))
    return what, aim, str(compared.ratio), str(compared.floor), shown, met


def _random() -> dict[str, Any]:
    """The states of the random generators, each in its library's format."""
    return {"python": random.getstate(), "numpy": numpy.random.get_state(legacy=False), "torch": torch.get_rng_state()}


def _tensors(tree: Any) -> Iterable[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, Mapping | list):
        for value in tree.values() if isinstance(tree, Mapping) else tree:
            yield from _tensors(value)


def _disk_bytes(folder: Path) -> int:
    return sum(file.stat().st_blocks * 512 for file in folder.rglob("*") if file.is_file())


if __name__ == "__main__":
    main()
