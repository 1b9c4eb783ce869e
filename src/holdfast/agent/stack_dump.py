"""Dumps a rank's stacks with py-spy, if it is installed; with native frames on request."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import shutil
import sys
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from holdfast.diagnose.rank_stack import Stack, native_stack, training_stack, without_native

log = logging.getLogger("holdfast.agent")

DUMP_TIMEOUT_S = 5.0
"""Dump timeout; py-spy needs about a second for a large program."""

NATIVE_DUMP_TIMEOUT_S = 30.0
"""The same with native frames, for which py-spy reads the symbols of every library: 4 s with torch on busy cores."""

MAX_ERROR_BYTES = 4 << 10

MAX_DUMP_BYTES = 4 << 20
"""Most bytes kept of a dump: a program may have any number of threads, and frames with names of any length."""

# Thread 4242 (idle): "MainThread"
#     all_reduce (/opt/venv/lib/python3.12/site-packages/torch/distributed/distributed_c10d.py:2841)
_MAIN_FRAME = re.compile(
    r"^Thread .*\"MainThread\"\n\s+(?P<function>\S+) \((?:.*/(?:site-packages|python3\.\d+)/|.*/)?(?P<place>.*)\)$",
    re.MULTILINE,
)
_MAIN_THREAD = re.compile(r"^Thread .*\"MainThread\"\n(?P<frames>(?: +.*\n?)+)", re.MULTILINE)
_STOPPED = "a stopped process has none, since py-spy cannot pause it"
_REFUSALS = (
    # Permission Denied: Try running again with elevated permissions by going 'sudo env "PATH=$PATH" !!'
    (
        re.compile("Permission Denied|Operation not permitted"),
        "the kernel does not let the agent trace the rank (ptrace); "
        "add the capability SYS_PTRACE to the container, or set kernel.yama.ptrace_scope to 0 on the node",
    ),
    # error: unexpected argument '--native' found
    (
        re.compile("argument '--native'"),
        "this build of py-spy reads Python frames only; install one whose `py-spy dump --help` lists `--native`",
    ),
    (re.compile("is not installed"), "py-spy is not installed on the node; install it next to holdfast"),
)
"""What py-spy writes if it cannot read native frames, why that is, and what to do."""
_COMMIT = re.compile(r"\bcommit \(.*holdfast/train/session/session\.py:(?P<line>\d+)\)$", re.MULTILINE)
_BEFORE_STEP_REPORT = re.compile(
    r"\bend_step \(.*holdfast/train/ft/(?:replica_strategy|semi_sync)\.py:\d+\)$", re.MULTILINE
)
"""Frames in which `Session.commit` waits for other replicas before it reports the step."""


class StackDump(Struct, frozen=True, kw_only=True):
    """The file with a process's stacks, and its main thread's top frame; empty if there is none."""

    path: str = ""
    top_frame: str = ""
    frames: Stack = ()
    """The training thread's frames, by which ranks are compared."""
    commit_line: int = 0
    """Line of the main thread in `Session.commit`, after the step's report; 0 elsewhere."""
    native: Stack | None = None
    """Native frames within them; None if they were not requested, or could not be read."""
    native_missing: str = ""
    """Why native frames could not be read, and what to do."""


class _Answer(Struct, frozen=True, kw_only=True):
    """What py-spy wrote; `output` is empty if it failed."""

    output: bytes = b""
    error: str = ""
    timed_out: bool = False


def stacks_name(replica: int, attempt: int, rank: int) -> str:
    """Name of the file with the stacks of a rank that hangs: a node may serve another replica later."""
    return f"stacks-replica-{replica}-attempt-{attempt}-rank-{rank}.txt"


async def dump_stacks(pid: int, into: Path, *, stopped: bool = False) -> StackDump:
    """Dump a process's stacks to a file; read a stopped process without pausing it, since it cannot be paused."""
    answer = await _py_spy(pid, *(["--nonblocking"] if stopped else []), timeout_s=DUMP_TIMEOUT_S)
    return _stored(answer.output, into)


