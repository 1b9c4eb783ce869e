"""The step clock enters a Python program without a trace, and the agent reads what it counts."""

from __future__ import annotations

import asyncio
import os
import runpy
import struct
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from tests.agent.test_rank_ipc import RecordingHandler

from holdfast.agent.rank_ipc import RankServer
from holdfast.agent.step_clock import (
    ENTRIES,
    FILE_BYTES,
    LEAD_S,
    MAX_STEPS_PER_POLL,
    REQUEST,
    STEP_CLOCK_DIR,
    StepClockReader,
    first_profiled_step,
    step_clock_file,
    with_step_clock,
)
from holdfast.metrics.profiler_events import BACKWARD, STEP
from holdfast.protocol.rank_messages import Hello, ProfileStepsNow, RankStep, StepClockFailed, TraceWritten, encode
from holdfast.run_dir import MAX_TRACE_BYTES

TORCH = """
import torch.compiler
import torch.optim
"""
OPTIMIZER = """
hooks = []
register_optimizer_step_post_hook = hooks.append
class SGD:
    def step(self):
        for hook in hooks:
            hook(self, (), {})
"""
"""As much of torch as the clock touches: the real one takes seconds to import, and runs in tests/runs."""


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """A folder of a small torch, for PYTHONPATH."""
    (tmp_path / "torch" / "optim").mkdir(parents=True)
    (tmp_path / "torch" / "__init__.py").write_text(TORCH)
    (tmp_path / "torch" / "compiler.py").write_text("def is_compiling(): return False\n")
    (tmp_path / "torch" / "optim" / "__init__.py").write_text("from torch.optim.optimizer import *\n")
    (tmp_path / "torch" / "optim" / "optimizer.py").write_text(OPTIMIZER)
    return tmp_path


