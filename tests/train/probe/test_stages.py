"""The coordinator's schedule, with reports that a simulated fabric makes: no torch, no processes."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import pytest

from holdfast.events.probe_results import (
    AllReduceRate,
    DeviceRates,
    MatmulRate,
    ProbeOutcome,
    ProbeResult,
    ProbeStage,
    StorageRates,
)
from holdfast.train.probe.pairing import Gates
from holdfast.train.probe.stages import REPORT_GRACE, SHARES, Report, Schedule, Step

LOCAL = 2
DEADLINE_S = 100.0


def all_reduce(gb_s: float, *, wrong: bool = False) -> tuple[AllReduceRate, ...]:
    return (AllReduceRate(size_bytes=1 << 20, time_s=1.0, algorithm_gb_s=gb_s, bus_gb_s=gb_s, wrong=wrong),)


@dataclass
class Fabric:
    """Ranks that answer as their faults have it."""

    nodes: int = 4
    local: int = LOCAL
    tflop_s: dict[int, float] = field(default_factory=dict)
    wrong_products: dict[int, int] = field(default_factory=dict)
    copy_gb_s: dict[int, float] = field(default_factory=dict)
    node_gb_s: dict[int, float] = field(default_factory=dict)
    pair_gb_s: Callable[[tuple[int, int]], float | None] = lambda _: 40.0
    dead_from: dict[int, ProbeStage] = field(default_factory=dict)
    """By rank."""
    shared: bool = False
    name: str = "GPU"
    dtype: str = "float32"
    storage: bool = False
    steps: list[Step] = field(default_factory=list)

    def run(self, gates: Gates | None = None) -> ProbeResult:
        schedule = Schedule(
            nodes=self.nodes,
            ranks_per_node=self.local,
            deadline_s=DEADLINE_S,
            gates=gates or Gates(),
            storage=self.storage,
        ).steps()
        step = next(schedule)
        while True:
            self.steps.append(step)
            try:
                step = schedule.send(self.reports(step))
            except StopIteration as ended:
                return ended.value

    def reports(self, step: Step) -> dict[int, Report]:
        ranks = [node * self.local + each for node in step.nodes for each in range(self.local)]
        order = list(ProbeStage)
        alive = [
            rank
            for rank in ranks
            if rank not in self.dead_from or order.index(step.stage) < order.index(self.dead_from[rank])
        ]
        return {rank: self.report(step, rank, alive) for rank in alive}

    def report(self, step: Step, rank: int, alive: Collection[int]) -> Report:
        node = rank // self.local
        match step.stage:
            case ProbeStage.MATMUL:
                products = MatmulRate(
                    dtype=self.dtype,
                    tflop_s=self.tflop_s.get(rank, 50.0),
                    products=9,
                    wrong=self.wrong_products.get(rank, 0),
                )
                return Report(device=self.device(rank, matmul=(products,)))
            case ProbeStage.MEMORY:
                return Report(device=self.device(rank, copy_gb_s=self.copy_gb_s.get(rank, 3000.0)))
            case ProbeStage.NODE_ALL_REDUCE:
                return Report(all_reduce=all_reduce(self.node_gb_s.get(node, 400.0)))
            case ProbeStage.PAIRS:
                pair = next((pair for pair in step.pairs if node in pair), None)
                if pair is None:
                    return Report()
                peer = (sum(pair) - node) * self.local + rank % self.local
                rate = self.pair_gb_s(pair)
                if rate is None or peer not in alive:
                    return Report(problem=f"no answer from rank {peer}")
                return Report(all_reduce=all_reduce(rate))
            case ProbeStage.STORAGE:
                rates = StorageRates(
                    node=node, folder="/data", write_mb_s=900.0, read_mb_s=2e3, sync_s=0.01, files_per_s=1e3
                )
                return Report(storage=rates) if rank % self.local == 0 else Report()
            case _:
                return Report(all_reduce=all_reduce(30.0))

    def device(self, rank: int, **rates) -> DeviceRates:
        return DeviceRates(rank=rank, node=rank // self.local, device=self.name, shared=self.shared, **rates)


def suspects(result: ProbeResult) -> set[tuple[ProbeStage, tuple[int, ...], tuple[int, ...]]]:
    return {(each.stage, each.nodes, each.ranks) for each in result.suspects}


@pytest.mark.parametrize("nodes", [1, 2, 3, 8])
def test_healthy_nodes_pass_all_stages_in_order(nodes: int) -> None:
    fabric = Fabric(nodes=nodes, storage=True)
    result = fabric.run()
    assert (result.outcome, result.suspects) == (ProbeOutcome.PASSED, ())
    order = list(ProbeStage)
    stages = [order.index(step.stage) for step in fabric.steps]
    assert stages == sorted(stages)
    assert [step.number for step in fabric.steps] == list(range(len(stages)))
    assert len(result.devices) == nodes * LOCAL
    assert all(each.matmul and each.copy_gb_s for each in result.devices)
    assert result.not_run == (() if nodes > 1 else (ProbeStage.PAIRS, ProbeStage.ALL_REDUCE))
    assert [each.node for each in result.storage] == [*range(nodes)]


@pytest.mark.parametrize("nodes", [2, 8, 64])
def test_all_steps_together_fit_the_deadline(nodes: int) -> None:
    bad = 1
    fabric = Fabric(nodes=nodes, pair_gb_s=lambda pair: 4.0 if bad in pair else 40.0)
    fabric.run()
    assert sum(step.deadline_s for step in fabric.steps) * (1 + REPORT_GRACE) <= DEADLINE_S
    assert set(SHARES) == {*ProbeStage} - {ProbeStage.END}


def test_device_with_a_wrong_product_is_named() -> None:
    result = Fabric(wrong_products={5: 2}).run()
    assert suspects(result) == {(ProbeStage.MATMUL, (2,), (5,))}
    assert result.suspects[0].evidence == ("GPU: 2 of 9 float32 products are wrong",)
    assert result.outcome is ProbeOutcome.FAILED


def test_device_slower_than_the_others_is_named_unless_it_is_shared() -> None:
    faults = {"tflop_s": {3: 20.0}, "copy_gb_s": {0: 1000.0}, "node_gb_s": {2: 100.0}}
    assert suspects(Fabric(**faults).run()) == {
        (ProbeStage.MATMUL, (1,), (3,)),
        (ProbeStage.MEMORY, (0,), (0,)),
        (ProbeStage.NODE_ALL_REDUCE, (2,), ()),
    }
    assert Fabric(**faults, shared=True).run().suspects == ()


@pytest.mark.parametrize("stage", [each for each in ProbeStage if each is not ProbeStage.END])
def test_rank_that_stops_answering_is_named_and_the_others_continue(stage: ProbeStage) -> None:
    fabric = Fabric(nodes=8, dead_from={6: stage}, storage=True)
    result = fabric.run()
    assert suspects(result) == {(stage, (3,), (6,))}
    last = fabric.steps[-1]
    assert last.stage is ProbeStage.STORAGE
    assert (3 in last.nodes) == (stage is ProbeStage.STORAGE)


@pytest.mark.parametrize("rate", [None, 4.0])
@pytest.mark.parametrize("nodes", [3, 4, 8])
def test_slow_or_silent_node_is_located_and_left_out_of_the_sweep(nodes: int, rate: float | None) -> None:
    fabric = Fabric(nodes=nodes, pair_gb_s=lambda pair: rate if 1 in pair else 40.0)
    result = fabric.run()
    assert suspects(result) == {(ProbeStage.PAIRS, (1,), ())}
    assert result.suspects[0].evidence[-1] == "median of the good pairs 40 GB/s"
    assert (fabric.steps[-1].stage, fabric.steps[-1].nodes) == (
        ProbeStage.ALL_REDUCE,
        tuple(node for node in range(nodes) if node != 1),
    )


def test_pair_that_is_slow_once_is_measured_again_and_passes() -> None:
    seen: list[tuple[int, int]] = []

    def rate(pair: tuple[int, int]) -> float:
        seen.append(pair)
        return 4.0 if pair == (0, 1) and seen.count(pair) <= 2 * LOCAL else 40.0

    assert Fabric(pair_gb_s=rate).run().suspects == ()
    assert seen.count((0, 1)) == 4 * LOCAL


def test_link_that_stays_slow_is_named() -> None:
    result = Fabric(pair_gb_s=lambda pair: 4.0 if pair == (0, 1) else 40.0).run()
    assert suspects(result) == {(ProbeStage.PAIRS, (0, 1), ())}
    assert result.suspects[0].evidence[0] == "nodes 0 and 1, local rank 0: 4 GB/s"
    assert ProbeStage.ALL_REDUCE in result.not_run


def test_fabric_below_the_absolute_gate_names_all_nodes() -> None:
    result = Fabric().run(Gates(least_gb_s=100.0))
    assert suspects(result) == {(ProbeStage.PAIRS, (0, 1, 2, 3), ())}


@pytest.mark.parametrize(("name", "slow"), [("NVIDIA H100 80GB HBM3 (cuda:0)", True), ("NVIDIA T400 (cuda:0)", False)])
def test_devices_that_are_all_slow_are_compared_with_the_vendor_s_figure(name: str, slow: bool) -> None:
    fabric = Fabric(nodes=1, name=name, dtype="bfloat16", tflop_s=dict.fromkeys(range(LOCAL), 200.0))
    assert suspects(fabric.run()) == ({(ProbeStage.MATMUL, (0,), (rank,)) for rank in range(LOCAL)} if slow else set())
