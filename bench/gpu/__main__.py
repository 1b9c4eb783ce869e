"""What holdfast promises, on one real GPU, in at most eight minutes.

.venv/bin/python -m bench.gpu [--json FILE] [--only SECTION ...] [--folder FOLDER] [--records FOLDER] [--tiny]

On a fresh Linux machine it needs one GPU with its driver, Python 3.11 or later with venv, make and git. In a clone of
the repository:

    make .venv/.holdfast-ready                      # the environment: about 5 GB, because torch comes with CUDA
    .venv/bin/python -m bench.gpu --json gpu.json
    .venv/bin/python -m bench.result_file gpu.json  # adds the results to bench/results, and renews docs/gpu.md

Float8 is looked at where torchao is installed: `.venv/bin/python -m pip install torchao`.
`make` needs no shell setup and no root; where python3 is older, `make PYTHON=/path/to/python3.11 …`. The largest
section needs 32 GB of GPU memory, 31 GB of host memory and 29 GB of disk space in FOLDER (default: the temporary
directory). Everything that a section writes there is deleted when it ends. A section that this machine has no room for
is "not looked at", with the reason.

Each section runs in a separate process with a deadline: one that raises, hangs or is killed fails only its
claims, and the others run. After eight minutes no section starts. Sections: sections.py; promises and the page:
promises.py. The NCCL log and the Flight Recorder dump go to RECORDS.

Without a GPU it runs only with `--tiny`, which takes the same paths with tiny sizes, on the host's clock.
"""

from __future__ import annotations

import argparse
import multiprocessing
import re
import sys
import tempfile
import time
from pathlib import Path

import msgspec
import torch._dynamo  # noqa: F401 - an optimizer would import it in every section

from bench import result_file
from bench.gpu import section
from bench.gpu.device import probe
from bench.gpu.promises import shown_figure
from bench.gpu.section import HOST, DeviceInfo, Place
from bench.gpu.sections import SECTIONS
from bench.paired_stats import headline, machine, say, table, versions
from bench.result_file import Result, ResultFile

BUDGET_S = 480.0
LEAST_S = 10.0
"""A section with less time than this does not start."""
PROBE_S = 30.0


def main() -> int:
    """Run the sections, and print a table; returns the number of claims that failed or missed their goal."""
    parser = argparse.ArgumentParser(
        prog="bench.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to this file")
    parser.add_argument("--only", nargs="+", choices=[each.name for each in SECTIONS], metavar="SECTION")
    parser.add_argument("--folder", type=Path, help="where checkpoints go: the disk that is measured")
    parser.add_argument("--records", type=Path, help="where real logs go, if not to bench/results/recorded")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, to see that it works; also without a GPU")
    options = parser.parse_args()
    began = time.monotonic()
    headline("gpu: the promises that only a GPU can check")
    device = _probe()
    say(f"{device.name}, {device.memory_bytes / 2**30:.1f} GiB {device.software}")
    if device.kind == "cpu" and not options.tiny:
        parser.error("torch finds no GPU here; --tiny runs the same code on the CPU")
    chosen = [each for each in SECTIONS if not options.only or each.name in options.only]
    found: list[Result] = []
    with tempfile.TemporaryDirectory(prefix="hfgpu-", dir=options.folder) as folder:
        usual = Path(folder, "records") if options.tiny else result_file.RESULTS / "recorded"
        records = (options.records or usual) / slug(device.name)
        place = Place(device=device, tiny=options.tiny, folder=Path(folder), records=records)
        for each in chosen:
            left_s = BUDGET_S - (time.monotonic() - began)
            if left_s < LEAST_S:
                found += section.leave_out(each, place, f"the {BUDGET_S:.0f} s were over")
            else:
                # CI's machine may be slow, and tiny sizes take no time: only the whole bench has a deadline there.
                found += section.run(each, place, left_s if options.tiny else min(each.deadline_s, left_s))
    if options.json is not None:
        result_file.write(options.json, _file(device, found))
    say("\n" + table(("claim", "measured", "goal", "met"), [_row(each) for each in found]))
    say(f"\n{time.monotonic() - began:.0f} s")
    return sum(bool(each.failed) or each.met == "no" for each in found)


def _probe() -> DeviceInfo:
    """Look for a GPU in another process: after opening one, this process could not fork sections that use it."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=lambda: theirs.send(probe()))
    process.start()
    theirs.close()
    try:
        if not ours.poll(PROBE_S):
            raise SystemExit(f"no device answered within {PROBE_S:.0f} s; does `nvidia-smi` answer?")
        return ours.recv()
    except EOFError:
        raise SystemExit("torch could not open the device: see above") from None
    finally:
        process.kill()
        process.join()


def _file(device: DeviceInfo, found: list[Result]) -> ResultFile:
    software = f"{versions()}, {device.software}" if device.software else versions()
    return ResultFile(
        bench=f"gpu-{slug(device.name)}",
        title=f"One {device.name}",
        machine=f"{device.memory_bytes / 2**30:.0f} GiB of GPU memory, {machine()}",
        versions=software,
        gpu="" if device == HOST else device.name,
        results=[msgspec.structs.replace(each, headline=each.met == "no") for each in found],
    )


def slug(name: str) -> str:
    """A device's name as a file can have it."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _row(result: Result) -> tuple[str, ...]:
    return result.claim, shown_figure(result), result.goal, result.met


if __name__ == "__main__":
    sys.exit(main())