def run(programs: Path, text: str, *options: str, **environ: str) -> str:
    """What a program prints with the clock on its path."""
    variables = with_step_clock({"PYTHONPATH": str(programs), "RANK": "3", **environ})
    done = subprocess.run(
        [sys.executable, *options, "-c", text], env=variables, cwd=programs, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.strip()


def test_program_sees_nothing_of_the_clock_but_one_finder(programs: Path) -> None:
    found = run(programs, "import sys; print(*sys.path, *sys.modules, 'sitecustomize' in sys.modules)")
    assert str(STEP_CLOCK_DIR) not in found
    assert "holdfast" not in found
    loader = run(programs, "import torch.optim; print(vars(torch.optim.__loader__).keys(), torch.optim.__file__)")
    assert "exec_module" not in loader
    assert str(programs) in loader


@pytest.mark.parametrize(
    ("line", "during", "after"),
    [
        ("pass", "(1000000, 10, 10)", "(700, 10, 10)"),
        ("gc.set_threshold(9)", "(9, 10, 10)", "(9, 10, 10)"),
        ("raise ImportError", "(1000000, 10, 10)", "(700, 10, 10)"),
    ],
)
def test_garbage_is_collected_rarely_while_torch_is_imported(
    programs: Path, line: str, during: str, after: str
) -> None:
    (programs / "torch" / "__init__.py").write_text(
        f"import gc\ntry:\n    {line}\nfinally:\n    print(gc.get_threshold())\n"
    )
    program = (
        "import contextlib, gc\nwith contextlib.suppress(ImportError):\n    import torch\nprint(gc.get_threshold())"
    )
    assert run(programs, program) == f"{during}\n{after}"


def test_torch_with_a_rendezvous_has_its_ranks_wait_for_the_store(programs: Path) -> None:
    distributed = programs / "torch" / "distributed"
    distributed.mkdir()
    (distributed / "__init__.py").touch()
    (distributed / "rendezvous.py").write_text("_rendezvous_handlers = {'env': print}\n")
    (programs / "torch" / "__init__.py").write_text(f"import torch.distributed.rendezvous{TORCH}")
    program = "import torch; env = torch.distributed.rendezvous._rendezvous_handlers['env']; print(env.__module__); "
    assert run(programs, program + "env('env://?rank=0')") == "holdfast_rendezvous\nenv://?rank=0"


def test_sitecustomize_of_the_environment_runs_as_if_it_were_the_only_one(programs: Path) -> None:
    (programs / "sitecustomize.py").write_text("import os\nSEEN = os.environ['RANK']\n")
    assert run(programs, "import sitecustomize; print(sitecustomize.SEEN, sitecustomize.__file__)") == (
        f"3 {programs / 'sitecustomize.py'}"
    )


def test_python_that_ignores_its_environment_runs_without_the_clock(programs: Path) -> None:
    shown = "import sys; print(type(sys.meta_path[0]).__name__)"
    assert run(programs, shown) == "TorchFinder"
    for option in ("-E", "-I", "-S"):
        assert run(programs, shown, option) != "TorchFinder"


def test_job_can_switch_the_clock_off() -> None:
    assert with_step_clock({"HOLDFAST_STEP_CLOCK": "0", "A": "b"}) == {"HOLDFAST_STEP_CLOCK": "0", "A": "b"}
    assert with_step_clock({})["PYTHONPATH"] == str(STEP_CLOCK_DIR)


def scene(programs: Path, text: str, *, within_s: float = 60.0) -> tuple[RecordingHandler, list[tuple[int, int]]]:
    """What the agent hears of a program with two ranks' processes at most, and the steps that it reads."""
    steps: list[tuple[int, int]] = []
    handler = RecordingHandler()

    async def play() -> None:
        path = programs / "s"
        server = RankServer(handler, rank=3, world_size=8)
        await server.open(path)
        reader = StepClockReader(lambda rank, step, _: steps.append((rank, step.step)))
        async with asyncio.timeout(within_s):
            await asyncio.to_thread(run, programs, text, HOLDFAST_RANK_SOCKET=str(path))
            await server.drain(within_s)
        for message in handler.received:
            if isinstance(message, Hello) and reader.add_rank(message.rank, path):
                reader.remove_rank(message.rank)
        reader.stop()
        server.close()

    asyncio.run(play())
    return handler, steps


def test_steps_of_the_first_optimizer_count_until_another_steps_alone(programs: Path) -> None:
    text = "import torch; a, b = torch.optim.SGD(), torch.optim.SGD()\n"
    _, gan = scene(programs, text + "for _ in range(5): a.step(); b.step(); b.step()")
    assert gan == [(3, step) for step in range(1, 6)]
    assert list(programs.glob("s-steps-*")) == []
    _, replaced = scene(programs, text + "a.step()\nfor _ in range(12): b.step()")
    assert replaced == [(3, step) for step in range(1, 5)]


def test_children_of_a_rank_that_steps_have_no_clock(programs: Path) -> None:
    text = (
        "import os, subprocess, sys, torch\n"
        "a = torch.optim.SGD(); a.step()\n"
        "if os.fork() == 0: a.step(); os._exit(0)\n"
        "os.wait()\n"
        "subprocess.run([sys.executable, '-c', 'import torch; torch.optim.SGD().step()'], check=True)\n"
        "a.step()"
    )
    handler, steps = scene(programs, text)
    assert [type(message) for message in handler.received] == [Hello]
    assert steps == [(3, 1), (3, 2)]


def test_second_process_of_a_rank_is_not_heard(programs: Path) -> None:
    text = (
        "import subprocess, sys, torch\n"
        "step = 'import torch; torch.optim.SGD().step(); print(flush=True); input()'\n"
        "both = [subprocess.Popen([sys.executable, '-c', step], stdin=-1, stdout=-1) for _ in range(2)]\n"
        "for each in both: each.stdout.readline()\n"
        "for each in both: each.communicate(b'\\n')\n"
    )
    handler, steps = scene(programs, text)
    assert len([message for message in handler.received if isinstance(message, Hello)]) == 1
    assert steps == [(3, 1)]


def test_session_ends_the_clock_and_is_heard_alone(programs: Path) -> None:
    text = (
        "import sys, torch; a = torch.optim.SGD(); a.step()\nsys.modules['holdfast_step_clock'].clock.stop(); a.step()"
    )
    _, steps = scene(programs, text)
    assert steps == [(3, 1)]


def test_error_of_the_clock_is_the_agents_to_log_and_not_the_programs(programs: Path) -> None:
    (programs / "torch" / "optim" / "optimizer.py").write_text(
        OPTIMIZER.replace("register_optimizer_step_post_hook", "unknown")
    )
    handler, steps = scene(programs, "import torch; torch.optim.SGD().step()")
    (message,) = handler.received
    assert isinstance(message, StepClockFailed)
    assert "register_optimizer_step_post_hook" in message.error
    assert steps == []


def times(socket: Path, steps: int, step_s: float = 1.0) -> None:
    """A rank's file after so many steps."""
    ring = [0.0] * ENTRIES
    for step in range(1, steps + 1):
        ring[step % ENTRIES] = 100.0 + step * step_s
    Path(step_clock_file(socket, 0)).write_bytes(
        struct.pack(f"{1 + ENTRIES}d", float(steps), *ring).ljust(FILE_BYTES, b"\0")
    )


async def steps_read(socket: Path) -> list[RankStep]:
    found: list[RankStep] = []
    reader = StepClockReader(lambda _rank, step, _ended: found.append(step))
    assert reader.add_rank(0, socket)
    reader.remove_rank(0)
    reader.stop()
    return found


def test_each_step_begins_where_the_last_one_ended(tmp_path: Path) -> None:
    times(tmp_path / "s", 3)
    read = asyncio.run(steps_read(tmp_path / "s"))
    assert [(each.step, each.started, each.ended) for each in read] == [(1, 101, 101), (2, 101, 102), (3, 102, 103)]


def test_very_short_steps_are_reported_in_groups_that_all_ranks_share(tmp_path: Path) -> None:
    times(tmp_path / "s", 10_000, 1e-4)
    read = asyncio.run(steps_read(tmp_path / "s"))
    numbers = [each.step for each in read]
    assert 0 < len(numbers) <= MAX_STEPS_PER_POLL
    assert all(number % 64 == 0 for number in numbers)
    assert all(after.started == before.ended for before, after in pairwise(read))


def test_file_that_is_missing_leaves_the_rank_without_a_clock(tmp_path: Path) -> None:
    async def play() -> bool:
        return StepClockReader(lambda _rank, _step, _ended: None).add_rank(0, tmp_path / "s")

    assert not asyncio.run(play())


def test_hello_of_a_clock_is_ignored_where_a_session_is(tmp_path: Path) -> None:
    async def play() -> list[object]:
        handler = RecordingHandler()
        server = RankServer(handler, world_size=2)
        await server.open(tmp_path / "s")
        for hello in (Hello(rank=1, pid=os.getpid()), Hello(rank=1, pid=os.getpid(), step_clock=True)):
            _, writer = await asyncio.open_unix_connection(tmp_path / "s")
            writer.write(encode(hello) + b"\n")
            await writer.drain()
            if not hello.step_clock:
                while not handler.received:
                    handler.changed.clear()
                    await handler.changed.wait()
            else:
                writer.close()
        await server.drain(1.0)
        server.close()
        return [*handler.received]

    (only,) = asyncio.run(play())
    assert isinstance(only, Hello)
    assert not only.step_clock


@pytest.mark.slow
def test_failed_profile_is_reported_and_steps_are_counted_on(programs: Path) -> None:
    """The small torch has no profiler; a real one profiles in tests/runs/test_step_clock.py."""
    text = (
        "import os, sys, torch\n"
        "a = torch.optim.SGD()\n"
        "while not os.path.exists('reported'): a.step()\n"
        "a.step()\n"
        "print('off:', sys.modules['holdfast_step_clock'].clock.off)"
    )
    handler = RecordingHandler()

    async def play() -> str:
        path = programs / "s"
        server = RankServer(handler, rank=3, world_size=4)
        await server.open(path)
        reader = StepClockReader(lambda _rank, _step, _ended: None)
        program = asyncio.ensure_future(asyncio.to_thread(run, programs, text, HOLDFAST_RANK_SOCKET=str(path)))
        async with asyncio.timeout(60.0):
            await messages(handler, 1)
            assert reader.add_rank(3, path)
            reader.profile(ProfileStepsNow(traces=f"{programs}/trace-"), world_size=4)
            await messages(handler, 2)
            (programs / "reported").touch()
            printed = await program
        reader.stop()
        server.close()
        return printed

    assert asyncio.run(play()) == "off: False"
    written = handler.received[1]
    assert isinstance(written, TraceWritten)
    assert (written.kept, written.step_clock) == (2, True)
    assert written.failure.startswith("AttributeError: ")


async def messages(handler: RecordingHandler, count: int) -> None:
    while len(handler.received) < count:
        handler.changed.clear()
        await handler.changed.wait()


def test_profile_begins_at_a_step_that_all_agents_choose() -> None:
    assert {first_profiled_step(last, 30.0) for last in (7, 8)} == {10, 11}
    assert {first_profiled_step(last, 0.1) for last in range(15, 31)} == {33}
    assert first_profiled_step(1022, 0.001) == 2049  # the clock reads the request only after some of these steps
    assert {first_profiled_step(last, 0.0) for last in (0, 1)} == {3, 4}


def test_profiler_of_the_clock_has_the_limits_of_the_others() -> None:
    clock, profiler = (
        runpy.run_path(str(STEP_CLOCK_DIR / f"holdfast_step_{name}.py")) for name in ("clock", "profiler")
    )
    assert (clock["REQUEST"], clock["FILE_BYTES"]) == (REQUEST, FILE_BYTES)
    assert clock["POLL_REQUEST_S"] < LEAD_S
    assert (profiler["STEP"], profiler["BACKWARD"]) == (STEP, BACKWARD)
    assert profiler["MAX_TRACE_BYTES"] == MAX_TRACE_BYTES
