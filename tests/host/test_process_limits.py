"""Limits of holdfast itself differ from those of ranks; a failed start is distinguished from a failed program."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

from tests.agent.test_worker_group import WorkerGroupBench, play, shell, sockets  # noqa: F401 - a fixture

from holdfast.events import ExitReason, RankExited
from holdfast.host.process_limits import OPEN_FILES, RANK_OOM_SCORE

RESERVED = 1 << (32 - 1) | 1 << (33 - 1)
"""Masks of the two signals that libc keeps for its threads: it changes neither for its callers."""


def test_rank_has_the_limits_that_were_found_and_goes_first_when_memory_runs_out(
    tmp_path: Path,
    sockets: Path,  # noqa: F811
) -> None:
    own = int(Path("/proc/self/oom_score_adj").read_text())

    async def scene(bench: WorkerGroupBench) -> None:
        await bench.group(shell("ulimit -Sn; cat /proc/self/oom_score_adj")).start()
        await bench.until(RankExited)
        assert bench.log(0).read_text().split() == [str(OPEN_FILES[0]), str(min(1000, own + RANK_OOM_SCORE))]

    play(tmp_path, sockets, scene)


def test_rank_takes_every_signal_whatever_the_caller_ignores_or_blocks(
    tmp_path: Path,
    sockets: Path,  # noqa: F811
) -> None:
    async def scene(bench: WorkerGroupBench) -> None:
        await bench.group(["grep", "-E", "^Sig(Ign|Blk)", "/proc/self/status"]).start()
        await bench.until(RankExited)
        masks = [int(line.split()[1], 16) for line in bench.log(0).read_text().splitlines()]
        assert [mask & ~RESERVED for mask in masks] == [0, 0]

    ignored = (signal.SIGHUP, signal.SIGINT, signal.SIGUSR1)  # by nohup, by `cmd &` in a script, by anybody
    before = {number: signal.signal(number, signal.SIG_IGN) for number in ignored}
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
    try:
        play(tmp_path, sockets, scene)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        for number, handler in before.items():
            signal.signal(number, handler)


def test_process_learns_how_its_children_end_though_its_caller_ignores_that() -> None:
    program = """
import signal, subprocess, sys
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
child = "from holdfast.host.process_limits import receive_signals; receive_signals(); import signal, subprocess; "
child += "print(subprocess.call(['sh', '-c', 'exit 7']), len(signal.pthread_sigmask(signal.SIG_BLOCK, ())))"
subprocess.Popen([sys.executable, "-c", child]).communicate()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=200, check=True)
    assert done.stdout.split() == ["7", "0"]


def test_process_allows_itself_all_it_may_and_gives_a_child_back_what_it_had() -> None:
    program = """
import resource, subprocess
resource.setrlimit(resource.RLIMIT_NOFILE, (100, 200))
from holdfast.host import process_limits
process_limits.open_more_files()
print(resource.getrlimit(resource.RLIMIT_NOFILE))
child = subprocess.Popen(["sh", "-c", "read line; ulimit -Sn"], stdin=subprocess.PIPE)
process_limits.restore_limits(child.pid)
child.communicate(b"go")
"""
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert sorted(answer.stdout.splitlines()) == ["(200, 200)", "100"]


def test_process_that_waits_for_a_cpu_starts_ranks_that_do_not() -> None:
    program = """
import os, subprocess, sys
from holdfast.host import process_limits
process_limits.schedule_as_batch()
asked = [sys.executable, "-c", "import os; print(os.sched_getscheduler(0))"]
print(os.sched_getscheduler(0), flush=True)
for become in process_limits.become_rank, process_limits.become_zygote:
    subprocess.run(asked, preexec_fn=become)
"""
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    found = os.sched_getscheduler(0)
    waits = os.SCHED_BATCH if found == os.SCHED_OTHER else found
    assert answer.stdout.split() == [str(each) for each in (waits, found, found)]


def test_rank_for_which_no_file_is_left_is_told_to_be_not_started(
    tmp_path: Path,
    sockets: Path,  # noqa: F811
) -> None:
    async def scene(bench: WorkerGroupBench) -> None:
        team = bench.group(shell("echo started"))
        (tmp_path / "logs/attempt-0").mkdir(parents=True)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        try:
            await team.start()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        exited = await bench.until(RankExited)
        assert exited.reason is ExitReason.NOT_STARTED
        assert "Too many open files" in exited.error

    play(tmp_path, sockets, scene)


def test_environment_that_is_too_large_is_told_with_its_largest_variables(
    tmp_path: Path,
    sockets: Path,  # noqa: F811
) -> None:
    async def scene(bench: WorkerGroupBench) -> None:
        await bench.group(["true"], env={"LARGE": "x" * (64 * resource.getpagesize()), "SMALL": "x"}).start()
        exited = await bench.until(RankExited)
        assert (exited.reason, exited.code) == (ExitReason.NOT_STARTED, 126)
        assert "Argument list too long" in exited.error
        assert f"variable LARGE: {64 * resource.getpagesize() + 7:,} bytes" in exited.evidence

    play(tmp_path, sockets, scene)