async def dump_native_stacks(pid: int, into: Path, *, stopped: bool = False) -> StackDump:
    """Dump a process's stacks with frames of C and C++; without them, and with the reason, if they cannot be read."""
    if stopped:
        missing = _STOPPED
    else:
        answer = await _py_spy(pid, "--native", timeout_s=NATIVE_DUMP_TIMEOUT_S)
        if answer.output:
            return _stored(answer.output, into, native=True)
        missing = _why_missing(answer)
    return replace(await dump_stacks(pid, into, stopped=stopped), native_missing=missing)


async def _py_spy(pid: int, *options: str, timeout_s: float) -> _Answer:
    beside = Path(sys.executable).parent / "py-spy"
    program = str(beside) if beside.exists() else shutil.which("py-spy")
    if program is None:
        return _Answer(error="py-spy is not installed")
    try:
        process = await asyncio.create_subprocess_exec(
            program,
            "dump",
            "--pid",
            str(pid),
            "--full-filenames",  # the folder shows whether a file is the user's
            *options,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
    except OSError as error:
        log.warning("py-spy cannot be started: %s", error)
        return _Answer(error=str(error))
    assert process.stdout is not None
    assert process.stderr is not None
    errors = asyncio.ensure_future(_read(process.stderr, MAX_ERROR_BYTES))
    timed_out = False
    try:
        output = await asyncio.wait_for(_output(process), timeout_s)
    except TimeoutError:
        output, timed_out = b"", True
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
    while await process.stdout.read(MAX_DUMP_BYTES):  # to the end: a full pipe is never closed
        pass
    error = (await errors).decode(errors="replace")
    await process.wait()
    return _Answer(output=output, error=error, timed_out=timed_out)


def _stored(output: bytes, into: Path, *, native: bool = False) -> StackDump:
    if not output:
        return StackDump()
    try:
        into.write_bytes(output)
    except OSError as error:
        log.warning("stacks cannot be stored: %s", error)
        return StackDump()
    whole = output.decode(errors="replace")
    dump = without_native(whole) if native else whole
    match = _MAIN_FRAME.search(dump)
    return StackDump(
        path=str(into),
        top_frame=f"{match['function']} ({match['place']})" if match else "",
        frames=training_stack(dump),
        commit_line=commit_line(dump),
        native=native_stack(whole) if native else None,
    )


def _why_missing(answer: _Answer) -> str:
    if answer.timed_out:
        return f"py-spy had not read them after {NATIVE_DUMP_TIMEOUT_S:g} s; try again when the cores are less busy"
    known = (reason for pattern, reason in _REFUSALS if pattern.search(answer.error))
    return next(known, f"py-spy failed: {answer.error.strip().partition(chr(10))[0][:200]}")


async def _output(process: asyncio.subprocess.Process) -> bytes:
    """The process's output, truncated at `MAX_DUMP_BYTES`; empty if it fails."""
    assert process.stdout is not None
    output = bytearray()
    while more := await process.stdout.read(MAX_DUMP_BYTES - len(output)):
        output += more
    if len(output) < MAX_DUMP_BYTES and await process.wait() != 0:
        return b""
    return bytes(output)


async def _read(stream: asyncio.StreamReader, most: int) -> bytes:
    """The beginning of a stream, which is read to its end."""
    kept = bytearray()
    while more := await stream.read(most):
        kept += more[: most - len(kept)]
    return bytes(kept)


def commit_line(dump: str) -> int:
    """Line of a dump's main thread in `Session.commit`, after the step's report; 0 elsewhere."""
    thread = _MAIN_THREAD.search(dump)
    if thread is None or _BEFORE_STEP_REPORT.search(thread["frames"]):
        return 0
    within = _COMMIT.search(thread["frames"])
    return int(within["line"]) if within else 0
