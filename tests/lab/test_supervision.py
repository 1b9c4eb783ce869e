"""What ends of a lab is started again, later each time; what is to stay down stays down."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.errors import HoldfastError
from holdfast.host import processes
from lab import pki, runner, state, supervision
from lab.programs import LabPaths, LabProgram
from lab.state import SUPERVISOR, LabState
from lab.supervision import LabSupervisor

WITHIN_S = 20.0
LIVES = LabProgram(name="lives", argv=("sleep", "1000"))
FAILS = LabProgram(name="fails", argv=("sh", "-c", "echo no room; exit 3"), ready="http://127.0.0.1:1/")


@pytest.fixture
def paths(tmp_path: Path) -> LabPaths:
    here = Path(sys.prefix)
    folder = tmp_path / "lab"
    for name in ("log", "configuration"):
        (folder / name).mkdir(parents=True)
    made = LabPaths(
        folder=folder, data=folder, controlplane=here, operators=here, operator_manifests=here, ports={}, nodes=()
    )
    own = processes.identify(os.getpid())
    assert own is not None
    state.save(folder, LabState(ports={}, data="", nodes=(), dies_with_parent=True, processes={SUPERVISOR: own}))
    return made


def started(paths: LabPaths, program: LabProgram) -> LabSupervisor:
    state.update(
        paths.folder,
        lambda known: known.with_process(program.name, runner.start(program, paths, dies_with_parent=True)),
    )
    return LabSupervisor(paths, {program.name: program})


def known(paths: LabPaths) -> LabState:
    found = state.load(paths.folder)
    assert found is not None
    return found


def until(supervision: LabSupervisor, paths: LabPaths, reached: Callable[[LabState], bool]) -> None:
    deadline = time.monotonic() + WITHIN_S
    while not reached(known(paths)):
        assert time.monotonic() < deadline
        supervision.restart_dead(known(paths))


def killed(paths: LabPaths, name: str) -> int:
    pid = known(paths).processes[name].pid
    os.kill(pid, signal.SIGKILL)
    processes.wait_for_end([pid], time.monotonic() + WITHIN_S)
    return pid


def test_program_that_is_killed_is_started_again(paths: LabPaths) -> None:
    supervised = started(paths, LIVES)
    pid = killed(paths, "lives")
    until(supervised, paths, lambda now: now.is_alive("lives"))
    assert known(paths).processes["lives"].pid != pid
    assert known(paths).crash_counts("lives").total == 1
    assert not known(paths).is_crash_looping("lives")
    killed(paths, "lives")


def test_program_that_is_to_stay_down_stays_down_until_it_is_started(
    paths: LabPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervision, "FIRST_DELAY_S", 0.0)
    supervised = started(paths, LIVES)
    state.update(paths.folder, lambda now: now.with_stopped("lives"))
    killed(paths, "lives")
    supervised.restart_dead(known(paths))
    supervised.restart_dead(known(paths))
    assert not known(paths).is_alive("lives")
    started(paths, LIVES)
    killed(paths, "lives")
    until(supervised, paths, lambda now: now.is_alive("lives"))
    killed(paths, "lives")


def test_program_that_keeps_ending_waits_longer_and_is_an_error_with_its_last_words(
    paths: LabPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervision, "FIRST_DELAY_S", 0.001)
    pki.make_pki(paths.pki)
    supervised = started(paths, FAILS)
    until(supervised, paths, lambda now: now.is_crash_looping("fails"))
    assert known(paths).crash_counts("fails").in_a_row == state.MAX_CRASHES_IN_A_ROW
    with pytest.raises(HoldfastError) as caught:
        runner.wait_ready([FAILS], paths, known(paths).is_crash_looping)
    (finding,) = caught.value.findings
    assert finding.code == "lab-program-died"
    assert f"{state.MAX_CRASHES_IN_A_ROW} times" in finding.what
    assert "no room" in finding.evidence


def test_program_that_has_lasted_is_not_taken_for_one_that_keeps_ending(
    paths: LabPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    started(paths, LIVES)
    often = state.CrashCounts(total=9, in_a_row=state.MAX_CRASHES_IN_A_ROW)
    state.update(paths.folder, lambda now: now.with_process("lives", now.processes["lives"], often))
    assert known(paths).is_crash_looping("lives")
    monkeypatch.setattr(state, "STABLE_AFTER_S", 0.0)
    while known(paths).is_crash_looping("lives"):  # until it is older than a clock tick
        pass
    assert known(paths).count_crash("lives").in_a_row == 1
    killed(paths, "lives")
