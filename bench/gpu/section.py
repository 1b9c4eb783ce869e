"""Runs one section in a separate process with a deadline, so that it fails alone and what it measured before stays.

The process is a fork of one that has torch imported and has never opened the GPU: an import would take each section
some seconds of the eight minutes, and CI its CPU time.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import secrets
import shlex
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from multiprocessing.process import BaseProcess
from pathlib import Path

import msgspec

from bench.paired_stats import say
from bench.result_file import Figure, Peer, Result, today
from holdfast.host.processes import all_pids, by_env, kill_all

MARK = "HOLDFAST_BENCH_SECTION"
"""Variable in the environment of a section's processes, by which what it leaves behind is found."""
CLEAN_UP_S = 10.0
"""Seconds that a section has after its deadline to end its own processes."""
TRACEBACK_CHARACTERS = 3000
ROOT = Path(__file__).parents[2]
_forks = multiprocessing.get_context("fork")


class NotLookedAt(Exception):
    """This machine cannot show it; the text says why."""


class DeviceInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the driver says of a device."""

    kind: str
    """`cuda` or `cpu`."""
    name: str
    memory_bytes: int
    capability: tuple[int, int] = (0, 0)
    """CUDA's compute capability, such as (9, 0) for Hopper."""
    software: str = ""
    """CUDA and NCCL, as torch was built with them."""


HOST = DeviceInfo(kind="cpu", name="CPU", memory_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a section measures."""

    device: DeviceInfo
    tiny: bool
    """Whether sizes and rounds only show that the code works."""
    folder: Path
    """A temporary directory of the section, on the disk whose speed is measured."""
    records: Path
    """A directory for real logs and dumps."""


@dataclass(frozen=True, kw_only=True)
class Section:
    """One part of the bench."""

    name: str
    measure: Callable[[Place], Iterable[Result]]
    deadline_s: float
    claims: tuple[str, ...]
    """Every claim that it measures; one that it does not reach failed with it."""


def measured(
    claim: str,
    figure: Figure | None = None,
    *,
    goal: str = "",
    met: bool | None = None,
    difference: Figure | None = None,
    floor: Figure | None = None,
    peer: Peer | None = None,
    conditions: str = "",
    details: dict[str, str] | None = None,
    note: str = "",
) -> Result:
    """A result; the runner fills in the command."""
    return Result(
        claim=claim,
        command="",
        date=today(),
        figure=figure,
        difference=difference,
        floor=floor,
        peer=peer,
        goal=goal,
        met="" if met is None else "yes" if met else "no",
        conditions=conditions,
        details=details or {},
        note=note,
    )


def skipped(claim: str, why: str) -> Result:
    """A claim that this machine cannot show."""
    return Result(claim=claim, command="", date=today(), skipped=why)


def failed(claim: str) -> Result:
    """A claim that the exception being handled prevents, when others can still be measured."""
    return Result(claim=claim, command="", date=today(), failed=_shown_exception())


def run(section: Section, place: Place, within_s: float) -> list[Result]:
    """The section's results: one for each claim, measured or failed or not looked at."""
    say(f"\n## {section.name} (at most {within_s:.0f} s)")
    began = time.monotonic()
    lines, mark = place.folder / f"{section.name}.jsonl", secrets.token_hex(8)
    lines.touch()
    own = replace(place, folder=place.folder / section.name)
    own.folder.mkdir()
    process = _forks.Process(target=_measure, args=(section, own, lines, mark))
    process.start()
    try:
        process.join(within_s)
    finally:  # also at Ctrl-C, which does not reach the section's session
        problem = _end(process, mark, within_s)
        shutil.rmtree(own.folder, ignore_errors=True)
    found = [msgspec.json.decode(line, type=Result) for line in lines.read_bytes().splitlines()]
    reached = {result.claim for result in found}
    last = _Ending.of(lines)
    for claim in section.claims:
        if claim not in reached and last.skipped:
            found.append(skipped(claim, last.skipped))
        elif claim not in reached:
            why = last.failed or problem or "the section ended without it"
            found.append(Result(claim=claim, command="", date=today(), failed=why))
    for result in found:
        _print(result)
    say(f"{section.name}: {time.monotonic() - began:.1f} s")
    return [msgspec.structs.replace(result, command=_command(section, place)) for result in found]


def leave_out(section: Section, place: Place, why: str) -> list[Result]:
    """The results of a section that does not start."""
    return [msgspec.structs.replace(skipped(claim, why), command=_command(section, place)) for claim in section.claims]


def _command(section: Section, place: Place) -> str:
    words = ("python", "-m", "bench.gpu", "--only", section.name, *(("--tiny",) if place.tiny else ()))
    return shlex.join(words)


class _Ending(msgspec.Struct, frozen=True):
    """How a section's process ended, by itself."""

    failed: str = ""
    skipped: str = ""

    @classmethod
    def of(cls, lines: Path) -> _Ending:
        path = lines.with_suffix(".ending")
        return msgspec.json.decode(path.read_bytes(), type=cls) if path.exists() else cls()

    def write(self, lines: Path) -> None:
        lines.with_suffix(".ending").write_bytes(msgspec.json.encode(self))


def _measure(section: Section, place: Place, lines: Path, mark: str) -> None:
    """In the section's process: each result is on disk before the next is measured."""
    os.setsid()
    os.environ[MARK] = mark
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    ending = _Ending()
    try:
        with lines.open("ab", buffering=0) as file:
            for result in section.measure(place):
                file.write(msgspec.json.encode(result) + b"\n")
    except NotLookedAt as reason:
        ending = _Ending(skipped=str(reason))
    except Exception:
        ending = _Ending(failed=_shown_exception())
    ending.write(lines)


def _end(process: BaseProcess, mark: str, within_s: float) -> str:
    """End the process and all that it started; returns how it ended, unless by itself."""
    late = process.is_alive()
    if late:
        process.terminate()
        process.join(CLEAN_UP_S)
    if process.is_alive():
        process.kill()
        process.join()
    assert process.pid is not None
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # forks of it, which keep its session
    kill_all(lambda: by_env(all_pids(), **{MARK: mark}), within_s=CLEAN_UP_S)
    code = process.exitcode or 0
    if late:
        return f"not done within {within_s:.0f} s"
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}" if code else ""


def _shown_exception() -> str:
    """Print the exception being handled, and return it without naming a directory of this machine."""
    text = traceback.format_exc()
    say(text)
    for folder, name in ((str(ROOT), "."), (sys.prefix, "PYTHON"), (sys.base_prefix, "PYTHON")):
        text = text.replace(folder, name)
    return text[-TRACEBACK_CHARACTERS:]


def _print(result: Result) -> None:
    if result.failed:
        shown = f"FAILED: {result.failed.strip().splitlines()[-1]}"
    elif result.skipped:
        shown = f"not looked at: {result.skipped}"
    else:
        figures = (result.ratio, result.difference, result.figure, result.goal and f"goal {result.goal}", result.met)
        details = (f"{name} {value}" for name, value in result.details.items())
        shown = ", ".join([*(str(one) for one in figures if one), *details])
    say(f"  {result.claim}: {shown}")
