"""Replicas for tests, with ranks forked from a process with torch; each records the samples of its steps in a file.

Faults, each `replica:step:moment`, kill a replica in its first incarnation: `computing` (before it makes the gradients
of that step), `agreed` (the optimizer has stepped, the step is not committed), `giving` (when another is about to take
its state, at that step or later), `saving` (while it computes the next step, and the files of that step's checkpoint
are written) and `sealing` (the same, and only its manifest is missing). Of several ranks the last is killed. All begin
together; the last steps wait until the killed replicas have returned.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # an optimizer would import it in every rank
import torch.distributed as dist
from tests.programs import nccl_like
from tests.train.fork_context import forks
from torch.amp.grad_scaler import GradScaler
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torchft.coordination import LighthouseServer
from torchft.manager import Manager

from holdfast.protocol.rank_messages import ReplicaDown, encode
from holdfast.train import Session
from holdfast.train.checkpoint import manifest_file
from holdfast.train.checkpoint.manifest_file import Manifest
from holdfast.train.checkpoint.writer_fence import WriterFence
from holdfast.train.ft import live_recovery

GLOBAL = 24
"""Samples of a step: divisible by one, two and three replicas."""
DEADLINE_S = 200.0
DYING = {"computing", "agreed", "saving", "sealing"}
"""Each at a separate step, so that the step of their return is known."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """The configuration of all replicas."""

    out: Path
    steps: int
    count: int
    ranks: int = 1
    """Ranks of each replica; more than one shard the model among them (FSDP2)."""
    faults: tuple[str, ...] = ()
    scales: bool = False
    """Whether a step has fewer samples where replicas are missing."""
    checkpoints: bool = False
    tiers: bool = False
    """Whether each replica saves on its local disk first."""
    nccl_like: bool = False
    """Whether replicas, and the ranks of each, communicate by a group that fails like NCCL."""
    unsendable: bool = False
    """Whether the survivors' state cannot be pickled once they have made a step: those that return fail."""
    lighthouse: str = ""

    @property
    def survivors(self) -> set[int]:
        return {each for each in range(self.count) if not self.faults_of(each)}

    def faults_of(self, replica: int) -> dict[str, int]:
        """The step of each moment."""
        each = (fault.split(":") for fault in self.faults)
        return {moment: int(step) for of, step, moment in each if int(of) == replica}


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def wait_for(out: Path, marks: Collection[str]) -> None:
    """Wait until others have made these files: dead replicas leave theirs behind."""
    deadline = time.monotonic() + DEADLINE_S
    while not all((out / mark).exists() for mark in marks):
        assert time.monotonic() < deadline, marks
        time.sleep(0.005)


def die_in_its_save(job: Job, replica: int) -> None:
    """Make this process die while it saves, at its fault, once it computes the next step."""
    fault = job.faults_of(replica)
    write, commit = manifest_file.write, WriterFence.commit
    dead = [f"{each}.dead" for each in range(job.count) if job.faults_of(each)]

    def written(folder: Path, manifest: Manifest) -> None:
        if fault.get("saving") == manifest.step:
            wait_for(job.out, dead)
            die()
        write(folder, manifest)

    def committed(fence: WriterFence, final: Path) -> None:
        if f"{final.name}".endswith(f"-{fault.get('sealing', 0):08d}"):
            wait_for(job.out, dead)
            die()
        commit(fence, final)

    manifest_file.write, WriterFence.commit = written, committed


class Agents:
    """Report lost replicas to the ranks of the others; nothing else does, if they communicate as by NCCL."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="agents"))  # a socket's path is short
        self._listening: dict[int, list[socket.socket]] = {}
        self._connected: dict[int, list[socket.socket]] = {}

    def listen(self, replica: int, life: int, rank: int) -> str:
        """The path of a new rank's socket."""
        path = self._folder / f"{replica}.{life}.{rank}"
        listening = socket.socket(socket.AF_UNIX)
        listening.bind(str(path))
        listening.listen()
        listening.setblocking(False)
        self._listening.setdefault(replica, []).append(listening)
        return str(path)

    def report_lost(self, replica: int, life: int) -> None:
        self._listening.pop(replica, None)
        self._connected.pop(replica, None)
        for other, listeners in self._listening.items():
            connected = self._connected.setdefault(other, [])
            for listener in listeners:
                with suppress(BlockingIOError):
                    while True:
                        connected.append(listener.accept()[0])
            for each in connected:
                with suppress(ConnectionError):  # of a rank that has died too
                    each.sendall(encode(ReplicaDown(replica=replica, attempt=life)) + b"\n")

    def close(self) -> None:
        shutil.rmtree(self._folder)


