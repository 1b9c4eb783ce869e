"""Runs the probes of one rank: the coordinator, rank 0, writes each step to the store, and every rank its report."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from holdfast.events.probe_results import (
    AllReduceRate,
    DataParallelRates,
    DeviceRates,
    ProbeLine,
    ProbeOutcome,
    ProbeProgress,
    ProbeResult,
    ProbeStage,
)
from holdfast.host.memory_usage import memory_usages
from holdfast.train.abortable_call import AbortableCall
from holdfast.train.probe import mini_model, storage
from holdfast.train.probe.all_reduce import PAIR_BYTES, SWEEP_BYTES, sweep
from holdfast.train.probe.matmul import burn_in, copy_rate
from holdfast.train.probe.process_groups import Channel, Connect
from holdfast.train.probe.stages import REPORT_GRACE, Report, Schedule, Step
from holdfast.train.probe.training_rates import training_rates

WORK_SHARE = 0.9
"""Of a step's deadline: the ranks then give up, and report that."""
MEASURE_SHARE = 0.4
"""Of a step's deadline: no all-reduce begins that is expected to end later; one that busy CPUs delay has the rest."""
MEMORY_SHARE = 0.1
"""Of a device's free memory, or of a node's divided by its ranks: Gloo needs as much again."""
COPY_S = 1.0
STORAGE_S = 4.0
CLOSE_S = 2.0
"""Seconds that a group has to close before the probe abandons it."""
FAREWELL_S = 2.0
"""Seconds that the coordinator, which may host the store, waits for the others to end."""
COORDINATOR_GRACE_S = 3.0
"""Seconds that a rank waits for the next step after the coordinator's own deadline."""

_step_decoder, _report_decoder = msgspec.json.Decoder(Step), msgspec.json.Decoder(Report)


@dataclass(frozen=True, kw_only=True, slots=True)
class RankPlace:
    """This rank among all. Ranks are numbered node by node, and every node has as many."""

    rank: int
    world_size: int
    local_world_size: int

    @property
    def node(self) -> int:
        return self.rank // self.local_world_size

    @property
    def local_rank(self) -> int:
        return self.rank % self.local_world_size

    def ranks_of(self, nodes: Iterable[int]) -> list[int]:
        """The ranks of some nodes."""
        local = range(self.local_world_size)
        return [node * self.local_world_size + each for node in nodes for each in local]


