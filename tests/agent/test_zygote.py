"""A rank forked from its zygote behaves exactly like one with a cold start."""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path

import pytest
from msgspec.structs import replace

from holdfast.agent import zygote as zygote_module
from holdfast.agent.python_command import PythonCommand, parse_python_command
from holdfast.agent.zygote import ColdStart, RankCommand, UnsafeModule, Zygote
from holdfast.host.cgroups import remove, tracking_group
from holdfast.host.process_limits import become_rank
from holdfast.host.processes import adopt_orphans, by_env
from holdfast.train.zygote.huge_pages import use_huge_pages

DEADLINE_S = 120.0

# Each is written to program.py; what it writes and how it ends must be the same both ways.
PROGRAMS = {
    "ends well": "print('done')",
    "code": "import sys; sys.exit(7)",
    "words": "import sys; sys.exit('no such batch')",
    "error": "def f(x):\n    raise ValueError(x)\n\nf(3)",
    "chained error": "try:\n    {}['a']\nexcept KeyError as error:\n    raise RuntimeError('x') from error",
    "error in a module of its own": "import beside\nbeside.fail()",
    "no module": "import nowhere_at_all",
    "syntax": "def f(:\n    pass",
    "interrupt": "raise KeyboardInterrupt",
    "interrupted": "import os, signal; os.kill(os.getpid(), signal.SIGINT)",
    "terminated": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "killed": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "aborted": "import os; os.abort()",
    "segfault": "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
    "at once": "import os; print('x', flush=True); os._exit(3)",
    "at exit": "import atexit; atexit.register(print, 'last'); print('first')",
    "own hook": "import sys\nsys.excepthook = lambda *a: print('hook', a[1])\nraise ValueError(1)",
    "daemon thread": "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()",
    "thread error": "import threading\nt = threading.Thread(target=lambda: 1 / 0, name='t')\nt.start(); t.join()",
    "main": "import __main__, sys\nprint(__name__, __file__, __spec__, __package__, sys.argv, sys.orig_argv[1:])\n"
    "print(sorted(vars(__main__)), sys.path, sys.flags, __main__ is sys.modules['__main__'])",
    "stack": "import traceback\ndef f():\n    traceback.print_stack()\nf()",
    "environment": "import os\nprint(sorted(os.environ.items()), os.getcwd(), os.getsid(0) == os.getpid())\n"
    "print(os.getpgid(0) == os.getpid(), os.getpriority(os.PRIO_PROCESS, 0), os.umask(0))",
    "kernel's view": "from pathlib import Path\nprint([Path(f'/proc/self/{n}').read_text() for n in "
    "('cmdline', 'comm')])\n"
    "print(sorted(filter(None, Path('/proc/self/environ').read_bytes().split(b'\\0'))))",
    "signals": "from pathlib import Path\nkeep = ('SigBlk', 'SigIgn', 'SigCgt', 'Threads')\n"
    "print([line for line in Path('/proc/self/status').read_text().splitlines() if line.startswith(keep)])",
    "child's environment": "import subprocess, sys\nsubprocess.run([sys.executable, '-c', "
    "'import os, sys; print(sorted(os.environ.items()), sys.path)'])",
    "descriptors": "import os\nprint(sorted(int(n) for n in os.listdir('/proc/self/fd') if os.path.exists("
    "f'/proc/self/fd/{n}')), os.readlink('/proc/self/fd/0'))",
    "spawn": "import multiprocessing as m\nfrom beside import double\n"
    "if __name__ == '__main__':\n    with m.get_context('spawn').Pool(1) as p:\n        print(p.map(double, [2]))",
    "forkserver": "import multiprocessing as m\nfrom beside import double\n"
    "if __name__ == '__main__':\n    with m.get_context('forkserver').Pool(1) as p:\n        print(p.map(double, [2]))",
    "fork": "import multiprocessing as m\nfrom beside import double\n"
    "with m.get_context('fork').Pool(1) as p:\n    print(p.map(double, [2]))",
    "input": "print(repr(input()))",
    "garbage": "import gc\nprint(gc.get_threshold(), gc.isenabled())",
    "limits": "import resource\nprint(resource.getrlimit(resource.RLIMIT_NOFILE))\n"
    "print(open('/proc/self/oom_score_adj').read())",
}