def rank_of(job: Job, replica: int, life: int, rank: int, agent: str) -> None:
    torch.set_num_threads(1)
    os.environ |= {
        "HOLDFAST_REPLICA": str(replica),
        "HOLDFAST_REPLICA_COUNT": str(job.count),
        "HOLDFAST_ATTEMPT": str(life),
        "HOLDFAST_BATCH_WORLD_SIZE": "" if job.scales else str(job.count * job.ranks),
        "RANK": str(rank),
        "WORLD_SIZE": str(job.ranks),
        "TORCHFT_LIGHTHOUSE": job.lighthouse,
        "MASTER_ADDR": "localhost",
        "HOLDFAST_RANK_SOCKET": agent,
    }
    if job.nccl_like:
        nccl_like.install()
    if job.checkpoints:
        os.environ |= {"HOLDFAST_CHECKPOINT_PATH": str(job.out / "kept"), "HOLDFAST_CHECKPOINT_EVERY_STEPS": "2"}
    if job.tiers:
        os.environ["HOLDFAST_CHECKPOINT_LOCAL"] = str(job.out / f"disk-{replica}")
    fault = job.faults_of(replica) if life == 0 and rank == job.ranks - 1 else {}
    if life and job.survivors:  # to test that they work without it
        wait_for(job.out, [f"{step}.done" for step in job.faults_of(replica).values()])
    with (job.out / f"{replica}.{life}.{rank}.err").open("w") as errors:
        os.dup2(errors.fileno(), sys.stderr.fileno())
    if job.ranks > 1:
        backend = nccl_like.register() if job.nccl_like else "gloo"
        dist.init_process_group(backend, f"file://{job.out}/meet.{replica}.{life}", None, job.ranks, rank)
    if fault:
        die_in_its_save(job, replica)
    train(job, replica, life, rank, fault, asked=counted(job.out / f"{replica}.{life}.asks"))


def counted(mark: Path) -> Callable[[], int]:
    """How often this process has called the quorum service so far; the first time it makes a file."""
    ask, calls = Manager.start_quorum, list[None]()

    def counting(*given: object, **named: object) -> None:
        calls.append(None)
        mark.touch()
        ask(*given, **named)

    Manager.start_quorum = counting
    return lambda: len(calls)


