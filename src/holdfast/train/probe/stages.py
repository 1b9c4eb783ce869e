"""Decides what the ranks probe next, and what the results mean; the coordinator, rank 0, runs it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Generator, Iterable, Mapping
from dataclasses import dataclass, field

import msgspec

from holdfast.events.probe_results import (
    AllReduceRate,
    DataParallelRates,
    DeviceRates,
    Located,
    MatmulRate,
    MiniModelAnswer,
    NodeAllReduce,
    PairRate,
    ProbeOutcome,
    ProbeResult,
    ProbeStage,
    ProbeSuspect,
    StorageRates,
)
from holdfast.metrics.devices import find_device
from holdfast.train.probe.pairing import Gates, Pair, below_median, disjoint, locate, pair_rounds, slow_or_failed


class Step(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What all ranks of some nodes do next."""

    number: int
    stage: ProbeStage
    nodes: tuple[int, ...]
    deadline_s: float
    """From when a rank reads it; the coordinator then continues without those that have not reported."""
    pairs: tuple[Pair, ...] = ()
    failed: bool = False
    """Of the last step: whether there are suspects."""


class Report(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A rank's results of a step; all empty: the step had nothing for it to do."""

    device: DeviceRates | None = None
    all_reduce: tuple[AllReduceRate, ...] = ()
    data_parallel: DataParallelRates | None = None
    storage: StorageRates | None = None
    problem: str = ""


Reports = Mapping[int, Report]
"""By rank; of those that reported in time."""

SHARES: dict[ProbeStage, float] = {
    ProbeStage.ARRIVE: 0.2,
    ProbeStage.MATMUL: 0.1,
    ProbeStage.MEMORY: 0.05,
    ProbeStage.NODE_ALL_REDUCE: 0.1,
    ProbeStage.PAIRS: 0.25,  # of all rounds together
    ProbeStage.ALL_REDUCE: 0.15,
    ProbeStage.STORAGE: 0.08,
}
"""Of the deadline, per stage; the rest is for reports that are late (`REPORT_GRACE`)."""
SHARE_OF_PEAK = 0.3
"""Of the vendor's figure (holdfast/metrics/devices.py): large products reach more than half of it on a healthy GPU."""
AGAIN = 2
"""Rounds in which slow pairs are measured again, as far as they are disjoint; the best measurement counts."""
REPORT_GRACE = 0.1
"""Share of a step's deadline for which the coordinator waits longer than the step may take."""


@dataclass(kw_only=True)
class Schedule:
    """The stages of one probe, as a dialogue: steps out, reports in."""

    nodes: int
    ranks_per_node: int
    deadline_s: float
    gates: Gates = field(default_factory=Gates)
    storage: bool = False
    """Whether checkpoints have a file system to measure."""
    _present: set[int] = field(default_factory=set[int])
    _absent: set[int] = field(default_factory=set[int])
    _suspects: list[ProbeSuspect] = field(default_factory=list[ProbeSuspect])
    _shared: bool = False
    _steps: int = 0

    def steps(self) -> Generator[Step, Reports, ProbeResult]:
        """Yields each step, receives its reports, and returns the result, which has no times."""
        self._present = set(range(self.nodes))
        yield from self._step(ProbeStage.ARRIVE)
        devices = yield from self._devices()
        within = yield from self._within_nodes()
        pairs = yield from self._pairs()
        over_all = yield from self._over_all()
        storage = yield from self._storage()
        ran = {
            ProbeStage.NODE_ALL_REDUCE: bool(within),
            ProbeStage.PAIRS: bool(pairs),
            ProbeStage.ALL_REDUCE: bool(over_all),
            ProbeStage.STORAGE: bool(storage),
        }
        return ProbeResult(
            rank=0,
            outcome=ProbeOutcome.FAILED if self._suspects else ProbeOutcome.PASSED,
            elapsed_s=0.0,
            suspects=tuple(self._suspects),
            devices=devices,
            node_all_reduce=tuple(
                NodeAllReduce(node=node, rates=first.all_reduce, data_parallel=first.data_parallel)
                for node, first in within.items()
            ),
            pairs=pairs,
            all_reduce=over_all,
            storage=storage,
            not_run=tuple(stage for stage, some in ran.items() if not some),
        )

    def _step(
        self, stage: ProbeStage, share: float = 1.0, pairs: tuple[Pair, ...] = ()
    ) -> Generator[Step, Reports, Reports]:
        """One step; nodes with a rank that does not report take no part in the next ones."""
        nodes = tuple(sorted(self._present))
        deadline_s = self.deadline_s * SHARES[stage] * share
        step = Step(number=self._steps, stage=stage, nodes=nodes, deadline_s=deadline_s, pairs=pairs)
        self._steps += 1
        reports = yield step
        for node in nodes:
            if missing := tuple(rank for rank in self._ranks_of(node) if rank not in reports):
                self._present.remove(node)
                self._absent.add(node)
                self._suspect(stage, (node,), missing, (f"no answer within {deadline_s:.3g} s",))
        return reports

    def _devices(self) -> Generator[Step, Reports, tuple[DeviceRates, ...]]:
        multiplied = yield from self._step(ProbeStage.MATMUL)
        self._name_devices(ProbeStage.MATMUL, multiplied)
        copied = yield from self._step(ProbeStage.MEMORY)
        self._name_devices(ProbeStage.MEMORY, copied)
        devices = {rank: report.device for rank, report in multiplied.items() if report.device}
        self._shared = any(device.shared for device in devices.values())
        copies = {rank: report.device for rank, report in copied.items() if report.device}
        for rank, copy in copies.items():
            if rank in devices:
                devices[rank] = msgspec.structs.replace(
                    devices[rank], copy_gb_s=copy.copy_gb_s, wrong_copies=copy.wrong_copies
                )
        return tuple(devices[rank] for rank in sorted(devices))

    def _name_devices(self, stage: ProbeStage, reports: Reports) -> None:
        devices = {rank: report.device for rank, report in reports.items() if report.device}
        rates: dict[str, dict[int, float]] = {}
        wrong: dict[int, list[str]] = {}
        for rank, device in devices.items():
            if device.copy_gb_s and not device.shared:
                rates.setdefault("memory copy, GB/s", {})[rank] = device.copy_gb_s
            for each in device.matmul:
                if too_slow := _far_below_peak(device, each):
                    wrong.setdefault(rank, []).append(too_slow)
                if not device.shared:
                    rates.setdefault(f"{each.dtype} products, TFLOP/s", {})[rank] = each.tflop_s
                if each.wrong:
                    wrong.setdefault(rank, []).append(
                        f"{each.wrong} of {each.products} {each.dtype} products are wrong"
                    )
            if device.mini_model and device.mini_model.contradictions:
                wrong.setdefault(rank, []).append("training the mini model again gives other weights")
            if device.wrong_copies:
                wrong.setdefault(rank, []).append(f"{device.wrong_copies} memory copies are wrong")
        for rank, evidence in unlike_answers({rank: each.mini_model for rank, each in devices.items()}).items():
            wrong.setdefault(rank, []).append(evidence)
        for what, by_rank in rates.items():
            for rank in below_median(by_rank, self.gates.share_of_median):
                others = _median([rate for other, rate in by_rank.items() if other != rank])
                wrong.setdefault(rank, []).append(f"{what}: {by_rank[rank]:.3g}, median of the others {others:.3g}")
        for rank, report in reports.items():
            if report.problem:
                wrong.setdefault(rank, []).append(report.problem)
        for rank, evidence in sorted(wrong.items()):
            named = f"{devices[rank].device}: " if rank in devices else ""
            node = self._node_of(rank)
            self._suspect(stage, (node,), (rank,), tuple(named + each for each in evidence))

    def _within_nodes(self) -> Generator[Step, Reports, dict[int, Report]]:
        """The reports of the nodes' first ranks."""
        if self.ranks_per_node == 1:
            return {}
        stage = ProbeStage.NODE_ALL_REDUCE
        reports = yield from self._step(stage)
        first = {node: reports.get(self._ranks_of(node)[0], Report()) for node in self._present}
        within = {node: report for node, report in first.items() if report.all_reduce}
        for node in sorted(self._present):
            if problems := {rank: reports[rank].problem for rank in self._ranks_of(node) if reports[rank].problem}:
                self._suspect(stage, (node,), tuple(problems), tuple(sorted(set(problems.values()))))
            elif any(each.wrong for each in first[node].all_reduce):
                self._suspect(stage, (node,), (), ("a sum is wrong",))
        bandwidth = {
            node: max(each.bus_gb_s for each in report.all_reduce)
            for node, report in within.items()
            if not self._shared
        }
        for node in below_median(bandwidth, self.gates.share_of_median):
            others = _median([rate for other, rate in bandwidth.items() if other != node])
            self._suspect(
                stage, (node,), (), (f"bus bandwidth {bandwidth[node]:.3g} GB/s, median of the others {others:.3g}",)
            )
        return within

    def _pairs(self) -> Generator[Step, Reports, tuple[PairRate, ...]]:
        rounds = pair_rounds(self.nodes)
        share = 1 / (len(rounds) + AGAIN)
        rates: list[PairRate] = []
        for pairs in rounds:
            present = tuple(pair for pair in pairs if self._present.issuperset(pair))
            rates += (yield from self._round(present, share)) if present else ()
        slow = [pair for pair, rate in slow_or_failed(rates, self.gates).items() if rate is not None]
        for _ in range(AGAIN):
            if again := disjoint(pair for pair in slow if self._present.issuperset(pair)):
                slow = [pair for pair in slow if pair not in again]
                rates = _best((*rates, *(yield from self._round(again, share))))
        located = locate(rates, self.gates, self._absent)
        self._name_located(located, rates)
        return tuple(rates)

    def _round(self, pairs: tuple[Pair, ...], share: float) -> Generator[Step, Reports, list[PairRate]]:
        reports = yield from self._step(ProbeStage.PAIRS, share, pairs)
        return [
            _pair_rate(pair, lane, [reports.get(self._ranks_of(node)[lane]) for node in pair])
            for pair in pairs
            for lane in range(self.ranks_per_node)
        ]

    def _name_located(self, located: Located, rates: list[PairRate]) -> None:
        bad = slow_or_failed(rates, self.gates)
        good = [each.gb_s for each in rates if each.gb_s is not None and each.nodes not in bad]
        beside = f"median of the good pairs {_median(good):.3g} GB/s" if good else "no pair is good"
        for nodes in ((node,) for node in located.nodes if node not in self._absent):
            self._suspect(ProbeStage.PAIRS, nodes, (), (*_described(bad, rates, set(nodes)), beside))
        for pair in located.pairs:
            self._suspect(ProbeStage.PAIRS, pair, (), (*_described([pair], rates, set(pair)), beside))
        if located.none_good:
            everyone = set(range(self.nodes))
            self._suspect(
                ProbeStage.PAIRS, tuple(sorted(self._present)), (), (*_described(bad, rates, everyone), beside)
            )

    def _over_all(self) -> Generator[Step, Reports, tuple[AllReduceRate, ...]]:
        """Without the nodes that are suspects, so that they neither stop it nor slow it down."""
        named = {node for each in self._suspects if len(each.nodes) == 1 for node in each.nodes}
        self._present -= named
        stage = ProbeStage.ALL_REDUCE
        if len(self._present) < 2 or any(len(each.nodes) > 1 for each in self._suspects):
            return ()
        reports = yield from self._step(stage)
        problems = {rank: report.problem for rank, report in reports.items() if report.problem}
        wrong = [rank for rank, report in reports.items() if any(each.wrong for each in report.all_reduce)]
        if problems or wrong:
            evidence = (*sorted(set(problems.values())), *(("a sum is wrong",) if wrong else ()))
            self._suspect(stage, tuple(sorted(self._present)), (*problems, *wrong), evidence)
        return next((report.all_reduce for _, report in sorted(reports.items())), ())

    def _storage(self) -> Generator[Step, Reports, tuple[StorageRates, ...]]:
        """Names the nodes whose file system refuses; a slow one is no node's fault alone."""
        if not self.storage or not self._present:
            return ()
        reports = yield from self._step(ProbeStage.STORAGE)
        for rank, report in sorted(reports.items()):
            if report.problem:
                self._suspect(ProbeStage.STORAGE, (self._node_of(rank),), (rank,), (report.problem,))
        return tuple(report.storage for _, report in sorted(reports.items()) if report.storage)

    def _suspect(
        self, stage: ProbeStage, nodes: tuple[int, ...], ranks: Iterable[int], evidence: tuple[str, ...]
    ) -> None:
        self._suspects.append(ProbeSuspect(stage=stage, nodes=nodes, ranks=tuple(sorted(ranks)), evidence=evidence))

    def _ranks_of(self, node: int) -> range:
        return range(node * self.ranks_per_node, (node + 1) * self.ranks_per_node)

    def _node_of(self, rank: int) -> int:
        return rank // self.ranks_per_node


def unlike_answers(answers: Mapping[int, MiniModelAnswer | None]) -> dict[int, str]:
    """Evidence on the ranks whose weights of the mini model are not those of most devices of equal arithmetic."""
    groups: dict[str, dict[int, str]] = {}
    for rank, answer in answers.items():
        if answer is not None:
            groups.setdefault(answer.arithmetic, {})[rank] = answer.digest
    found: dict[int, str] = {}
    for arithmetic, digests in groups.items():
        common, count = Counter(digests.values()).most_common(1)[0]
        if 2 * count > len(digests):
            for rank, digest in digests.items():
                if digest != common:
                    found[rank] = f"the mini model gives {digest}, and {common} on {count} other devices ({arithmetic})"
    return found


def _far_below_peak(device: DeviceRates, rate: MatmulRate) -> str:
    """Evidence of a device that is slow whatever the others are; empty if it is not, or not known."""
    known = find_device(device.device)
    peak = known.bf16 if known and rate.dtype == "bfloat16" else None
    if not peak or rate.tflop_s >= SHARE_OF_PEAK * peak:
        return ""
    return f"{rate.dtype} products, TFLOP/s: {rate.tflop_s:.3g}, below {SHARE_OF_PEAK:.0%} of its peak of {peak:g}"


def _pair_rate(pair: Pair, lane: int, ends: Collection[Report | None]) -> PairRate:
    """A lane's rate: that of its largest all-reduce. Both ends have the same, unless one was late."""
    points = [max(end.all_reduce, key=lambda each: each.size_bytes) for end in ends if end and end.all_reduce]
    problem = next((end.problem for end in ends if end and end.problem), "")
    if len(points) < len(ends):
        return PairRate(nodes=pair, lane=lane, problem=problem or "no answer")
    wrong = "a sum is wrong" if any(each.wrong for end in ends if end for each in end.all_reduce) else ""
    slowest = min(each.algorithm_gb_s for each in points)
    return PairRate(nodes=pair, lane=lane, gb_s=None if wrong else slowest, problem=wrong or problem)


def _best(rates: Iterable[PairRate]) -> list[PairRate]:
    """The best measurement of each lane of each pair."""
    best: dict[tuple[Pair, int], PairRate] = {}
    for each in rates:
        before = best.setdefault((each.nodes, each.lane), each)
        if (each.gb_s or 0.0) > (before.gb_s or 0.0):
            best[each.nodes, each.lane] = each
    return list(best.values())


def _described(bad: Collection[Pair], rates: list[PairRate], nodes: set[int]) -> list[str]:
    """A line for each of the bad pairs of some nodes, about its slowest lane."""
    lines: list[str] = []
    for pair in sorted(each for each in bad if not nodes.isdisjoint(each)):
        slowest = min((each for each in rates if each.nodes == pair), key=lambda each: each.gb_s or 0.0)
        figure = slowest.problem if slowest.gb_s is None else f"{slowest.gb_s:.3g} GB/s"
        lines.append(f"nodes {pair[0]} and {pair[1]}, local rank {slowest.lane}: {figure}")
    return lines


def _median(rates: list[float]) -> float:
    return sorted(rates)[(len(rates) - 1) // 2]