WITH_OWN_IMPORTS = ("ends well", "error in a module of its own", "no module", "syntax", "spawn", "forkserver", "fork")
"""Programs with a zygote each, because of what they import, or cannot."""

WHERE_IT_LIES = (
    "ends well",
    "error in a module of its own",
    "no module",
    "main",
    "stack",
    "environment",
    "child's environment",
    "descriptors",
    "spawn",
    "fork",
)
"""Programs that show, one way or another, in which folder they run."""

BESIDE = "def fail():\n    raise ValueError('beside')\n\ndef double(x):\n    return 2 * x\n"


class ProgramDir:
    """A folder with a program in it, and both ways to start it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "beside.py").write_text(BESIDE)

    def command(self, *words: str, **variables: str) -> RankCommand:
        environ = {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1", "MASTER_PORT": "1", **variables}
        return RankCommand(rank=0, argv=(sys.executable, *words), cwd=self.folder, environ=environ)

    async def start_zygote(self, wanted: RankCommand, least: int = 0) -> Zygote:
        found = parse_python_command(wanted.argv)
        assert isinstance(found, PythonCommand)
        return await Zygote.start(found, wanted, self.folder / "held.log", min_modules=least)

    async def run_forked(self, held: Zygote, wanted: RankCommand) -> tuple[int, str]:
        log = self.folder / "warm.log"
        with log.open("wb") as output:
            pid = await held.fork(wanted, output.fileno())
        status = await asyncio.to_thread(os.waitpid, pid, 0)
        return os.waitstatus_to_exitcode(status[1]), _text(log)

    def cold(self, wanted: RankCommand) -> tuple[int, str]:
        log = self.folder / "cold.log"
        with log.open("wb") as output:
            ended = subprocess.run(
                wanted.argv,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=wanted.environ,
                cwd=wanted.cwd,
                start_new_session=True,
                preexec_fn=become_rank,
                timeout=DEADLINE_S,
                check=False,
            )
        return ended.returncode, _text(log)


def _text(log: Path) -> str:
    """What was written; where in memory something was is another place each time."""
    return re.sub("0x[0-9a-f]+", "0x", log.read_text())


@pytest.fixture
def place(tmp_path: Path) -> ProgramDir:
    adopt_orphans()
    return ProgramDir(tmp_path)


def play(scene: Callable[[], Coroutine[None, None, None]]) -> None:
    async def whole() -> None:
        async with asyncio.timeout(DEADLINE_S):
            await scene()

    asyncio.run(whole())


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_OWN_IMPORTS)
def test_forked_rank_does_what_a_cold_one_does(place: ProgramDir, name: str) -> None:
    (place.folder / "program.py").write_text(PROGRAMS[name])
    wanted = place.command("program.py", "-v", "two words")

    async def scene() -> None:
        held = await place.start_zygote(replace(wanted, environ={**wanted.environ, "MASTER_PORT": "2"}))
        try:
            assert held.mismatch(wanted) == ""
            assert await place.run_forked(held, wanted) == place.cold(wanted)
        finally:
            held.kill()

    play(scene)


@pytest.mark.slow
def test_forks_of_one_zygote_do_what_cold_ranks_do(place: ProgramDir) -> None:
    """The program is edited between the ranks; the zygote has imported all that any of them does."""
    program = place.folder / "program.py"
    program.write_text("import atexit, gc, os, resource, signal, subprocess, sys, threading, traceback\nimport pathlib")
    wanted = place.command("program.py", "-v", "two words")

    async def scene() -> None:
        held = await place.start_zygote(replace(wanted, environ={**wanted.environ, "MASTER_PORT": "2"}))
        try:
            for name in [each for each in PROGRAMS if each not in WITH_OWN_IMPORTS]:
                program.write_text(PROGRAMS[name])
                assert held.mismatch(wanted) == "", name
                assert await place.run_forked(held, wanted) == place.cold(wanted), name
        finally:
            held.kill()

    play(scene)


def test_forked_rank_is_in_the_group_of_its_attempt(place: ProgramDir) -> None:
    group = tracking_group(f"test-{os.getpid()}")
    if group is None:
        pytest.skip("needs a cgroup v2 below which groups can be made")
    (place.folder / "program.py").write_text("print(open('/proc/self/cgroup').read())")
    wanted = place.command("program.py")

    async def scene() -> None:
        held = await place.start_zygote(wanted)
        try:
            status, text = await place.run_forked(held, replace(wanted, cgroup=group))
        finally:
            held.kill()
        assert (status, group.name in text) == (0, True)

    group.mkdir()
    try:
        play(scene)
    finally:
        remove(group)


class CodeVersions:
    """Folders of unpacked code, each with a program, that ranks of one command may run."""

    def __init__(self, place: ProgramDir) -> None:
        self._place = place

    def command(self, name: str, text: str, *words: str, **variables: str) -> RankCommand:
        """The rank that runs a program with this text, in a folder of its code."""
        code = self._place.folder / "codes" / name
        (code / "part").mkdir(parents=True, exist_ok=True)
        (code / "part" / "program.py").write_text(text)
        (code / "part" / "beside.py").write_text(f"NAME = {name!r}\n{BESIDE}")
        wanted = self._place.command(*(words or ("program.py",)), **variables)
        return replace(wanted, code_dir=code, cwd=code / "part")


@pytest.mark.slow
def test_rank_with_other_code_does_what_a_cold_one_does(place: ProgramDir) -> None:
    codes = CodeVersions(place)
    held_with = codes.command("former", "import multiprocessing", PYTHONPATH=".")
    ranks = [
        codes.command(name.replace(" ", "-"), f"import multiprocessing\n{PROGRAMS[name]}", PYTHONPATH=".")
        for name in WHERE_IT_LIES
    ]

    async def scene() -> None:
        held = await place.start_zygote(held_with)
        try:
            for wanted in (*ranks, held_with):
                await held.check_code(wanted)
                assert held.mismatch(wanted) == ""
                assert await place.run_forked(held, wanted) == place.cold(wanted), wanted.code_dir.name
        finally:
            held.kill()

    play(scene)


@pytest.mark.parametrize(
    "words", [("-m", "program"), ("./program.py",), ("../part/program.py",), ("-c", "import program")]
)
def test_other_code_is_found_however_it_is_named(place: ProgramDir, words: tuple[str, ...]) -> None:
    codes = CodeVersions(place)
    text = "import multiprocessing.process as m, sys, beside\nprint(__file__, beside.NAME, sys.path, m.ORIGINAL_DIR)"
    former, latter = (codes.command(name, text, *words) for name in ("a", "another"))

    async def scene() -> None:
        held = await place.start_zygote(former)
        try:
            for wanted in (latter, former):
                await held.check_code(wanted)
                assert held.mismatch(wanted) == ""
                assert await place.run_forked(held, wanted) == place.cold(wanted)
        finally:
            held.kill()

    play(scene)


@pytest.mark.parametrize(
    ("text", "why", "lacks"),
    [
        ("import json, numpy", "", False),
        ("import json, numpy, csv", "", True),
        ("import csv, json, beside, numpy", "", True),
        ("import numpy, json", "numpy is not imported any more where it was", False),
        ("import json", "numpy is not imported any more where it was", False),
        ("no Python", "json is not imported any more where it was", False),
    ],
)
def test_other_code_must_import_what_was_imported(place: ProgramDir, text: str, why: str, lacks: bool) -> None:
    codes = CodeVersions(place)
    former, latter = codes.command("former", "import json, numpy"), codes.command("latter", text)

    async def scene() -> None:
        held = await place.start_zygote(former)
        try:
            assert held.mismatch(latter) == "its code lies in another folder than before"
            await held.check_code(latter)
            assert (held.mismatch(latter), held.needs_more_imports(latter)) == (why, lacks)
        finally:
            held.kill()

    play(scene)


@pytest.mark.parametrize("words", [("-m", "package"), ("-m", "package.part"), ("-c", "import beside; beside.fail()")])
def test_modules_and_code_are_run_as_python_runs_them(place: ProgramDir, words: tuple[str, ...]) -> None:
    package = place.folder / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    for name in ("__main__", "part"):
        (package / f"{name}.py").write_text("import sys, __main__\nprint(sys.argv, sys.path, __spec__.name)\n1 / 0")
    wanted = place.command(*words, "x")

    async def scene() -> None:
        held = await place.start_zygote(wanted)
        try:
            assert await place.run_forked(held, wanted) == place.cold(wanted)
        finally:
            held.kill()

    play(scene)


def test_code_that_was_edited_meanwhile_is_what_runs(place: ProgramDir) -> None:
    (place.folder / "program.py").write_text("import beside; print('old', beside.double(2))")
    wanted = place.command("program.py")

    async def scene() -> None:
        held = await place.start_zygote(wanted)
        try:
            assert await place.run_forked(held, wanted) == (0, "old 4\n")
            (place.folder / "program.py").write_text("import beside; print('new', beside.triple(2))")
            (place.folder / "beside.py").write_text("def triple(x):\n    return 3 * x\n")
            assert await place.run_forked(held, wanted) == (0, "new 6\n")
        finally:
            held.kill()

    play(scene)


def test_imports_are_done_before_and_chance_is_drawn_anew(place: ProgramDir) -> None:
    (place.folder / "program.py").write_text(
        "import sys; print('numpy' in sys.modules)\nimport numpy, random, os\n"
        "print(numpy.random.rand(), random.random(), os.urandom(4))"
    )
    wanted = place.command("program.py")

    async def scene() -> None:
        held = await place.start_zygote(wanted, least=50)
        try:
            first, second = await place.run_forked(held, wanted), await place.run_forked(held, wanted)
        finally:
            held.kill()
        assert first[1].splitlines()[0] == second[1].splitlines()[0] == "True"
        assert first[1].split()[1] != second[1].split()[1]
        assert first[1].split()[2] != second[1].split()[2]

    play(scene)


def test_rank_is_marked_in_the_kernels_eyes_however_much_longer_its_environment_is(place: ProgramDir) -> None:
    (place.folder / "program.py").write_text("import signal; signal.pause()")
    wanted = place.command("program.py")
    rank = replace(wanted, environ={"HOLDFAST_ATTEMPT": "7", **wanted.environ, "HOLDFAST_MORE": "x" * 30_000})

    async def scene() -> None:
        held = await place.start_zygote(wanted)
        try:
            with (place.folder / "log").open("wb") as output:
                pid = await held.fork(rank, output.fileno())
            assert by_env([pid], HOLDFAST_ATTEMPT="7") == [pid]
            assert by_env([held.pid], HOLDFAST_ATTEMPT="7") == []
            os.kill(pid, signal.SIGKILL)
            assert (await asyncio.to_thread(os.waitpid, pid, 0))[1] == signal.SIGKILL
        finally:
            held.kill()

    play(scene)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("import json", "it imports nothing large from installed packages"),
        ("import os\nos.environ['A'] = '1'\nimport numpy", "program.py:2 changes the environment or sys.path before"),
        (
            "import sys\nsys.path.insert(0, 'x')\nimport numpy",
            "program.py:2 changes the environment or sys.path before",
        ),
        ("import setting\nimport numpy", "setting.py:3 changes the environment or sys.path before"),
        ("import settings\nimport numpy", "settings/__init__.py:2 changes the environment or sys.path before"),
    ],
)
def test_program_with_nothing_to_prewarm_has_a_reason(place: ProgramDir, text: str, why: str) -> None:
    (place.folder / "program.py").write_text(text)
    (place.folder / "setting.py").write_text("import os\n\nos.environ.setdefault('A', '1')")
    (place.folder / "settings").mkdir()
    (place.folder / "settings" / "__init__.py").write_text("import os\nos.environ['A'] = '1'")

    async def scene() -> None:
        with pytest.raises(ColdStart, match=why):
            await place.start_zygote(place.command("program.py"), least=300)

    play(scene)


def test_package_that_was_installed_since_is_noticed(place: ProgramDir) -> None:
    installed = place.folder / "site-packages"
    installed.mkdir()
    wanted = place.command("program.py", PYTHONPATH=str(installed))

    async def scene() -> None:
        held = await place.start_zygote(wanted)
        assert held.mismatch(wanted) == ""
        (installed / "another-1.0.dist-info").mkdir()
        assert held.mismatch(wanted) == f"packages in {installed} changed since it was prewarmed"
        held.kill()

    (place.folder / "program.py").write_text("import json")
    play(scene)


def test_module_that_starts_threads_is_named(place: ProgramDir) -> None:
    """A fork has only the thread that forks: what an import has begun in others would be missing."""
    installed = place.folder / f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
    installed.mkdir(parents=True)
    text = "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()"
    (installed / "careless.py").write_text(text)
    (place.folder / "program.py").write_text("import json\nimport careless")
    wanted = place.command("program.py", PYTHONUSERBASE=str(place.folder), PYTHONPATH=str(installed))

    async def scene() -> None:
        with pytest.raises(UnsafeModule, match="it starts 1 threads") as unfit:
            await place.start_zygote(wanted)
        assert unfit.value.module == "careless"

    play(scene)


def test_interpreter_that_cannot_be_prewarmed_never_runs_the_program(place: ProgramDir) -> None:
    wrapper = place.folder / "python"
    wrapper.write_text(f'#!/bin/sh\nunset PYTHONPATH\nexec {sys.executable} "$@"\n')
    wrapper.chmod(0o755)
    (place.folder / "program.py").write_text("open('ran', 'w')")
    wanted = replace(place.command(), argv=(str(wrapper), "program.py"))

    async def scene() -> None:
        with pytest.raises(ColdStart, match=r"ended before the program could be prewarmed \(exit code 0\)"):
            await place.start_zygote(wanted)

    play(scene)
    assert not (place.folder / "ran").exists()


def test_cold_start_tells_the_error_that_ended_the_zygote(place: ProgramDir) -> None:
    (place.folder / "program.py").write_text("open('ran', 'w')")
    (place.folder / "sitecustomize.py").write_text("raise KeyError('site')")
    wanted = place.command("program.py", PYTHONPATH=str(place.folder))

    async def scene() -> None:
        with pytest.raises(ColdStart, match=r"\(exit code 70: KeyError: 'site'\)"):
            await place.start_zygote(wanted)

    play(scene)
    assert not (place.folder / "ran").exists()


@pytest.mark.parametrize(
    ("text", "how"),
    [
        ("import os\nos._exit(3)", "exit code 3"),
        (
            "import os, signal\nprint('RuntimeError: no licence', flush=True)\nos.kill(os.getpid(), signal.SIGKILL)",
            "SIGKILL: RuntimeError: no licence",
        ),
    ],
)
def test_interpreter_that_ends_during_its_imports_says_how(place: ProgramDir, text: str, how: str) -> None:
    installed = place.folder / f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
    installed.mkdir(parents=True)
    (installed / "licensed.py").write_text(text)
    (place.folder / "program.py").write_text("import licensed")
    wanted = place.command("program.py", PYTHONUSERBASE=str(place.folder), PYTHONPATH=str(installed))

    async def scene() -> None:
        with pytest.raises(ColdStart, match=re.escape(f"could be prewarmed ({how})")):
            await place.start_zygote(wanted)

    play(scene)


def test_preparation_for_faster_forks_stops_as_soon_as_one_is_requested() -> None:
    looks = 0

    def is_requested() -> bool:
        nonlocal looks
        looks += 1
        return looks == 3

    with mmap.mmap(-1, 256 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS):
        use_huge_pages(is_requested)
    assert looks == 3


def test_zygote_that_does_not_fork_is_killed_for_all_waiters(
    place: ProgramDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its descriptor's number is another's then, which can be waited for as any: that of a rank started cold."""
    (place.folder / "program.py").write_text("print('x')")
    wanted = place.command("program.py")

    async def heard(ours: socket.socket, theirs: socket.socket) -> None:
        loop, woken = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(ours, woken.set)
        theirs.send(b"x")
        await woken.wait()
        loop.remove_reader(ours)

    async def scene() -> None:
        held = await place.start_zygote(wanted)
        ended = asyncio.ensure_future(held.wait_ended())
        await asyncio.sleep(0)
        os.kill(held.pid, signal.SIGSTOP)
        monkeypatch.setattr(zygote_module, "FORK_TIMEOUT_S", 0.01)
        with (place.folder / "log").open("wb") as output, pytest.raises(ColdStart, match=r"did not fork \(T"):
            await held.fork(wanted, output.fileno())
        with contextlib.ExitStack() as others:
            for _ in range(8):
                ours, theirs = map(others.enter_context, socket.socketpair())
                await heard(ours, theirs)
        await ended

    play(scene)


