"""Two ranks on two nodes that train to their end through many faults; torch is imported once for all.

`fault_soak.py FOLDER DISK0 DISK1 [SEED]`: checkpoints go to a directory on each node's disk first, then to
FOLDER/store. With a seed there are 20 faults, otherwise none. FOLDER/RANK.pt gets each rank's final weights and the
samples of its committed steps. Each fault is printed.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch._dynamo  # an optimizer would import it in every rank
import torch.distributed as dist
from tests.conftest import fill
from torch.nn.parallel import DistributedDataParallel

from holdfast.train import RankConfig, Session
from holdfast.train.checkpoint import dcp_io, manifest_file, tiered_storage

EVERY = 2
FAULTS = 20
STEPS = 3 * FAULTS + 4


class Fault(NamedTuple):
    """A fault of one rank, in or after one step."""

    kind: str
    rank: int
    step: int


def faults(seed: int) -> list[Fault]:
    """One for each attempt; each kind comes at least three times."""
    chance = random.Random(seed)
    kinds = (["rank", "node", "save", "load", "full"] * FAULTS)[:FAULTS]
    chance.shuffle(kinds)
    # A failing load comes after a step that can surely be loaded.
    return [Fault(kind, chance.randrange(2), 3 * number + chance.randint(1, 3)) for number, kind in enumerate(kinds)]


def die(*_: Any, **__: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def dying(act: Callable[..., Any], chance: random.Random) -> Callable[..., Any]:
    """The same function, but the process dies at its beginning or end."""
    return die if chance.random() < 0.5 else lambda *given, **named: die(act(*given, **named))


class Seen:
    """The samples of the steps that this rank has committed."""

    def __init__(self) -> None:
        self.samples: list[int] = []

    def state_dict(self) -> dict[str, Any]:
        return {"samples": list(self.samples)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.samples = state["samples"]


def inputs(samples: range) -> torch.Tensor:
    return torch.stack([torch.randn(8, generator=torch.Generator().manual_seed(number)) for number in samples])


def rank_of(folder: Path, disk: Path, rank: int, attempt: int, fault: Fault | None) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/meet-{attempt}", None, 2, rank)
    torch.manual_seed(0)
    parts = (torch.nn.Linear(8, 16), torch.nn.Dropout(0.5), torch.nn.Linear(16, 8))
    model = DistributedDataParallel(torch.nn.Sequential(*parts))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    torch.manual_seed(100 + rank)
    told = RankConfig(
        rank=rank,
        world_size=2,
        run="run",
        attempt=attempt,
        checkpoint_path=str(folder / "store"),
        checkpoint_local=disk,
        checkpoint_every_steps=EVERY,
    )
    chance = random.Random(attempt)
    mine = fault is not None and fault.rank == rank
    if mine and fault.kind == "load":
        dcp_io.read = dying(dcp_io.read, chance)
    seen = Seen()
    session = Session(model=model, optimizer=optimizer, state={"seen": seen}, config=told)
    for step in session.steps(STEPS):
        optimizer.zero_grad()
        for micro in session.micro_batches(2):
            batch = inputs(micro.samples)
            ((model(batch) - batch).square().mean() / 2).backward()
            seen.samples += micro.samples
        optimizer.step()
        if mine and step >= fault.step:
            inject(fault, step, disk, chance)
        session.commit()
    torch.save(([each.detach() for each in model.parameters()], seen.samples), folder / f"{rank}.pt")
    dist.destroy_process_group()


def inject(fault: Fault, step: int, disk: Path, chance: random.Random) -> None:
    if fault.kind in ("rank", "node", "load"):  # a load that began at step 0 read nothing
        die()
    if fault.kind == "save" and step == fault.step:
        manifest_file.write = dying(manifest_file.write, chance)
        tiered_storage.merge_files = (
            tiered_storage.merge_files if chance.random() < 0.5 else dying(tiered_storage.merge_files, chance)
        )
    if fault.kind == "full" and step == fault.step:
        fill(disk)
    if fault.kind == "full" and step == fault.step + EVERY + 1:  # a save was due meanwhile, and failed
        die()


def attempt_of(folder: Path, disks: list[Path], attempt: int, fault: Fault | None) -> list[int]:
    """Run both ranks to their end; kill the survivor when one has died, as an agent does."""
    pids = list[int]()
    for rank, disk in enumerate(disks):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                rank_of(folder, disk, rank, attempt, fault)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        pids.append(pid)
    doomed = fault.rank if fault else 0
    codes = {doomed: os.waitpid(pids[doomed], 0)[1]}
    if codes[doomed]:
        os.kill(pids[1 - doomed], signal.SIGKILL)
    codes[1 - doomed] = os.waitpid(pids[1 - doomed], 0)[1]
    return [os.waitstatus_to_exitcode(codes[rank]) for rank in range(2)]


def main(folder: Path, disks: list[Path], seed: int | None) -> None:
    planned = [] if seed is None else faults(seed)
    for attempt, fault in enumerate(planned):
        code = attempt_of(folder, disks, attempt, fault)[fault.rank]
        if code != -signal.SIGKILL:
            sys.exit(f"{fault}: exit code {code}")
        print("fault", *fault, flush=True)
        (disks[fault.rank] / "ballast").unlink(missing_ok=True)
        if fault.kind == "node":
            for left in disks[fault.rank].iterdir():
                shutil.rmtree(left)
    codes = attempt_of(folder, disks, len(planned), None)
    if codes != [0, 0]:
        sys.exit(f"exit codes {codes}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), [Path(each) for each in sys.argv[2:4]], int(sys.argv[4]) if sys.argv[4:] else None)