@dataclass(kw_only=True)
class RankProbe:
    """The probes of one rank."""

    place: RankPlace
    device: torch.device
    store: dist.Store
    connect: Connect
    emit: Callable[[ProbeLine], object]
    """Receives progress."""
    burn_in_s: float
    most_bytes: int
    """Of an all-reduce."""
    began: float
    """Monotonic seconds."""
    data_parallel: Callable[[str, int, int, float], DataParallelRates] | None = None
    """Measures DDP and FSDP2 in a group, given its name, this process's number, the size and a timeout."""
    folder: Path | None = None
    """A folder on the file system of checkpoints; None: there is none."""
    _device_rates: DeviceRates | None = field(default=None, init=False)

    def coordinate(self, schedule: Schedule) -> ProbeResult:
        """Run all steps as rank 0, and return the result of all ranks."""
        steps = schedule.steps()
        step = next(steps)
        arrived: set[int] = set()
        while True:
            self._publish(step)
            deadline = time.monotonic() + step.deadline_s * (1 + REPORT_GRACE)
            if self.place.node in step.nodes:
                self._report(step, self.perform(step))
            reports = self._collect(step, deadline)
            arrived |= reports.keys()
            try:
                step = steps.send(reports)
            except StopIteration as stopped:
                result: ProbeResult = stopped.value
                break
        everyone = tuple(range(self.place.world_size // self.place.local_world_size))
        end = Step(
            number=step.number + 1, stage=ProbeStage.END, nodes=everyone, deadline_s=0.0, failed=bool(result.suspects)
        )
        self._publish(end)
        with suppress(RuntimeError):  # some have died
            ended = [f"probe/ended/{rank}" for rank in arrived if rank != self.place.rank]
            self.store.wait(ended, timedelta(seconds=FAREWELL_S))
        return msgspec.structs.replace(result, elapsed_s=self._elapsed_s())

    def follow(self, arrive_s: float) -> ProbeResult:
        """Run the coordinator's steps, and return this rank's part of the result."""
        number, wait_s = 0, arrive_s
        while True:
            try:
                step = self._next_step(number, wait_s)
            except RuntimeError:
                return self._own_result(ProbeOutcome.INCOMPLETE, f"rank 0 sent no next step within {wait_s:.3g} s")
            if step.stage is ProbeStage.END:
                self.store.set(f"probe/ended/{self.place.rank}", "")
                return self._own_result(ProbeOutcome.FAILED if step.failed else ProbeOutcome.PASSED)
            if self.place.node in step.nodes:
                self._report(step, self.perform(step))
            number, wait_s = number + 1, step.deadline_s * (1 + REPORT_GRACE) + COORDINATOR_GRACE_S

    def perform(self, step: Step) -> Report:
        """What this rank does in a step, in at most WORK_SHARE of its deadline."""
        work = self._work(step)
        if work is None:
            return Report()
        try:
            return work()
        except TimeoutError:
            if self.device.type == "cpu":  # other processes use it too
                return Report()
            return Report(problem=f"not done within {step.deadline_s * WORK_SHARE:.3g} s")
        except Exception as error:  # a finding about this node, whatever it is
            return Report(problem=_described(error))

    def _work(self, step: Step) -> Callable[[], Report] | None:
        """The work of a step; None: this rank rests."""
        place = self.place
        peer: int | None = None
        match step.stage:
            case ProbeStage.MATMUL:
                work = self._burn_in
            case ProbeStage.MEMORY:
                work = self._copy
            case ProbeStage.NODE_ALL_REDUCE:
                work = partial(self._within_node, place.ranks_of([place.node]))
            case ProbeStage.ALL_REDUCE:
                work = self._all_reduces(place.ranks_of(step.nodes), SWEEP_BYTES)
            case ProbeStage.PAIRS:
                pair = next((pair for pair in step.pairs if place.node in pair), None)
                if pair is None:
                    return None
                peer = sum(pair) - place.node
                lane = [place.ranks_of([node])[place.local_rank] for node in pair]
                work = self._all_reduces(lane, PAIR_BYTES)
            case ProbeStage.STORAGE if self.folder is not None and place.local_rank == 0:
                work = partial(self._measure_storage, self.folder)
            case _:
                return None
        progress = ProbeProgress(
            rank=place.rank, stage=step.stage, elapsed_s=self._elapsed_s(), deadline_s=step.deadline_s, peer=peer
        )
        self.emit(progress)
        return lambda: work(step)

    def _burn_in(self, step: Step) -> Report:
        seconds = min(self.burn_in_s, step.deadline_s * MEASURE_SHARE)
        deadline_s = step.deadline_s * WORK_SHARE
        is_cpu = self.device.type == "cpu"
        rates, answer, training = AbortableCall().run(
            lambda: (
                burn_in(self.device, seconds),
                mini_model.answer(self.device),
                training_rates(seconds) if is_cpu else None,
            ),
            deadline_s,
        )
        self._device_rates = msgspec.structs.replace(
            self._own_device(), matmul=rates, mini_model=answer, training=training
        )
        return Report(device=self._device_rates)

    def _copy(self, step: Step) -> Report:
        seconds = min(COPY_S, self.burn_in_s, step.deadline_s * MEASURE_SHARE)
        copy_gb_s, wrong = AbortableCall().run(lambda: copy_rate(self.device, seconds), step.deadline_s * WORK_SHARE)
        rates = msgspec.structs.replace(self._own_device(), copy_gb_s=copy_gb_s, wrong_copies=wrong)
        self._device_rates = rates
        return Report(device=msgspec.structs.replace(rates, matmul=(), mini_model=None))

    def _measure_storage(self, folder: Path, step: Step) -> Report:
        seconds = min(STORAGE_S, step.deadline_s * MEASURE_SHARE)
        rates = AbortableCall().run(
            lambda: storage.measure(folder, self.place.node, seconds, nodes=len(step.nodes)),
            step.deadline_s * WORK_SHARE,
        )
        return Report(storage=rates)

    def _own_device(self) -> DeviceRates:
        shared = self.device.type == "cpu"
        name = "CPU" if shared else f"{torch.cuda.get_device_name(self.device)} ({self.device})"
        return self._device_rates or DeviceRates(rank=self.place.rank, node=self.place.node, device=name, shared=shared)

    def _within_node(self, ranks: Sequence[int], step: Step) -> Report:
        deadline = time.monotonic() + step.deadline_s * WORK_SHARE
        report = self._all_reduces(ranks, SWEEP_BYTES)(step)
        if self.data_parallel is None or report.problem:
            return report
        timeout_s = max(deadline - time.monotonic(), 0.01)
        group = f"{step.number}/{self.place.node}", ranks.index(self.place.rank), len(ranks), timeout_s
        with suppress(Exception):  # it says nothing about the node, and only predictions lack it
            rates = AbortableCall().run(partial(self.data_parallel, *group), timeout_s)
            return msgspec.structs.replace(report, data_parallel=rates)
        return report

    def _all_reduces(self, ranks: Sequence[int], sizes: Sequence[int]) -> Callable[[Step], Report]:
        """All-reduces among some ranks; a rank that does not answer costs no more than the step's deadline."""

        def work(step: Step) -> Report:
            rates: list[AllReduceRate] = []
            opened: list[Channel] = []
            deadline = time.monotonic() + step.deadline_s * MEASURE_SHARE

            def measure() -> None:
                timeout_s = step.deadline_s * WORK_SHARE
                index = ranks.index(self.place.rank)
                channel = self.connect(f"{step.number}/{ranks[0]}-{ranks[-1]}", index, len(ranks), timeout_s)
                opened.append(channel)
                most_bytes = min(self.most_bytes, self._memory_bytes())
                for rate in sweep(channel, sizes, deadline - time.monotonic(), most_bytes):
                    rates.append(rate)  # each counts, even if the next one fails

            problem = ""
            try:
                AbortableCall().run(measure, step.deadline_s * WORK_SHARE)
            except TimeoutError:
                others = ", ".join(str(rank) for rank in ranks if rank != self.place.rank)
                problem = f"no answer from rank {others} within {step.deadline_s * WORK_SHARE:.3g} s"
            except Exception as error:  # a finding about the link, whatever it is
                problem = _described(error)
            for channel in opened:
                with suppress(Exception):
                    AbortableCall().run(channel.abort, min(CLOSE_S, step.deadline_s * REPORT_GRACE))
            return Report(all_reduce=tuple(rates), problem=problem)

        return work

    def _memory_bytes(self) -> float:
        if self.device.type == "cuda":
            return MEMORY_SHARE * torch.cuda.mem_get_info(self.device)[0]
        free_bytes = min(each.free_bytes for each in memory_usages())
        return MEMORY_SHARE * free_bytes / self.place.local_world_size

    def _publish(self, step: Step) -> None:
        self.store.set(f"probe/step/{step.number}", msgspec.json.encode(step).decode())

    def _next_step(self, number: int, wait_s: float) -> Step:
        key = f"probe/step/{number}"
        self.store.wait([key], timedelta(seconds=wait_s))
        return _step_decoder.decode(self.store.get(key))

    def _report(self, step: Step, report: Report) -> None:
        self.store.set(f"probe/report/{step.number}/{self.place.rank}", msgspec.json.encode(report).decode())

    def _collect(self, step: Step, deadline: float) -> dict[int, Report]:
        """The reports that come in time."""
        keys = {rank: f"probe/report/{step.number}/{rank}" for rank in self.place.ranks_of(step.nodes)}
        remaining_s = max(deadline - time.monotonic(), 0.01)
        with suppress(RuntimeError):  # some have not come
            self.store.wait(list(keys.values()), timedelta(seconds=remaining_s))
        there = {rank: key for rank, key in keys.items() if self.store.check([key])}
        return {rank: _report_decoder.decode(self.store.get(key)) for rank, key in there.items()}

    def _own_result(self, outcome: ProbeOutcome, problem: str = "") -> ProbeResult:
        devices = (self._device_rates,) if self._device_rates else ()
        return ProbeResult(
            rank=self.place.rank, outcome=outcome, elapsed_s=self._elapsed_s(), problem=problem, devices=devices
        )

    def _elapsed_s(self) -> float:
        return time.monotonic() - self.began


def _described(error: Exception) -> str:
    """An error's first line, without the stack that torch appends."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0][:300]}"
