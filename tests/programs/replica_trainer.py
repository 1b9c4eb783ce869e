"""A small training program of several replicas for tests: `replica_trainer.py STEP_S OUT`.

Its Session keeps the replicas in step through TorchFT. It runs until a while after the file OUT/enough was created; at
the end each replica's weights are in OUT/REPLICA.end. OUT/REPLICA.ATTEMPT.commits has the time of each commit of an
attempt, with a digest of the weights and the samples. With SLOW_S it takes that many seconds to save a checkpoint, and
again to end. With NCCL_LIKE=1 the replicas communicate by a group that fails like NCCL (nccl_like.py).

DIES names moments at which an attempt of a replica is killed, `REPLICA.ATTEMPT:MOMENT` each: `computing` (in its first
step, before it has made the gradients), `saving` (before a checkpoint has its manifest), `giving` (when another is
about to take its state; only the first of those named), `leaving` (before it has transferred its state), and `meeting`
(when it is about to take a step with others, who then connect to it). One that is `starting` does not die: it never
opens its Session. FLIPS, as `REPLICA.ATTEMPT/STEP`, names a step after which one of its weights has a wrong bit.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from holdfast.train import Session
from holdfast.train.checkpoint import manifest_file
from holdfast.train.ft import abortable_pg, live_recovery, memory_snapshot

STEP_S, OUT = float(sys.argv[1]), Path(sys.argv[2])
REPLICA, ATTEMPT = os.environ["HOLDFAST_REPLICA"], os.environ["HOLDFAST_ATTEMPT"]
SLOW_S = float(os.environ.get("SLOW_S", "0"))
COUNT = int(os.environ["HOLDFAST_REPLICA_COUNT"])
DIES = {
    moment
    for who, _, moment in (word.partition(":") for word in os.environ.get("DIES", "").split())
    if who == f"{REPLICA}.{ATTEMPT}"
}
FLIPS_AFTER = os.environ.get("FLIPS", "").removeprefix(f"{REPLICA}.{ATTEMPT}/")
MORE = 20
"""Minimum of steps after it is enough, so that every replica knows the last one before reaching it; the last
is a multiple of it.
"""


def is_last(step: int) -> bool:
    """Whether to end with this step: the first replica that sees the file chooses the last step for all."""
    last = OUT / "last"
    if (OUT / "enough").exists() and not last.exists():
        mine = OUT / f"last-{REPLICA}"
        mine.write_text(str((step // MORE + 2) * MORE))
        with suppress(FileExistsError):
            os.link(mine, last)
    return last.exists() and step >= int(last.read_text())


def digest(model: torch.nn.Module) -> int:
    return zlib.crc32(b"".join(each.detach().numpy().tobytes() for each in model.parameters()))


def slowly(write: Callable[..., object]) -> Callable[..., object]:
    def slow(*given: Any, **named: Any) -> object:
        time.sleep(SLOW_S)
        return write(*given, **named)

    return slow


def die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def arm(session: Session) -> None:
    """Make this process die at its moment in the Session."""
    if "saving" in DIES:
        manifest_file.write = die
    if "meeting" in DIES:
        abortable_pg.AbortableGroup.configure = die
    if "leaving" in DIES:
        memory_snapshot.write = die
    if "giving" in DIES:
        lend = live_recovery.export_state

        def give(training: Any) -> Any:
            # Before the first step one replica sends the others the initial state.
            if session.step > 0:
                with suppress(FileExistsError):
                    (OUT / "given").touch(exist_ok=False)
                    die()
            return lend(training)

        live_recovery.export_state = give


def main() -> None:
    if os.environ.get("NCCL_LIKE") == "1":
        import nccl_like  # imported here: tests copy this file alone

        nccl_like.install()
    manifest_file.write = slowly(manifest_file.write)
    torch.set_num_threads(1)
    torch.manual_seed(int(REPLICA))
    model = torch.nn.Sequential(torch.nn.Linear(4, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    while "starting" in DIES:
        signal.pause()
    session = Session(model=model, optimizer=optimizer)
    arm(session)
    with (OUT / f"{REPLICA}.{ATTEMPT}.commits").open("w", buffering=1) as commits:
        for step in session.steps(10**9):
            samples: list[int] = []
            if "computing" in DIES:
                die()
            for micro in session.micro_batches(6 // COUNT):
                inputs = torch.tensor([[n % 7, n % 11, n % 13, 1.0] for n in micro.samples])
                loss = (model(inputs) - inputs.sum(1, keepdim=True).sin()).square().mean()
                (loss * micro.loss_scale).backward()
                samples += micro.samples if micro.loss_scale else ()
            time.sleep(STEP_S)
            optimizer.step()
            optimizer.zero_grad()
            if str(step) == FLIPS_AFTER:
                model[0].weight.detach().view(torch.int32)[0, 0] ^= 1 << 12
            session.commit(loss=loss)
            if session.step == step:
                taken = ",".join(map(str, samples))
                commits.write(f"{step} {time.time()!r} {digest(model)} {taken}\n")
                if is_last(step):
                    break
    time.sleep(SLOW_S)
    torch.save((session.step, model.state_dict()), OUT / f"{REPLICA}.end")


if __name__ == "__main__":
    main()
