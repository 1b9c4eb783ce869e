"""A run's clock is independent of changes to the wall clock, and a successor continues it."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass

import pytest

from holdfast.clock import JUMP_S, Clock, clock_jumped

HOUR_S = 3600.0


@dataclass
class Machine:
    """A machine's two clocks."""

    wall: float = 1_000_000.0
    monotonic: float = 50.0

    def clock(self, **given: object) -> Clock:
        return Clock(**given, wall=lambda: self.wall, monotonic=lambda: self.monotonic)  # type: ignore[arg-type]

    def passes(self, seconds: float) -> None:
        self.wall += seconds
        self.monotonic += seconds


@pytest.mark.parametrize("jump_s", [5 * HOUR_S, -5 * HOUR_S])
def test_wall_clock_that_is_set_moves_no_time_and_is_told_once(jump_s: float) -> None:
    machine = Machine()
    clock = machine.clock()
    machine.passes(10.0)
    machine.wall += jump_s
    assert clock() == pytest.approx(1_000_010.0)
    assert clock.jumped_s() == pytest.approx(jump_s)
    machine.passes(10.0)
    assert clock.jumped_s() == 0.0


def test_slow_correction_is_no_jump() -> None:
    machine = Machine()
    clock = machine.clock()
    for _ in range(100):
        machine.passes(1.0)
        machine.wall += 0.0005
        assert clock.jumped_s() == 0.0


@pytest.mark.parametrize("jump_s", [5 * HOUR_S, -5 * HOUR_S])
def test_successor_continues_with_the_run_and_tells_what_was_set_meanwhile(jump_s: float) -> None:
    machine = Machine()
    former = machine.clock().sample
    machine.passes(10.0)
    machine.wall += jump_s
    clock = machine.clock(former=former)
    assert clock() == pytest.approx(1_000_010.0)
    assert clock.jumped_s() == pytest.approx(jump_s)
    assert machine.clock(former=clock.sample).jumped_s() == 0.0


def test_successor_after_a_boot_starts_at_the_wall_clock_but_never_before_the_log() -> None:
    former = Machine().clock().sample
    elsewhere = type(former)(at=former.at, monotonic_s=former.monotonic_s, boot="another")
    assert Machine(wall=2_000_000.0).clock(former=elsewhere)() == pytest.approx(2_000_000.0)
    assert Machine(wall=5.0).clock(former=elsewhere, not_before=1_000_300.0)() == pytest.approx(1_000_300.0)


def test_lead_over_another_process_is_exact_although_the_wall_clock_was_set_between_them() -> None:
    machine = Machine()
    first = machine.clock()
    machine.passes(3.0)
    machine.wall += HOUR_S
    second = machine.clock()
    machine.passes(20.0)
    assert first.offset_s(second.sample) == pytest.approx(HOUR_S)
    assert second.offset_s(first.sample) == pytest.approx(-HOUR_S)
    assert first.offset_s(None) is None


def test_finding_names_amount_direction_and_place() -> None:
    ahead, back = clock_jumped("node1", 7200.04), clock_jumped("the controller", -1.5)
    assert (ahead.code, ahead.where) == ("clock-jumped", "node1")
    assert ahead.what == "the wall clock of node1 jumped 7,200.0 s ahead"
    assert back.what == "the wall clock of the controller jumped 1.5 s back"


def test_skew_moves_what_a_process_takes_for_the_wall_clock_and_not_its_runs() -> None:
    program = (
        "import time; from holdfast.clock import Clock, shift_wall_clock; clock = Clock(); true = time.time\n"
        "shift_wall_clock(-7200); assert -7201 < time.time() - true() < -7199; assert abs(clock() - true()) < 60\n"
        f"assert -7200 - {JUMP_S} < clock.jumped_s() < -7200 + {JUMP_S}"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