def test_dead_zygote_starts_no_rank(place: ProgramDir) -> None:
    (place.folder / "program.py").write_text("print('x')")
    wanted = place.command("program.py")

    async def scene() -> None:
        held = await place.start_zygote(wanted)
        os.kill(held.pid, signal.SIGKILL)
        await held.wait_ended()
        with (place.folder / "log").open("wb") as output, pytest.raises(ColdStart):
            await held.fork(wanted, output.fileno())
        assert "SIGKILL" in held.mismatch(wanted)
        held.kill()

    play(scene)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"OMP_NUM_THREADS": "7"}, "OMP_NUM_THREADS changed"),
        ({"RANK": "1"}, "RANK changed"),
        ({"MASTER_PORT": "4"}, ""),
        ({"HOLDFAST_ATTEMPT": "4"}, ""),
    ],
)
def test_environment_that_imports_may_have_seen_must_be_the_same(
    place: ProgramDir, change: dict[str, str], why: str
) -> None:
    before = place.command("program.py")
    assert before.mismatch(place.command("program.py", **change)) == why


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("import os; rank = os.environ['RANK']", "it reads RANK"),
        ("import os; rank = os.getenv('RANK', '0')", "it reads RANK"),
        ("import os; first = 'RANK' in os.environ", "it reads RANK"),
        (
            "import os; copy = dict(os.environ); os.environ['NEW'] = '1'\n"
            "every = list(os.environ.items()); home = os.environ.get('HOME')",
            "",
        ),
    ],
)
def test_module_that_reads_what_is_not_known_yet_is_named(place: ProgramDir, text: str, why: str) -> None:
    """A standby has its imports done before it is known whose rank it will have."""
    installed = place.folder / f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
    (installed / "__pycache__").mkdir(parents=True)  # the first import would make it, which changes the folder
    (installed / "curious.py").write_text(text)
    (place.folder / "program.py").write_text("import curious, os\nprint(os.environ['RANK'])")
    here = {"PYTHONUSERBASE": str(place.folder), "PYTHONPATH": str(installed)}
    guess = replace(place.command("program.py", RANK="0", **here), provisional=frozenset({"RANK"}))
    known = place.command("program.py", RANK="5", **here)

    async def scene() -> None:
        if why:
            with pytest.raises(UnsafeModule, match=why) as unfit:
                await place.start_zygote(guess)
            assert unfit.value.module == "curious"
            return
        held = await place.start_zygote(guess)
        try:
            assert held.mismatch(known) == ""
            assert await place.run_forked(held, known) == (0, "5\n")
        finally:
            held.kill()

    play(scene)
