"""When a soak has seen enough of its last fault."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from bench.soak import faults, local

from holdfast.events import AnyEvent, FaultAction, FaultInjected, FaultRequested, FaultTarget, StepCommitted
from holdfast.events.log_writer import EventWriter
from holdfast.run_dir import RunDir


def step(number: int, at: float) -> StepCommitted:
    return StepCommitted(at=at, replica=0, attempt=0, step=number, started=at, ended=at)


def test_step_that_was_told_of_with_the_fault_before_it_has_not_outlived_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the controller was stopped: agents go on, and it hears of the fault and of all those steps at once."""
    monkeypatch.setattr(local.LocalWatch, "well", property(lambda watch: not watch.undone))
    asked = FaultRequested(at=1.0, target=FaultTarget.AGENT, index=0, action=FaultAction.KILL)
    done = FaultInjected(at=1.0, node=0, requested_at=1.0, target="agent", action="kill")
    folder = RunDir(tmp_path)
    writer = EventWriter(folder.events)
    late: list[list[AnyEvent]] = [[asked, done, step(1, 9.0)], *([] for _ in range(200)), [step(2, 30.0)]]
    now = 0.0

    def sleep(for_s: float) -> None:
        nonlocal now
        now += for_s
        if late:
            writer.append(late.pop(0))

    for module in (faults, local):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now, sleep=sleep))
    watch = local.LocalWatch(folder)
    watch.wait(lambda: watch.outlived)
    assert (late, watch.step_at) == ([], 30.0)
