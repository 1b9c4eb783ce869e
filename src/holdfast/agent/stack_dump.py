"""Dumps a rank's Python stacks with py-spy, if it is installed."""

from __future__ import annotations

import asyncio
import logging
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from holdfast.diagnose.rank_stack import Stack, training_stack

log = logging.getLogger("holdfast.agent")

DUMP_TIMEOUT_S = 5.0
"""Dump timeout; py-spy needs about a second for a large program."""

MAX_DUMP_BYTES = 4 << 20
"""Most bytes kept of a dump: a program may have any number of threads, and frames with names of any length."""

# Thread 4242 (idle): "MainThread"
#     all_reduce (/opt/venv/lib/python3.12/site-packages/torch/distributed/distributed_c10d.py:2841)
_MAIN_FRAME = re.compile(
    r"^Thread .*\"MainThread\"\n\s+(?P<function>\S+) \((?:.*/(?:site-packages|python3\.\d+)/|.*/)?(?P<place>.*)\)$",
    re.MULTILINE,
)
_MAIN_THREAD = re.compile(r"^Thread .*\"MainThread\"\n(?P<frames>(?: +.*\n?)+)", re.MULTILINE)
_COMMIT = re.compile(r"\bcommit \(.*holdfast/train/session/session\.py:(?P<line>\d+)\)$", re.MULTILINE)
_BEFORE_STEP_REPORT = re.compile(
    r"\bend_step \(.*holdfast/train/ft/(?:replica_strategy|semi_sync)\.py:\d+\)$", re.MULTILINE
)
"""Frames in which `Session.commit` waits for other replicas before it reports the step."""


@dataclass(frozen=True, kw_only=True)
class StackDump:
    """The file with a process's stacks, and its main thread's top frame; empty if there is none."""

    path: str = ""
    top_frame: str = ""
    frames: Stack = ()
    """The training thread's frames, by which ranks are compared."""
    commit_line: int = 0
    """Line of the main thread in `Session.commit`, after the step's report; 0 elsewhere."""


def stacks_name(replica: int, attempt: int, rank: int) -> str:
    """Name of the file with the stacks of a rank that hangs: a node may serve another replica later."""
    return f"stacks-replica-{replica}-attempt-{attempt}-rank-{rank}.txt"


async def dump_stacks(pid: int, into: Path, *, stopped: bool = False) -> StackDump:
    """Dump a process's stacks to a file; read a stopped process without pausing it, since it cannot be paused."""
    beside = Path(sys.executable).parent / "py-spy"
    program = str(beside) if beside.exists() else shutil.which("py-spy")
    if program is None:
        return StackDump()
    options = ["--nonblocking"] if stopped else []
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
            stderr=asyncio.subprocess.DEVNULL,
        )
    except OSError as error:
        log.warning("py-spy cannot be started: %s", error)
        return StackDump()
    try:
        output = await asyncio.wait_for(_output(process), DUMP_TIMEOUT_S)
    except TimeoutError:
        output = b""
    if process.returncode is None:
        process.kill()
        await process.communicate()  # read to the end: a full pipe is never closed
    if not output:
        return StackDump()
    try:
        into.write_bytes(output)
    except OSError as error:
        log.warning("stacks cannot be stored: %s", error)
        return StackDump()
    dump = output.decode(errors="replace")
    match = _MAIN_FRAME.search(dump)
    innermost = f"{match['function']} ({match['place']})" if match else ""
    frames, line = training_stack(dump), commit_line(dump)
    return StackDump(path=str(into), top_frame=innermost, frames=frames, commit_line=line)


async def _output(process: asyncio.subprocess.Process) -> bytes:
    """The process's output, truncated at `MAX_DUMP_BYTES`; empty if it fails."""
    assert process.stdout is not None
    output = bytearray()
    while more := await process.stdout.read(MAX_DUMP_BYTES - len(output)):
        output += more
    if len(output) < MAX_DUMP_BYTES and await process.wait() != 0:
        return b""
    return bytes(output)


def commit_line(dump: str) -> int:
    """Line of a dump's main thread in `Session.commit`, after the step's report; 0 elsewhere."""
    thread = _MAIN_THREAD.search(dump)
    if thread is None or _BEFORE_STEP_REPORT.search(thread["frames"]):
        return 0
    within = _COMMIT.search(thread["frames"])
    return int(within["line"]) if within else 0
