"""The promises that a GPU could break, the claims that check them, and docs/gpu.md made from the results.

A claim is one row of a result; which section measures it: sections.py. Promises without claims need more than one
machine with one GPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bench.paired_stats import table

if TYPE_CHECKING:
    from bench.result_file import Result, ResultFile

PAGE = Path(__file__).parents[2] / "docs" / "gpu.md"

RESUME = {
    "fp32": "bit-exact resume: fp32",
    "bf16": "bit-exact resume: bf16 weights",
    "fp16": "bit-exact resume: fp16 with GradScaler",
    "compile": "bit-exact resume: torch.compile",
    "fsdp2": "bit-exact resume: FSDP2 on one rank",
    "float8": "bit-exact resume: torchao Float8 under FSDP2",
}
SAVE_SIZES_GB = (2, 8, 24)
STALL = {size: f"save of {size} GB of state: time it adds to the loop" for size in SAVE_SIZES_GB}
WRITE = {size: f"save of {size} GB of state: speed to disk" for size in SAVE_SIZES_GB}
LOAD = {size: f"load of {size} GB of state, every file verified" for size in SAVE_SIZES_GB}
OVERHEAD_READ = "step with a Session, minus the bare step: loss read in each step"
OVERHEAD_LEFT = "step with a Session, minus the bare step: loss left on the device"
PARTS_ADD_UP = "step profile: its parts over the step's time"
PROFILE_COST = "step profile: a profiled step over an ordinary one"
PEER_COST = "peer checkpoint: time it adds to the loop"
PEER_SHARE = "peer checkpoints, as often as `auto` takes them: share of the loop's time"
LAUNCH = "`holdfast run` → first step on the device, cold"
KILL_COLD = "`kill -9` of a rank → first step on the device, cold"
KILL_PREWARMED = "`kill -9` of a rank → first step on the device, prewarmed"
LLAMA_STEP = "step of a Llama-3-shaped model that fills the GPU, holdfast over plain torch"
LLAMA_MFU = "its MFU with holdfast, attention counted in full"
TITAN_STEP = "step of TorchTitan's Trainer, with a Session over alone"
TITAN_MFU = "TorchTitan's MFU with a Session, by its own count of FLOPs"
NCCL_LOG = "NCCL's set-up log of one rank is read"
NCCL_REFUSAL = "two ranks on one GPU: NCCL's refusal is named"
FLIGHT_RECORDER = "a Flight Recorder dump is read"
PROBE_MATMUL = "probe: matrix products in bf16, every one bit-exact"
PROBE_MEMORY = "probe: memory bandwidth of a copy, every one bit-exact"
PROBE_ALL_REDUCE = "probe: bus bandwidth of an all-reduce within the node"

TWO_GPUS = "it needs two GPUs: NCCL refuses two ranks on one"


@dataclass(frozen=True, kw_only=True)
class Promise:
    """One promise of the documentation."""

    what: str
    page: str
    """The page that makes it."""
    claims: tuple[str, ...] = ()
    needs: str = ""
    """Why one GPU cannot check it."""


PROMISES = (
    Promise(what="Training resumes bit-exactly", page="checkpoints", claims=tuple(RESUME.values())),
    Promise(
        what="A save stalls the loop only for a copy; files are written in the background",
        page="checkpoints",
        claims=tuple(each[size] for size in SAVE_SIZES_GB for each in (STALL, WRITE, LOAD)),
    ),
    Promise(what="A Session costs a step at most 0.2 ms", page="benchmarks", claims=(OVERHEAD_READ, OVERHEAD_LEFT)),
    Promise(what="The parts of a step profile add up", page="profile", claims=(PARTS_ADD_UP, PROFILE_COST)),
    Promise(
        what="Peer checkpoints with `auto` cost at most 1 % of the loop's time",
        page="peer-checkpoints",
        claims=(PEER_COST, PEER_SHARE),
    ),
    Promise(
        what="A dead rank restarts, without its imports if prewarmed",
        page="prewarmed-restarts",
        claims=(LAUNCH, KILL_COLD, KILL_PREWARMED),
    ),
    Promise(what="Training is as fast as without holdfast", page="benchmarks", claims=(LLAMA_STEP, LLAMA_MFU)),
    Promise(what="So is TorchTitan's", page="torchtitan", claims=(TITAN_STEP, TITAN_MFU)),
    Promise(what="NCCL's logs are read", page="interconnect", claims=(NCCL_LOG, NCCL_REFUSAL)),
    Promise(what="Flight Recorder dumps are read", page="diagnose", claims=(FLIGHT_RECORDER,)),
    Promise(
        what="Probes find a device that computes wrongly or slowly",
        page="preflight",
        claims=(PROBE_MATMUL, PROBE_MEMORY, PROBE_ALL_REDUCE),
    ),
    Promise(
        what="Replicas continue over NCCL after one is lost, and stay bit-equal", page="fault-tolerance", needs=TWO_GPUS
    ),
    Promise(what="A rank that hangs in an NCCL collective is named", page="troubleshooting", needs=TWO_GPUS),
    Promise(what="DDP, FSDP2 and HSDP load each other's checkpoints", page="checkpoints", needs=TWO_GPUS),
    Promise(what="A slow node or link is located by its pairs", page="preflight", needs="it needs several nodes"),
    Promise(what="A node with a device fault is replaced", page="troubleshooting", needs="it needs a GPU that fails"),
    Promise(
        what="The transport of each connection is known", page="interconnect", needs="it needs nodes with such a fabric"
    ),
)

TEXT = """# What ran on a GPU

