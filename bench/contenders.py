"""The compared sides as processes: a script under holdfast or under torchrun agents, on two nodes of one rank each.

Every process of a side carries a mark in its environment, by which the bench freezes, thaws and kills all of them. Each
side has a temporary directory.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from holdfast.host.processes import all_pids, by_env, kill_all, send_signal

BIN = Path(sys.executable).parent
PROGRAMS = Path(__file__).parent / "programs"
MARK = "HOLDFAST_BENCH"
END_S = 15.0
RESTARTS = 1000
"""More than any bench uses: a side must fail because it cannot recover, not because it reached a limit."""


class ContenderFailed(Exception):
    """A side did not do what the bench needs; the message ends with its last output."""


@dataclass(frozen=True, kw_only=True)
class Running:
    """One side's run: its commands, its ranks' output directory, and the mark of all its processes."""

    commands: tuple[subprocess.Popen[bytes], ...]
    started: float
    """Unix seconds just before the first command was started."""
    folder: Path
    mark: str

    @property
    def out(self) -> Path:
        """The directory that the script received."""
        return self.folder / "out"

    def pids(self) -> list[int]:
        """Every process of this side."""
        return by_env(all_pids(), **{MARK: self.mark})

    def ended(self) -> bool:
        """Whether a command has exited."""
        return any(command.poll() is not None for command in self.commands)

    def wait_for(self, ready: Callable[[], bool], within_s: float) -> bool:
        """Whether `ready` became true before the timeout and before a command exited."""
        deadline = time.monotonic() + within_s
        while not ready():
            if self.ended() or time.monotonic() > deadline:
                return ready()
            time.sleep(0.02)
        return True

    def last_words(self) -> str:
        """The last output of its commands."""
        return (self.folder / "commands.log").read_text(errors="replace")[-3000:]


Contender = Callable[..., AbstractContextManager[Running]]


@contextlib.contextmanager
def holdfast(
    script: str, *words: str, nodes: int = 2, env: Mapping[str, str] | None = None, settings: Sequence[str] = ()
) -> Generator[Running]:
    """`holdfast run --nodes NODES -- python SCRIPT OUT WORDS`; `settings` become `--set` options."""
    options = [word for setting in (f"recovery.max_restarts={RESTARTS}", *settings) for word in ("--set", setting)]

    def commands(out: Path) -> list[list[str]]:
        program = [sys.executable, str(PROGRAMS / script), str(out), *words]
        return [[str(BIN / "holdfast"), "run", "--nodes", str(nodes), *options, "--", *program]]

    with _running(commands, env or {}) as running:
        yield running


@contextlib.contextmanager
def torchrun(script: str, *words: str, env: Mapping[str, str] | None = None) -> Generator[Running]:
    """Two torchrun agents of one rank each, started together, that meet through a c10d store."""

    def commands(out: Path) -> list[list[str]]:
        options = {
            "--nnodes": "2",
            "--nproc-per-node": "1",
            "--rdzv-backend": "c10d",
            "--rdzv-endpoint": f"127.0.0.1:{_free_port()}",
            "--rdzv-id": secrets.token_hex(4),
            "--local-addr": "127.0.0.1",
            "--max-restarts": str(RESTARTS),
        }
        given = [word for option in options.items() for word in option]
        return [[str(BIN / "torchrun"), *given, str(PROGRAMS / script), str(out), *words]] * 2

    with _running(commands, env or {}) as running:
        yield running


def torchrun_fixed(script: str, *words: str) -> AbstractContextManager[Running]:
    """Torchrun with a store for each attempt: its shared store gives restarted ranks the addresses of dead ones."""
    return torchrun(script, *words, env={"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})


@contextlib.contextmanager
def redirected(script: str, *words: str, env: Mapping[str, str] | None = None) -> Generator[Running]:
    """`sh -c 'python SCRIPT OUT WORDS > OUT/log'`."""

    def commands(out: Path) -> list[list[str]]:
        program = [sys.executable, str(PROGRAMS / script), str(out), *words]
        return [["sh", "-c", f"exec {shlex.join(program)} > {shlex.quote(str(out / 'log'))}"]]

    with _running(commands, env or {}) as running:
        yield running


def freeze(pids: Sequence[int]) -> None:
    """Stop processes with SIGSTOP."""
    for pid in pids:
        send_signal(pid, signal.SIGSTOP)


def thaw(pids: Sequence[int]) -> None:
    """Continue frozen processes."""
    for pid in pids:
        send_signal(pid, signal.SIGCONT)


def raise_priority(pids: Sequence[int]) -> None:
    """Raise the priority of these processes on a shared machine, where permitted; among them nothing changes.

    The kernel first divides time among sessions (autogroups), and every rank and agent is a separate session.
    """
    for pid in pids:
        with contextlib.suppress(OSError):
            Path(f"/proc/{pid}/autogroup").write_text("-10")


@contextlib.contextmanager
def _running(commands: Callable[[Path], list[list[str]]], env: Mapping[str, str]) -> Generator[Running]:
    mark = secrets.token_hex(8)
    folder = Path(tempfile.mkdtemp(prefix="hfbench-"))
    for name in ("out", "tmp", "home"):
        (folder / name).mkdir()
    environ = os.environ | {
        MARK: mark,
        "HOLDFAST_HOME": str(folder / "home"),
        "TMPDIR": str(folder / "tmp"),
        # With one rank per node torchrun leaves this to torch; both sides get the same value.
        "OMP_NUM_THREADS": "1",
        **env,
    }
    started: list[subprocess.Popen[bytes]] = []
    argvs = commands(folder / "out")
    try:
        with (folder / "commands.log").open("ab") as output:
            at = time.time()
            for argv in argvs:
                process = subprocess.Popen(
                    argv,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env=environ,
                    cwd=folder,
                    # A frozen member of the bench's own process group would have the kernel hang the group up.
                    start_new_session=True,
                )
                started.append(process)
        yield Running(commands=tuple(started), started=at, folder=folder, mark=mark)
    finally:
        left = kill_all(lambda: by_env(all_pids(), **{MARK: mark}), within_s=END_S)
        for process in started:
            process.wait(END_S)
        shutil.rmtree(folder, ignore_errors=True)
        if left:
            raise ContenderFailed(f"processes {left} outlive SIGKILL")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
