"""What a checkpoint holds is loaded without running code, and what it could not load is refused when it is saved."""

from __future__ import annotations

import io
import os
import pickle
import zlib
from collections import OrderedDict
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch.serialization import add_safe_globals, clear_safe_globals, get_safe_globals

from holdfast.errors import ExitCode, HoldfastError, failure
from holdfast.train import RankConfig, Session
from holdfast.train.checkpoint import safe_state
from holdfast.train.checkpoint.manager import CheckpointManager
from holdfast.train.checkpoint.manifest_file import Manifest
from holdfast.train.checkpoint.retention_policy import RetentionPolicy
from holdfast.train.checkpoint.storage import SharedStorage
from holdfast.train.checkpoint.train_state import TrainState
from holdfast.train.checkpoint.writer_fence import WriterId
from holdfast.train.ft import memory_snapshot
from holdfast.train.ft.memory_snapshot import MemorySnapshot, SnapshotHeader
from holdfast.train.session.control_group import ControlGroup


class Own:
    """A type of the user's."""

    def __init__(self, value: int) -> None:
        self.value = value


class Evil:
    """Leaves a file behind where it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.file),)


class Holder:
    """An object with a state of any kind."""

    def __init__(self, held: object) -> None:
        self.held = held

    def state_dict(self) -> dict[str, Any]:
        return {"held": self.held}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.held = state["held"]


SAFE = {
    "plain": {"a": [1, 2.5, None, "x", b"y", (True, 3 + 4j)], 7: {1, 2}},
    "ordered": OrderedDict(a=1),
    "big": 2**128 - 1,
    "tensors": [torch.arange(3), torch.ones(2, dtype=torch.bfloat16), torch.nn.Parameter(torch.ones(1))],
    "arrays": [numpy.arange(6).reshape(2, 3), numpy.array(["a", "bc"]), numpy.array([True])],
    "numbers of numpy's": [numpy.float64(1.5), numpy.int32(2), numpy.bool_(True)],
    "a generator of numpy's": numpy.random.default_rng(1).bit_generator.state,
}
UNSAFE = {"an own type": Own(1), "a function": len, "a frozen set": frozenset({1}), "a path": Path("a")}


class Colour(Enum):
    RED = "red"


class AsGetattr:
    """An attribute as Python 3.11.2 pickles members of enumerations."""

    def __init__(self, kind: type, name: str) -> None:
        self.pair = kind, name

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, self.pair


def test_members_of_enumerations_are_loaded_as_each_python_pickles_them() -> None:
    for written in (Colour.RED, AsGetattr(Colour, "RED")):
        file = io.BytesIO(pickle.dumps(written))
        assert safe_state.RestrictedUnpickler(file, safe_state.globals_of([Colour])).load() is Colour.RED


@pytest.mark.parametrize("kind", [Own, Colour])
def test_no_other_attribute_is_loaded(kind: type) -> None:
    file = io.BytesIO(pickle.dumps(AsGetattr(kind, "__init__")))
    with pytest.raises((pickle.UnpicklingError, KeyError)):
        safe_state.RestrictedUnpickler(file, safe_state.globals_of([Own, Colour])).load()


@pytest.mark.parametrize("value", SAFE.values(), ids=SAFE)
def test_value_that_is_safe_is_loaded_as_it_was(value: object) -> None:
    written = safe_state.to_bytes(value)
    assert safe_state.unsafe_types(written) == []
    assert repr(safe_state.load(io.BytesIO(written))) == repr(value)
    safe_state.refuse_unsafe("here", value)


@pytest.mark.parametrize("value", UNSAFE.values(), ids=UNSAFE)
def test_value_that_is_not_safe_is_named_and_is_not_loaded(value: object) -> None:
    written = safe_state.to_bytes([value])
    (name,) = safe_state.unsafe_types(written)
    assert type(value).__name__.lower().removeprefix("posix")[:4] in name.lower() or name == "builtins.len"
    with pytest.raises(pickle.UnpicklingError):
        safe_state.load(io.BytesIO(written))
    with pytest.raises(HoldfastError) as refused:
        safe_state.refuse_unsafe("here", {"deep": (value,)})
    assert refused.value.findings[0].evidence == (name,)


def test_type_that_the_program_registers_is_allowed_and_stays_registered() -> None:
    before = get_safe_globals()
    add_safe_globals([Own, numpy.ndarray])
    try:
        written = safe_state.to_bytes([Own(3), numpy.arange(2)])
        assert safe_state.unsafe_types(written) == []
        assert safe_state.load(io.BytesIO(written))[0].value == 3
        assert {Own, numpy.ndarray} <= {*get_safe_globals()}
    finally:
        clear_safe_globals()
        add_safe_globals(before)


def loop(**named: Any) -> TrainState:
    model = torch.nn.Linear(2, 2)
    return TrainState(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), **named)


def checkpoints(folder: Path, state: TrainState) -> CheckpointManager:
    storage = SharedStorage(folder, retention=RetentionPolicy(keep=3), ranks=ControlGroup(), writer=WriterId())
    return CheckpointManager(storage, train_state=state, ranks=ControlGroup())


def unsafe_group(state: TrainState) -> None:
    state.optimizer.param_groups[0]["own"] = Own(1)


def unsafe_object(state: TrainState) -> None:
    state.state["holder"].held = Own(1)


@pytest.mark.parametrize("spoil", [unsafe_group, unsafe_object])
def test_state_that_becomes_unsafe_fails_its_save_and_is_named(tmp_path: Path, spoil) -> None:
    state = loop(state={"holder": Holder(1)})
    state.refuse_unsafe()
    saving = checkpoints(tmp_path, state)
    spoil(state)
    with pytest.raises(HoldfastError):
        state.refuse_unsafe()
    saving.start_save(1)
    problem = saving.wait_saved().problem
    assert problem.code == "checkpoint-state-unsafe"
    assert "Own" in problem.evidence[0]
    assert [*tmp_path.glob("step-*")] == []


class Loader(Holder):
    """Counts how often it was asked."""

    asked = 0

    def __iter__(self) -> Iterator[int]:
        return iter(())

    def state_dict(self) -> dict[str, Any]:
        self.asked += 1
        return super().state_dict()


def test_loader_is_asked_for_its_state_only_when_it_is_saved(tmp_path: Path) -> None:
    loader = Loader(Own(1))
    state = loop(state={"loader": loader})
    state.refuse_unsafe()
    assert loader.asked == 0
    saving = checkpoints(tmp_path, state)
    saving.start_save(1)
    assert saving.wait_saved().problem.code == "checkpoint-state-unsafe"


@pytest.mark.parametrize(
    ("state", "code"),
    [
        ({"holder": Holder(Own(1))}, "checkpoint-state-unsafe"),
        ({"holder": object()}, "session-state-invalid"),
        ({"a.b": Holder(1)}, "session-state-invalid"),
    ],
)
def test_state_that_cannot_be_saved_is_refused_before_the_first_step(tmp_path: Path, state, code: str) -> None:
    made = loop()
    with pytest.raises(HoldfastError) as refused:
        Session(
            model=made.model, optimizer=made.optimizer, state=state, config=RankConfig(checkpoint_path=tmp_path / "c")
        )
    assert refused.value.findings[0].code == code


def test_object_that_does_not_take_its_state_back_is_named(tmp_path: Path) -> None:
    saving = checkpoints(tmp_path, loop(state={"holder": Holder(1)}))
    saving.start_save(1)
    assert saving.wait_saved().problem is None
    held = Holder(2)
    held.load_state_dict = lambda _: {}["absent"]
    with pytest.raises(HoldfastError) as refused:
        checkpoints(tmp_path, loop(state={"holder": held})).restore()
    (finding,) = refused.value.findings
    assert finding.code == "checkpoint-incompatible"
    assert "state['holder']: KeyError" in finding.evidence[0]

    def refuse(_: object) -> None:
        raise failure("own-code", "", exit_code=ExitCode.USAGE, remedy="")

    held.load_state_dict = refuse
    with pytest.raises(HoldfastError) as refused:
        checkpoints(tmp_path, loop(state={"holder": held})).restore()
    assert refused.value.findings[0].code == "own-code"  # holdfast's own objects say more


def test_objects_that_come_and_go_are_reported_and_the_others_restored(tmp_path: Path) -> None:
    mean = torch.nn.Linear(1, 1)
    saving = checkpoints(tmp_path, loop(state={"stays": Holder(7), "goes": Holder(1), "mean": mean}))
    saving.start_save(1)
    assert saving.wait_saved().problem is None
    stays, fresh = Holder(0), torch.nn.Linear(1, 1)
    weight = fresh.weight.detach().clone()
    after = loop(state={"stays": stays, "comes": Holder(1), "mean": torch.nn.Linear(1, 1), "new": fresh})
    restored = checkpoints(tmp_path, after).restore()
    assert (restored.step, stays.held) == (1, 7)
    assert torch.equal(after.modules["mean"].weight, mean.weight)
    assert torch.equal(fresh.weight, weight)
    (finding,) = restored.findings
    assert finding.evidence == (
        "state['comes']: not saved -> given",
        "state['goes']: saved -> not given",
        "state['new']: not saved -> given",
    )


def test_index_that_would_run_code_is_not_run(tmp_path: Path) -> None:
    state = loop()
    saving = checkpoints(tmp_path, state)
    saving.start_save(1)
    folder = Path(saving.wait_saved().path)
    from holdfast.train.checkpoint import manifest_file  # only this test forges one

    (folder / ".metadata").write_bytes(pickle.dumps(Evil(tmp_path / "ran")))
    manifest = manifest_file.read(folder, 1)
    files = manifest_file.checksums(folder / name for name in manifest.files)
    manifest_file.write(folder, Manifest(step=1, world_size=1, hyperparams=manifest.hyperparams, files=files))
    with pytest.raises(HoldfastError) as refused:
        checkpoints(tmp_path, loop()).restore()
    assert refused.value.findings[0].code == "checkpoint-incompatible"
    assert not (tmp_path / "ran").exists()


def test_snapshot_that_would_run_code_is_none(tmp_path: Path) -> None:
    memory = tmp_path / "memory"
    memory.touch()
    manifest = Manifest(step=1, world_size=1, files={})
    memory_snapshot.write(memory, WriterId(), 0, manifest, {"model": {"a": torch.ones(1)}}, b"")
    assert MemorySnapshot.load(memory) is not None
    index = pickle.dumps(Evil(tmp_path / "ran"))
    memory_snapshot.commit(memory, SnapshotHeader(64, len(index), zlib.crc32(index)), index)
    assert MemorySnapshot.load(memory) is None
    assert not (tmp_path / "ran").exists()
