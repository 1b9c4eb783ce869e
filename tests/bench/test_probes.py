"""The benches around the probe: what they make of its results."""

from __future__ import annotations

import msgspec
import pytest
from bench.gpu import probes, promises
from bench.probe_location import MOST_ROUNDS, NODES, RUNS, Outcome, Slow, outcome_of, plan, rounds_needed, summary
from bench.result_file import Result

from holdfast.events.probe_results import PairRate, ProbeOutcome, ProbeResult, ProbeStage, ProbeSuspect
from holdfast.train.probe.pairing import pair_rounds

# The shape of rank 0's last line on a node of two GPUs; the figures are made up.
TWO_GPUS = b"""{"type":"result","rank":0,"outcome":"passed","elapsed_s":21.4,"devices":[
{"rank":0,"node":0,"device":"NVIDIA H100 80GB HBM3 (cuda:0)","copy_gb_s":2610.0,"matmul":[
 {"dtype":"float32","tflop_s":51.0,"products":900},{"dtype":"bfloat16","tflop_s":640.0,"products":12000}]},
{"rank":1,"node":0,"device":"NVIDIA H100 80GB HBM3 (cuda:1)","copy_gb_s":2590.0,"matmul":[
 {"dtype":"float32","tflop_s":50.0,"products":880},{"dtype":"bfloat16","tflop_s":615.5,"products":11000,"wrong":1}]}],
"node_all_reduce":[{"node":0,"rates":[{"size_bytes":8,"time_s":1.9e-5,"algorithm_gb_s":0.0004,"bus_gb_s":0.0004},
 {"size_bytes":1073741824,"time_s":0.0026,"algorithm_gb_s":412.0,"bus_gb_s":412.0}]}],
"suspects":[{"stage":"matmul","nodes":[0],"ranks":[1],"evidence":["1 of 11000 bfloat16 products are wrong"]}]}"""
BF16 = probes.DTYPES["cuda"]
PAIRS = [pair for round_ in pair_rounds(NODES) for pair in round_]


def test_result_of_two_gpus_becomes_three_claims() -> None:
    found = {each.claim: each for each in probes.results(msgspec.json.decode(TWO_GPUS, type=ProbeResult), 2, BF16)}
    products, memory, reduced = (
        found[claim] for claim in (promises.PROBE_MATMUL, promises.PROBE_MEMORY, promises.PROBE_ALL_REDUCE)
    )
    assert (str(products.figure), products.met, products.details["in fp32"]) == ("615.5 TFLOP/s", "no", "50.0 TFLOP/s")
    assert "1 of 11000 bfloat16 products are wrong" in products.details["suspects"]
    assert (str(memory.figure), memory.met) == ("2,590 GB/s", "yes")
    assert (str(reduced.figure), reduced.details["smallest"]) == ("412.00 GB/s", "8 B in 19 µs")
    assert products.conditions == "2 × NVIDIA H100 80GB HBM3, 21 s for all probes"


def test_one_gpu_has_no_all_reduce() -> None:
    result = msgspec.json.decode(TWO_GPUS, type=ProbeResult)
    alone = msgspec.structs.replace(result, devices=result.devices[:1], node_all_reduce=(), suspects=())
    *measured, skipped = probes.results(alone, 1, BF16)
    assert [each.met for each in measured] == ["yes", "yes"]
    assert skipped.skipped == promises.TWO_GPUS


def test_probe_without_results_has_failed() -> None:
    with pytest.raises(RuntimeError, match="the store did not answer"):
        [
            *probes.results(
                ProbeResult(rank=0, outcome=ProbeOutcome.INCOMPLETE, elapsed_s=1, problem="the store did not answer"),
                1,
                BF16,
            )
        ]


def rates(slow: Slow) -> list[PairRate]:
    def of(pair: tuple[int, int]) -> float:
        return 0.2 if set(slow.nodes) <= set(pair) else 1.0

    return [PairRate(nodes=pair, gb_s=of(pair)) for pair in PAIRS]


@pytest.mark.parametrize("slow", plan(0, 20), ids=str)
def test_planned_fault_is_one_that_the_rounds_can_locate(slow: Slow) -> None:
    assert (rounds_needed(slow, rates(slow)) or 99) <= MOST_ROUNDS


def outcome(slow: Slow, *named: tuple[int, ...]) -> Outcome:
    suspects = tuple(ProbeSuspect(stage=ProbeStage.PAIRS, nodes=nodes) for nodes in named)
    result = ProbeResult(
        rank=0, outcome=ProbeOutcome.FAILED, elapsed_s=1.0, suspects=suspects, pairs=tuple(rates(slow))
    )
    return outcome_of(slow, result, 1.0)


def test_only_exactly_the_slow_one_counts_as_located() -> None:
    slow = Slow(nodes=(3,), mbit=20)
    right, wrong, more, none = outcome(slow, (3,)), outcome(slow, (4,)), outcome(slow, (3,), (4,)), outcome(slow)
    assert [each.found for each in (right, wrong, more, none)] == [True, False, False, False]
    assert [each.false_suspects for each in (right, wrong, more, none)] == [0, 1, 1, 0]
    assert summary([right] * RUNS).met == "yes"
    missed: Result = summary([right, wrong])
    assert (str(missed.figure), missed.met) == ("1 of 2", "no")