def train(job: Job, replica: int, life: int, rank: int, fault: dict[str, int], asked: Callable[[], int]) -> None:
    torch.manual_seed(replica * 100 + life)  # different weights, so that the session has to make them equal
    model = torch.nn.Sequential(torch.nn.Linear(4, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    model.register_buffer("begun", torch.zeros(()))  # changed like BatchNorm's buffers: before the commit decision
    if job.ranks > 1:
        model = fully_shard(model, mesh=init_device_mesh("cpu", (job.ranks,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.9)
    scaler = GradScaler("cpu", growth_interval=3)
    session = Session(model=model, optimizer=optimizer, scheduler=scheduler, state={"scaler": scaler})
    if job.nccl_like:
        # As a program that reads from its device, such as `loss.item()`, while gradients are on their way.
        for each in model.parameters():
            each.register_post_accumulate_grad_hook(lambda _: nccl_like.synchronize())
    if "giving" in fault:
        lend = live_recovery.export_state
        live_recovery.export_state = lambda given: die() if session.step + 1 >= fault["giving"] else lend(given)
    if job.unsendable:
        lend = live_recovery.export_state
        live_recovery.export_state = lambda given: lend(given) | ({"hook": lambda: None} if session.step else {})
    (job.out / f"{replica}.{life}.there").touch()
    all_begin = life == 0 or not job.survivors
    together = [each for each in range(job.count) if all_begin or job.faults_of(each) == job.faults_of(replica)]
    wait_for(job.out, [f"{each}.{life}.there" for each in together])
    with (job.out / f"{replica}.{life}.{rank}.jsonl").open("w", buffering=1) as told:
        for step in session.steps(job.steps):
            back = [each for each in range(job.count) if DYING & job.faults_of(each).keys()]
            back += [each for each in range(job.count) if job.faults_of(each) and step == job.steps - 1]
            if step >= job.steps - 4:
                wait_for(job.out, [f"{each}.1.asks" for each in back])
            taken: list[int] = []
            model.begun += 1
            for micro in session.micro_batches(GLOBAL // job.count // job.ranks):
                if step == fault.get("computing"):
                    (job.out / f"{replica}.dead").touch()
                    die()
                if step - 1 in {fault.get("saving"), fault.get("sealing")}:
                    (job.out / f"{replica}.dead").touch()
                    signal.pause()
                inputs = torch.tensor([[n % 7, n % 11, n % 13, 1.0] for n in micro.samples])
                loss = (model(inputs) - inputs.sum(1, keepdim=True).sin()).square().mean()
                scaler.scale(loss * micro.loss_scale).backward()
                taken += micro.samples if micro.loss_scale else ()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scheduler.step()
            if fault.get("agreed") == step:
                told.write(json.dumps({"step": step, "counts": True, "samples": taken}) + "\n")
                die()
            session.commit(loss=loss)
            line = {"step": step, "counts": session.step == step, "samples": taken, "asked": asked()}
            told.write(json.dumps(line) + "\n")
            if session.step == step:
                (job.out / f"{step}.done").touch()
    state = [*model.state_dict().values(), *(each for of in optimizer.state.values() for each in of.values())]
    state = [each.to_local() if isinstance(each, DTensor) else each for each in state]
    assert model.begun == job.steps, "a step that did not count has left its mark"
    torch.save(
        (state, (scheduler.state_dict()["_last_lr"], scaler.state_dict()), session.step),
        job.out / f"{replica}.{rank}.end",
    )
    if dist.is_initialized():
        dist.destroy_process_group()


def lighthouse_of(telling: Connection) -> None:
    """TorchFT's Lighthouse, which declares a replica dead after a second without a heartbeat."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    server = LighthouseServer(
        bind="[::]:0", min_replicas=1, join_timeout_ms=60_000, quorum_tick_ms=10, heartbeat_timeout_ms=1000
    )
    telling.send(server.address())
    telling.poll(None)  # until the requester is gone


def answer(ours: Connection, theirs: Connection) -> Any:
    """What a forked process sends first; EOFError if it ends before."""
    theirs.close()  # it is open in that process
    assert ours.poll(DEADLINE_S), "no answer"
    return ours.recv()


def run(job: Job) -> None:
    """The whole job; a killed replica is restarted, as holdfast does it."""
    ours, theirs = forks.Pipe()
    lighthouse = forks.Process(target=lighthouse_of, args=(theirs,), daemon=True)
    lighthouse.start()
    job = Job(**{**vars(job), "lighthouse": answer(ours, theirs)})
    replicas: dict[tuple[int, int], list[BaseProcess]] = {}
    agents = Agents() if job.nccl_like else None

    def start(replica: int, life: int) -> None:
        places = [agents.listen(replica, life, rank) if agents else "" for rank in range(job.ranks)]
        ranks = [
            forks.Process(target=rank_of, args=(job, replica, life, rank, place)) for rank, place in enumerate(places)
        ]
        replicas[replica, life] = ranks
        for each in ranks:
            each.start()

    try:
        for replica in range(job.count):
            start(replica, 0)
        while True:
            # read once a round: the next round sees a death within this one, for its sentinel ends the wait
            codes = {each: each.exitcode for ranks in replicas.values() for each in ranks}
            lost = [key for key, ranks in replicas.items() if any(codes[each] == -signal.SIGKILL for each in ranks)]
            for (replica, life), ranks in replicas.items():
                for rank, each in enumerate(ranks):
                    told = job.out / f"{replica}.{life}.{rank}.err"
                    fails = (replica, life) in lost or (job.unsendable and life > 0)
                    assert fails or codes[each] in {None, 0}, told.read_text()
            for replica, life in (key for key in lost if (key[0], key[1] + 1) not in replicas):
                for each in replicas[replica, life]:
                    each.kill()
                    each.join()
                if agents:
                    agents.report_lost(replica, life)
                start(replica, life + 1)
            living = [each for ranks in replicas.values() for each in ranks if codes.get(each) is None]
            if not living:
                break
            assert wait([each.sentinel for each in living], DEADLINE_S), f"stuck: {living}"
    finally:
        for process in (lighthouse, *(each for ranks in replicas.values() for each in ranks)):
            if process.pid is not None:
                process.kill()
                process.join()
        if agents:
            agents.close()
