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
from lab.programs import Place, Program
from lab.state import SUPERVISOR, State
from lab.supervision import Supervision

WITHIN_S = 20.0
LIVES = Program(name="lives", argv=("sleep", "1000"))
FAILS = Program(name="fails", argv=("sh", "-c", "echo no room; exit 3"), ready="http://127.0.0.1:1/")


@pytest.fixture
def place(tmp_path: Path) -> Place:
    here = Path(sys.prefix)
    folder = tmp_path / "lab"
    for name in ("log", "configuration"):
        (folder / name).mkdir(parents=True)
    made = Place(folder=folder, data=folder, controlplane=here, operators=here, published=here, ports={}, nodes=())
    own = processes.identify(os.getpid())
    assert own is not None
    state.save(folder, State(ports={}, data="", nodes=(), tied=True, processes={SUPERVISOR: own}))
    return made


def started(place: Place, program: Program) -> Supervision:
    state.change(place.folder, lambda known: known.with_process(program.name, runner.run(program, place, tied=True)))
    return Supervision(place, {program.name: program})


def known(place: Place) -> State:
    found = state.load(place.folder)
    assert found is not None
    return found


def until(supervision: Supervision, place: Place, reached: Callable[[State], bool]) -> None:
    deadline = time.monotonic() + WITHIN_S
    while not reached(known(place)):
        assert time.monotonic() < deadline
        supervision.look(known(place))


def killed(place: Place, name: str) -> int:
    pid = known(place).processes[name].pid
    os.kill(pid, signal.SIGKILL)
    processes.wait_for_end([pid], time.monotonic() + WITHIN_S)
    return pid


def test_program_that_is_killed_is_started_again(place: Place) -> None:
    supervised = started(place, LIVES)
    pid = killed(place, "lives")
    until(supervised, place, lambda now: now.lives("lives"))
    assert known(place).processes["lives"].pid != pid
    assert known(place).ended("lives").times == 1
    assert not known(place).keeps_ending("lives")
    killed(place, "lives")


def test_program_that_is_to_stay_down_stays_down_until_it_is_started(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervision, "FIRST_PAUSE_S", 0.0)
    supervised = started(place, LIVES)
    state.change(place.folder, lambda now: now.with_stopped("lives"))
    killed(place, "lives")
    supervised.look(known(place))
    supervised.look(known(place))
    assert not known(place).lives("lives")
    started(place, LIVES)
    killed(place, "lives")
    until(supervised, place, lambda now: now.lives("lives"))
    killed(place, "lives")


def test_program_that_keeps_ending_waits_longer_and_is_an_error_with_its_last_words(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervision, "FIRST_PAUSE_S", 0.001)
    pki.make(place.pki)
    supervised = started(place, FAILS)
    until(supervised, place, lambda now: now.keeps_ending("fails"))
    assert known(place).ended("fails").in_a_row == state.HOPELESS
    with pytest.raises(HoldfastError) as caught:
        runner.await_ready([FAILS], place, known(place).keeps_ending)
    (finding,) = caught.value.findings
    assert finding.code == "lab-program-died"
    assert f"{state.HOPELESS} times" in finding.what
    assert "no room" in finding.evidence


def test_program_that_has_lasted_is_not_taken_for_one_that_keeps_ending(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    started(place, LIVES)
    often = state.Endings(times=9, in_a_row=state.HOPELESS)
    state.change(place.folder, lambda now: now.with_process("lives", now.processes["lives"], often))
    assert known(place).keeps_ending("lives")
    monkeypatch.setattr(state, "LASTING_S", 0.0)
    while known(place).keeps_ending("lives"):  # until it is older than a clock tick
        pass
    assert known(place).once_more("lives").in_a_row == 1
    killed(place, "lives")
