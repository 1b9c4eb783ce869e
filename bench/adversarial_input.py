"""Whether a diagnosis stays small and terminates on adversarial input: seconds and peak memory of each input.

.venv/bin/python -m bench.adversarial_input [--only "a million files"] [--quick]

Each input is made, diagnosed by a separate process, and deleted again. An input that takes more than MEMORY_MIB
(SET_UP_MIB for NCCL set-up lines) or ends with a traceback is an error. The time of each is printed without a limit,
since it depends on the machine. A child's peak memory is at least that of its parent, so nothing here holds much.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import zstandard

from bench.paired_stats import headline, say, table

MEMORY_MIB = 300
SET_UP_MIB = 640
MIB = 1 << 20
LINE = b"2026-11-20T10:00:01.123Z [rank7]: step 812 loss 2.4113 grad_norm 0.412 tokens/s 91234 mem 61.2GiB\n"
TELLS = b"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"


@dataclass(frozen=True, kw_only=True)
class AdversarialInput:
    """Input for `holdfast diagnose`: its arguments, and what writes its standard input."""

    arguments: tuple[str, ...]
    feeder: tuple[str, ...] = ()


def long_line(folder: Path, scale: int) -> AdversarialInput:
    """A line of 100 MB, followed by a line that a rule matches."""
    with (folder / "log").open("wb") as file:
        file.writelines([b"x" * MIB] * (100 // scale) + [b"\n", TELLS])
    return AdversarialInput(arguments=(str(folder),))


def many_files(folder: Path, scale: int) -> AdversarialInput:
    """A million names of one small file, a thousand per directory."""
    one = folder / "rank-0.log"
    one.write_bytes(TELLS)
    for number in range(1000 // scale):
        below = folder / f"node{number}"
        below.mkdir()
        for rank in range(1000):
            os.link(one, below / f"rank-{rank}.log")
    return AdversarialInput(arguments=(str(folder),))


def packed_log(folder: Path, scale: int) -> AdversarialInput:
    """4 GiB of log in a zstd file."""
    block = LINE * (MIB // len(LINE))
    with (folder / "log.zst").open("wb") as file, zstandard.ZstdCompressor().stream_writer(file) as writer:
        for _ in range(4096 // scale):
            writer.write(block)
        writer.write(TELLS)
    return AdversarialInput(arguments=(str(folder),))


def decompression_bomb(folder: Path, scale: int) -> AdversarialInput:
    """Files of some MB that unpack to 16 GiB of zeros and of line ends each."""
    for name, byte in (("zeros", b"0"), ("lines", b"\n")):
        with (folder / f"{name}.zst").open("wb") as file, zstandard.ZstdCompressor().stream_writer(file) as writer:
            for _ in range(1024 // scale):
                writer.write(byte * (16 * MIB))
    return AdversarialInput(arguments=(str(folder),))


def endless(folder: Path, scale: int) -> AdversarialInput:
    """`yes` on standard input."""
    return AdversarialInput(arguments=("-",), feeder=("yes", LINE.decode().strip()))


def no_files(folder: Path, scale: int) -> AdversarialInput:
    """A pipe without a writer, devices, a symlink loop, a sparse file, and one log."""
    os.mkfifo(folder / "pipe")
    (folder / "zero.log").symlink_to("/dev/zero")
    (folder / "round").symlink_to(folder)
    (folder / "itself").symlink_to("itself")
    with (folder / "holes").open("wb") as file:
        file.truncate(8 << 30)
    (folder / "log").write_bytes(TELLS)
    return AdversarialInput(arguments=(str(folder),))


def document(folder: Path, scale: int) -> AdversarialInput:
    """32 MB of empty objects that begin like the output of kubectl."""
    with (folder / "pods.json").open("wb") as file:
        file.writelines([b'{"kind": "List", "items": [', *[b"{}," * (MIB // 3)] * (31 // scale), b"{}]}"])
    return AdversarialInput(arguments=(str(folder),))


def matching_lines(folder: Path, scale: int) -> AdversarialInput:
    """A million lines that match a rule, each from another rank."""
    words = "[Rank {}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum={}, OpType=ALLREDUCE, NumelIn=1, "
    with (folder / "log").open("w") as file:
        for rank in range(MIB // scale):
            file.write(words.format(rank, rank) + "NumelOut=1, Timeout(ms)=600000) ran for 600017 ms\n")
    return AdversarialInput(arguments=(str(folder),))


def nccl_setup_lines(folder: Path, scale: int) -> AdversarialInput:
    """A million set-up lines, each from another process, host and communicator."""
    words = "n{0}:{0}:9 [0] NCCL INFO ncclCommInitRank comm 0x{0:x} rank {0} nranks 1048576 cudaDev 0 busId 1000 commId"
    with (folder / "log").open("w") as file:
        for rank in range(MIB // scale):
            file.write(f"{words.format(rank)} 0x{rank:x} - Init START\n")
    return AdversarialInput(arguments=(str(folder),))


def every_kind(folder: Path, scale: int) -> AdversarialInput:
    """Every kind of line that is kept, with different text in every line."""
    rows = (
        "h{i}:{i}:{i} [0] NCCL INFO Using network IB",
        "h{h}:{h}:{i} [0] NCCL INFO Channel 00/0 : {i}[0] -> 7[0] [send] via NET/IB/0",
        "h{h}:{h}:1 [0] NCCL INFO Channel 00/0 : {i}[0] -> 7[0] [send] via NET/IB/0",
        "h{h}:{h}:1 [0] NCCL INFO NCCL_{i} set by environment to \U0001f4a5{long}",
        "h{h}:{h}:1 [0] NCCL INFO comm 0x{i} rank {i} nranks 9999999 cudaDev 0 busId 1000 commId 0x{i} - Init START",
        "[Rank {i}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum={i}, OpType=ALLREDUCE, NumelIn=1, "
        "NumelOut=1, Timeout(ms)=600000) ran for 600017 ms \U0001f4a5{long}",
    )
    with (folder / "log").open("w") as file:
        for i in range(MIB // 2 // scale):
            file.writelines(row.format(i=i, h=i // 99, long=f"{i:0200}") + "\n" for row in rows)
    return AdversarialInput(arguments=(str(folder),))


INPUTS: Mapping[str, Callable[[Path, int], AdversarialInput]] = {
    "a line of 100 MB": long_line,
    "a million files": many_files,
    "4 GiB packed": packed_log,
    "bombs": decompression_bomb,
    "endless input": endless,
    "what is no file": no_files,
    "a vast document": document,
    "a million matching lines": matching_lines,
    "a million processes": nccl_setup_lines,
    "every kind together": every_kind,
}


def main() -> int:
    """Make each input and diagnose it; return nonzero unless all were bounded."""
    parser = argparse.ArgumentParser(prog="bench.adversarial_input", description=__doc__)
    parser.add_argument("--only", choices=list(INPUTS))
    parser.add_argument("--quick", action="store_true", help="inputs of a tenth of the size")
    options = parser.parse_args()
    headline("adversarial inputs diagnosed: seconds and peak memory")
    rows: list[tuple[str, ...]] = []
    failed = 0
    for name, make in INPUTS.items():
        if options.only not in (None, name):
            continue
        with tempfile.TemporaryDirectory(prefix="adversarial-", dir="/dev/shm") as folder:
            seconds, peak, code, last = measure_diagnosis(make(Path(folder), 10 if options.quick else 1))
        bound = SET_UP_MIB if make in (nccl_setup_lines, every_kind) else MEMORY_MIB
        good = code == 0 and peak <= bound * MIB
        failed += not good
        rows.append(
            (name, f"{seconds:.1f}", f"{peak / MIB:.0f} of {bound}", "yes" if good else f"**no** ({code})", last)
        )
    say(table(("input", "seconds", "peak memory, MiB", "bounded (exit code)", "answer"), rows))
    return 1 if failed else 0


def measure_diagnosis(made: AdversarialInput) -> tuple[float, int, int, str]:
    """Return seconds, peak bytes, exit code, and the first line of the answer."""
    feeder = subprocess.Popen(made.feeder, stdout=subprocess.PIPE) if made.feeder else None
    with tempfile.TemporaryFile() as out:
        begun = time.monotonic()
        command = (sys.executable, "-m", "holdfast", "diagnose", *made.arguments)
        stdin = feeder.stdout if feeder else subprocess.DEVNULL
        process = subprocess.Popen(command, stdin=stdin, stdout=out, stderr=subprocess.STDOUT)
        if feeder and feeder.stdout:
            feeder.stdout.close()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        seconds = time.monotonic() - begun
        if feeder:
            feeder.kill()
            feeder.wait()
        out.seek(0)
        lines = out.read(4096).decode(errors="replace").splitlines() or [""]
    return seconds, usage.ru_maxrss * 1024, process.returncode, lines[0][:80]


if __name__ == "__main__":
    sys.exit(main())
