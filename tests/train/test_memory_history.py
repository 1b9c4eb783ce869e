"""A snapshot of GPU memory is recorded during a profile only, and kept with the trace."""

from __future__ import annotations

import gzip
import pickle
from pathlib import Path

import pytest
import torch

from holdfast.protocol.rank_messages import ProfileStepsNow, memory_path, trace_path
from holdfast.train import torch_private
from holdfast.train.metrics.kept_traces import write_files
from holdfast.train.metrics.memory_history import NO_GPU, NOT_RECORDED, MemoryHistory


class Recorder:
    """Stands for the recorder of a GPU, which torch has only with one."""

    def __init__(self) -> None:
        self.is_on = False
        self.entries: list[str] = []

    def record(self, *, max_entries: int) -> None:
        assert max_entries > 0
        self.is_on = True

    def stop(self) -> None:
        self.is_on = False

    def snapshot(self) -> dict[str, list[str]]:
        return {"segments": [], "device_traces": self.entries}


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    made = Recorder()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch_private, "memory_is_recorded", lambda: made.is_on)
    monkeypatch.setattr(torch_private, "record_memory", made.record)
    monkeypatch.setattr(torch_private, "stop_recording_memory", made.stop)
    monkeypatch.setattr(torch_private, "memory_snapshot", made.snapshot)
    return made


def save_text(path: str) -> None:
    Path(path).write_text("{}")


def test_snapshot_is_kept_next_to_the_trace_and_recording_ends(recorder: Recorder, tmp_path: Path) -> None:
    history = MemoryHistory()
    history.start()
    assert recorder.is_on
    recorder.entries.append("alloc")
    request = ProfileStepsNow(traces=f"{tmp_path}/t-", memory=True)
    written = write_files(request, save_text, history.stop(), step=7, rank=3, kept=1)
    assert not recorder.is_on
    assert (written.memory, written.memory_failure, written.failure) == (True, "", "")
    assert Path(trace_path(request.traces, 7, 3)).exists()
    with gzip.open(memory_path(request.traces, 7, 3)) as file:
        assert pickle.load(file) == {"segments": [], "device_traces": ["alloc"]}


def test_recording_of_the_program_itself_stays_on(recorder: Recorder) -> None:
    recorder.is_on = True
    history = MemoryHistory()
    history.start()
    assert callable(history.stop())
    assert recorder.is_on


def test_profile_that_recorded_no_memory_has_none(recorder: Recorder) -> None:
    assert MemoryHistory().stop() == NOT_RECORDED
    assert not recorder.is_on


def test_snapshot_that_fails_ends_the_recording(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("CUDA error")

    monkeypatch.setattr(torch_private, "memory_snapshot", fail)
    history = MemoryHistory()
    history.start()
    assert history.stop() == "RuntimeError: CUDA error"
    assert not recorder.is_on


def test_rank_without_a_gpu_says_so_and_keeps_its_trace(tmp_path: Path) -> None:
    history = MemoryHistory()
    history.start()
    request = ProfileStepsNow(traces=f"{tmp_path}/t-", memory=True)
    written = write_files(request, save_text, history.stop(), step=7, rank=3, kept=1)
    assert (written.memory, written.memory_failure, written.failure) == (False, NO_GPU, "")
    assert [path.name for path in tmp_path.iterdir()] == ["t-step-7-rank-3.json.gz"]
