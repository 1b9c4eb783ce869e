"""When a silent rank counts as hung: by its own steps, and not by what is none."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import subprocess
import time
from collections.abc import ItemsView
from pathlib import Path

import msgspec
import pytest
from tests.agent.test_node_probe import order

from holdfast.agent.flight_dump import FlightRecorders
from holdfast.agent.hang_detector import (
    CPU_WAIT_POLL_S,
    MAX_RECHECK_S,
    MIN_REPORT_INTERVAL_S,
    POLL_S,
    HangDetector,
    RankProgress,
)
from holdfast.agent.process_use import Silence
from holdfast.job.step_timeouts import AUTO_MAX_S, EARLY_MARGIN_S, EARLY_STEPS, NON_STEP_FACTOR, StepTimeouts
from holdfast.protocol.rank_messages import Activity

AUTO = StepTimeouts(step_timeout_s="auto")


def progress_after(*steps_s: float) -> RankProgress:
    """A rank that has passed its first step and as many more, each of which took so long."""
    progress = RankProgress(os.getpid())
    progress.on_step(1)
    for number, took_s in enumerate(steps_s, 2):
        progress.last_message_at = time.monotonic() - took_s
        progress.on_step(number)
    return progress


def allowed_s(progress: RankProgress) -> float:
    return progress.deadline(AUTO) - progress.last_message_at


def test_auto_is_three_times_the_slowest_of_few_steps_and_three_quarters_of_a_second() -> None:
    assert allowed_s(progress_after(2.0, 5.0, *[1.0] * EARLY_STEPS)) == pytest.approx(15.75, abs=0.5)


def test_auto_takes_no_notice_of_the_slowest_in_a_hundred() -> None:
    assert allowed_s(progress_after(60.0, *[2.0] * 199)) == pytest.approx(6.75, abs=0.5)


def test_first_step_has_its_own_time_and_an_early_one_that_of_a_first_that_compiles_again() -> None:
    fresh = RankProgress(os.getpid(), last_message_at=time.monotonic() - 20.0)
    assert allowed_s(fresh) == pytest.approx(AUTO_MAX_S)
    fresh.on_step(1)
    for number in range(2, 2 + EARLY_STEPS):
        assert allowed_s(fresh) == pytest.approx(60.0 + EARLY_MARGIN_S, abs=0.5)
        fresh.last_message_at = time.monotonic() - 2.0
        fresh.on_step(number)
    assert allowed_s(fresh) == pytest.approx(6.75, abs=0.5)


def test_early_step_that_compiled_longer_than_the_first_gives_the_next_as_long() -> None:
    assert allowed_s(progress_after(40.0)) == pytest.approx(120.0 + EARLY_MARGIN_S, abs=0.5)
    assert allowed_s(progress_after(300.0)) == pytest.approx(AUTO_MAX_S)


def test_process_that_is_stopped_between_two_steps_gets_no_longer_than_a_step() -> None:
    timeouts = StepTimeouts(step_timeout_s=3.0)
    with subprocess.Popen(["sleep", "60"]) as process:
        try:
            progress = RankProgress(process.pid)
            progress.on_step(1)
            progress.set_activity(Activity.BETWEEN_STEPS)
            process.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, process.pid, os.WSTOPPED)
            stopped = time.monotonic() + 10.0
            progress.look(stopped)
            progress.look(stopped + 1.0)
            assert progress.deadline(timeouts) == stopped + 3.0
            process.send_signal(signal.SIGCONT)
            os.waitid(os.P_PID, process.pid, os.WCONTINUED)
            progress.look(stopped + 2.0)
            assert progress.deadline(timeouts) == progress.last_message_at + 3.0 * NON_STEP_FACTOR
        finally:
            process.kill()


def test_what_comes_between_two_steps_has_its_own_time_and_counts_for_neither() -> None:
    progress = progress_after(*[2.0] * EARLY_STEPS)
    progress.last_message_at = time.monotonic() - 100.0
    progress.set_activity(Activity.BETWEEN_STEPS)
    assert allowed_s(progress) == pytest.approx(AUTO_MAX_S)
    assert progress.deadline(StepTimeouts(step_timeout_s=3.0)) - progress.last_message_at == pytest.approx(
        3.0 * NON_STEP_FACTOR
    )
    progress.last_message_at = time.monotonic() - 100.0
    progress.set_activity(Activity.STEPPING)
    assert allowed_s(progress) == pytest.approx(6.75, abs=0.5)
    progress.last_message_at = time.monotonic() - 50.0
    progress.on_step(2 + EARLY_STEPS)
    assert allowed_s(progress) == pytest.approx(6.75, abs=0.5)


def test_rank_that_hangs_is_reported_again_soon_and_later_as_rarely_as_it_may_be_silent() -> None:
    slow = StepTimeouts(step_timeout_s=60.0)
    progress = progress_after()
    progress.hung = True
    progress.reported_at = progress.last_message_at + 61.0
    assert progress.deadline(slow) - progress.reported_at == pytest.approx(MIN_REPORT_INTERVAL_S)
    progress.reported_at = progress.last_message_at + 121.0
    assert progress.deadline(slow) - progress.reported_at == pytest.approx(60.0)


class Looks(dict[int, RankProgress]):
    """Counts how often all ranks are looked at."""

    count = 0

    def items(self) -> ItemsView[int, RankProgress]:
        self.count += 1
        return super().items()


@pytest.mark.parametrize("step_timeout_s", ["auto", 60.0])
def test_ranks_that_step_are_looked_at_a_few_times_a_second(tmp_path: Path, step_timeout_s: float | str) -> None:
    async def watch() -> int:
        start = msgspec.structs.replace(order("python").start, step_timeout_s=step_timeout_s)
        detector = HangDetector(
            start, node=0, folder=tmp_path, recorders=FlightRecorders(tmp_path, 0), clock=time.time, send=lambda _: 0
        )
        detector.progress = looks = Looks({0: progress_after(*[2.0] * EARLY_STEPS)})
        detector.start()
        await asyncio.sleep(3 * POLL_S)
        detector.stop()
        return looks.count

    assert 1 <= asyncio.run(watch()) <= 4


def test_rest_is_never_due_until_there_is_a_step_again() -> None:
    progress = progress_after(2.0)
    progress.set_activity(Activity.FINISHED)
    assert progress.deadline(AUTO) == progress.deadline(StepTimeouts(step_timeout_s=1.0)) == math.inf
    progress.on_step(3)
    assert progress.deadline(StepTimeouts(step_timeout_s=1.0)) - progress.last_message_at == pytest.approx(1.0)


def test_time_without_a_cpu_is_what_the_kernel_counts_since_the_last_word(monkeypatch: pytest.MonkeyPatch) -> None:
    queued = {os.getpid(): 10.0}
    monkeypatch.setattr("holdfast.agent.hang_detector.cpu_wait_s", queued.__getitem__)
    progress = progress_after()
    queued[os.getpid()] = 14.5
    assert progress.cpu_starved_s() == pytest.approx(4.5)
    progress.cpu_wait_polled_at -= CPU_WAIT_POLL_S
    progress.on_step(2)
    assert progress.cpu_starved_s() == 0.0


def test_rank_that_may_work_is_checked_again_later_and_later_until_its_next_step() -> None:
    progress = progress_after(*[2.0] * EARLY_STEPS)
    silent_since = progress.last_message_at
    for silent_s, again_s in ((7.0, 3.5), (60.0, 30.0), (600.0, MAX_RECHECK_S)):
        progress.hung = True
        progress.postpone(silent_since + silent_s, Silence.BUSY)
        assert not progress.hung
        assert progress.deadline(AUTO) == pytest.approx(silent_since + silent_s + again_s)
    progress.on_step(99)
    assert allowed_s(progress) > 6.0
    assert progress.deadline(AUTO) < silent_since + 600.0


def test_idle_rank_without_a_session_has_ten_of_its_longest_steps_and_a_minute() -> None:
    progress = progress_after(*[0.1] * 20, 12.0, 0.1)
    assert progress.idle_limit_s == 0.0
    progress.has_session = False
    assert progress.idle_limit_s == pytest.approx(120.0, abs=1.0)
    assert progress_after(*[0.1] * 20).longest_step_s < 1.0
    progress.postpone(progress.last_message_at + 3.0, Silence.IDLE)
    assert progress.recheck_at == pytest.approx(progress.last_message_at + progress.idle_limit_s)