This page shows which promises of holdfast were checked on which GPU, and which never were. Everything else in these
pages was proven on CPUs and over Gloo only.

On a fresh Linux machine with one GPU, Python 3.11 or later with `venv`, `make` and `git`, in a clone of the repository:

```sh
make .venv/.holdfast-ready                      # the environment, about 5 GB
.venv/bin/python -m bench.gpu --json gpu.json   # at most 8 minutes
.venv/bin/python -m bench.result_file gpu.json  # adds the results, and renews this page
```

Each section runs in a separate process with a deadline, and fails alone. `--only SECTION` runs one, `--tiny` runs the
same code on a CPU with tiny sizes, as the tests do. The NCCL log and the Flight Recorder dump go to
`bench/results/recorded`, without host names and addresses. `python -m bench.result_file` generates this page.

## Promises

{promises}
"""
NEVER = "**never ran on a GPU**"


def page(files: Iterable[ResultFile]) -> str:
    """The page; only results of files that name a GPU count."""
    on_gpus = [file for file in files if file.gpu]
    parts = [TEXT.format(promises=_promises(on_gpus)).rstrip()]
    parts += [_figures(file) for file in on_gpus]
    return "\n\n".join(parts) + "\n"


def _promises(files: Sequence[ResultFile]) -> str:
    latest = [(file.gpu, _latest(file)) for file in files]
    rows = [
        ("" if index else f"{promise.what} ([{promise.page}]({promise.page}.md))", claim, where)
        for promise in PROMISES
        for index, (claim, where) in enumerate(_checked(promise, latest))
    ]
    return table(("promise", "what is measured", "where"), rows)


def _checked(promise: Promise, latest: Sequence[tuple[str, Mapping[str, Result]]]) -> Iterable[tuple[str, str]]:
    if promise.needs:
        yield "–", f"{NEVER}: {promise.needs}"
    for claim in promise.claims:
        ran = [f"{gpu}{_outcome(of[claim])}" for gpu, of in latest if claim in of and not of[claim].skipped]
        yield claim, "; ".join(ran) or NEVER


def _outcome(result: Result) -> str:
    if result.failed:
        return " (**failed**)"
    return " (**missed**)" if result.met == "no" else ""


def _latest(file: ResultFile) -> dict[str, Result]:
    """The newest result of each claim; files list the newest first."""
    found: dict[str, Result] = {}
    for result in file.results:
        found.setdefault(result.claim, result)
    return found


def _figures(file: ResultFile) -> str:
    rows = [
        (claim, shown_figure(result), result.goal, str(result.peer or ""), _notes(result))
        for claim, result in _latest(file).items()
    ]
    shown = table(("claim", "measured", "goal", "peer", "conditions"), rows)
    return f"## {file.gpu}\n\n{file.machine}; {file.versions}.\n\n{shown}"


def shown_figure(result: Result) -> str:
    """What was measured, or why it was not."""
    if result.failed:
        return f"**failed**: {last_line(result.failed)}"
    if result.skipped:
        return f"not looked at: {result.skipped}"
    shown = ", ".join(str(one) for one in (result.ratio, result.difference, result.figure) if one)
    return shown + {"no": " **missed**", "inside the floor": " (inside the floor)"}.get(result.met, "")


def _notes(result: Result) -> str:
    floor = [f"floor {result.floor}"] if result.floor else []
    details = [f"{name} {value}" for name, value in result.details.items()]
    return "; ".join(filter(None, (result.conditions, *floor, *details, result.note)))


def last_line(text: str) -> str:
    """The last line of a traceback, which has the error, as a table's cell can hold it."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return (lines[-1] if lines else "").replace("|", "\\|")[:200]
