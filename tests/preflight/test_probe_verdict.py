"""What follows from a probe's result: who is replaced, and what ends the run."""

from __future__ import annotations

import msgspec
import pytest

from holdfast.events import NodeProbed
from holdfast.events.probe_results import (
    PairRate,
    ProbeOutcome,
    ProbeResult,
    ProbeStage,
    ProbeSuspect,
    StorageRates,
    keep_slowest,
)
from holdfast.findings import CheckOutcome, Severity
from holdfast.preflight.probe_verdict import CHECKS, ProbeVerdict, judge, pair_rates, probe_results

NODES = (4, 7, 9)
NEW = frozenset(NODES)


def reports(*suspects: ProbeSuspect, nodes: tuple[int, ...] = NODES, **first: object) -> list[NodeProbed]:
    outcome = ProbeOutcome.FAILED if suspects else ProbeOutcome.PASSED
    result = ProbeResult(
        rank=0, outcome=outcome, elapsed_s=9.0, suspects=suspects, not_run=(ProbeStage.NODE_ALL_REDUCE,)
    )
    given: dict[str, object] = {"result": result} | first
    others = [NodeProbed(at=1.0, node=node, generation=0, replica=0, number=1, port=1, nodes=nodes) for node in nodes]
    return [msgspec.structs.replace(others[0], **given), *others[1:]]


def suspect(stage: ProbeStage, *nodes: int) -> ProbeSuspect:
    return ProbeSuspect(stage=stage, nodes=nodes, ranks=(3,), evidence=("it was slow",))


def codes(verdict: ProbeVerdict) -> dict[int, str]:
    return {node: finding.code for node, finding in verdict.failed.items()}


def test_nodes_without_suspects_pass() -> None:
    assert judge(reports(), new=NEW) == ProbeVerdict(passed=NODES)


@pytest.mark.parametrize("stage", [stage for stage in ProbeStage if stage is not ProbeStage.END])
def test_node_that_a_stage_names_fails(stage: ProbeStage) -> None:
    verdict = judge(reports(suspect(stage, 1)), new=NEW)
    assert list(verdict.failed) == [7]
    assert verdict.passed == (4, 9)
    finding = verdict.failed[7]
    assert finding.code == f"probe-{stage.value}"
    assert (finding.where, finding.evidence) == ("rank 3", ("it was slow",))


def test_storage_that_refuses_all_nodes_is_no_nodes_fault() -> None:
    verdict = judge(reports(*(suspect(ProbeStage.STORAGE, number) for number in range(3))), new=NEW)
    assert not verdict.failed
    assert not verdict.passed
    assert verdict.of_all is not None
    assert (verdict.of_all.code, verdict.of_all.what) == ("probe-storage", "no node can write where checkpoints go")
    assert verdict.of_all.evidence == ("it was slow",)


def test_storage_that_refuses_all_who_write_there_adds_nothing_to_another_nodes_fault() -> None:
    found = reports(suspect(ProbeStage.MATMUL, 0), *(suspect(ProbeStage.STORAGE, number) for number in (1, 2)))
    assert codes(judge(found, new=NEW)) == {4: "probe-matmul"}


def test_nodes_that_storage_refuses_while_others_write_fail() -> None:
    found = reports(*(suspect(ProbeStage.STORAGE, number) for number in range(2)))
    rates = StorageRates(node=2, folder="f", write_mb_s=1.0, read_mb_s=1.0, sync_s=0.1, files_per_s=1.0)
    wrote = [msgspec.structs.replace(found[0], result=msgspec.structs.replace(found[0].result, storage=(rates,)))]
    assert codes(judge([*wrote, *found[1:]], new=NEW)) == {4: "probe-storage", 7: "probe-storage"}


def test_only_node_that_storage_refuses_is_replaced() -> None:
    assert codes(judge(reports(suspect(ProbeStage.STORAGE, 0), nodes=(4,)), new=NEW)) == {4: "probe-storage"}


def test_of_a_bad_link_the_later_node_is_replaced_then_the_other() -> None:
    found = reports(suspect(ProbeStage.PAIRS, 0, 2))
    verdict = judge(found, new=NEW)
    assert codes(verdict) == {9: "probe-pairs"}
    assert verdict.passed == (7,)  # the other end may be the bad one
    assert verdict.failed[9].what == "node4 and node9 communicate badly with each other"
    assert codes(judge(found, new=NEW, failed_before=frozenset({9}))) == {4: "probe-pairs"}
    assert codes(judge(found, new=NEW, failed_before=frozenset({4, 9}))) == {9: "probe-pairs"}


def test_of_a_bad_link_to_a_node_that_has_passed_the_new_end_is_replaced() -> None:
    found = reports(suspect(ProbeStage.PAIRS, 0, 2))
    assert codes(judge(found, new=frozenset({4}), failed_before=frozenset({4}))) == {4: "probe-pairs"}


def test_first_node_is_to_blame_if_most_others_do_not_reach_it() -> None:
    verdict = judge(reports(suspect(ProbeStage.ARRIVE, 1), suspect(ProbeStage.ARRIVE, 2)), new=NEW)
    assert codes(verdict) == {4: "probe-arrive"}
    assert verdict.failed[4].evidence == ("no answer from node7, node9",)
    assert not verdict.passed
    two = reports(suspect(ProbeStage.ARRIVE, 1), nodes=(0, 1))
    assert codes(judge(two, new=frozenset({0, 1}), failed_before=frozenset({1}))) == {0: "probe-arrive"}


def test_link_of_a_node_that_fails_anyway_costs_no_other_node() -> None:
    assert codes(judge(reports(suspect(ProbeStage.MATMUL, 0), suspect(ProbeStage.PAIRS, 0, 2)), new=NEW)) == {
        4: "probe-matmul"
    }


def test_fault_of_all_nodes_replaces_none() -> None:
    verdict = judge(reports(suspect(ProbeStage.PAIRS, 0, 1, 2)), new=NEW)
    assert not verdict.failed
    assert not verdict.passed
    assert verdict.of_all is not None
    assert (verdict.of_all.code, verdict.of_all.what) == ("probe-pairs", "all pairs of nodes communicate badly")
    assert judge(reports(suspect(ProbeStage.ALL_REDUCE, 0, 1), nodes=(0, 1)), new=NEW).of_all is not None


def test_first_node_fails_if_its_probe_has_no_result() -> None:
    verdict = judge(reports(result=None, problem="CUDA error"), new=NEW)
    assert codes(verdict) == {4: "probe-no-result"}
    assert verdict.failed[4].evidence == ("node4: CUDA error",)
    assert not verdict.passed  # nothing was measured
    incomplete = ProbeResult(rank=0, outcome=ProbeOutcome.INCOMPLETE, elapsed_s=9.0, problem="not done within 9 s")
    assert judge(reports(result=incomplete), new=NEW).failed[4].evidence == ("not done within 9 s",)


def test_nodes_that_all_cannot_be_probed_start_with_a_warning() -> None:
    found = [msgspec.structs.replace(each, result=None, not_looked_at="no torch") for each in reports()]
    verdict = judge(found, new=NEW)
    assert verdict.passed == NODES
    (warning,) = verdict.warnings
    assert (warning.code, warning.severity) == ("probe-not-possible", Severity.WARNING)
    outcomes = probe_results(found)
    assert {each.outcome for results in outcomes.values() for each in results} == {CheckOutcome.NOT_LOOKED_AT}


def test_node_that_cannot_be_probed_unlike_the_others_fails() -> None:
    found = reports(suspect(ProbeStage.ARRIVE, 1), suspect(ProbeStage.MATMUL, 2))
    found[1] = msgspec.structs.replace(found[1], not_looked_at="no torch")
    assert codes(judge(found, new=NEW)) == {7: "probe-no-result", 9: "probe-matmul"}


def test_crash_on_all_nodes_is_no_node_s_fault() -> None:
    found = [msgspec.structs.replace(each, result=None, problem="Abort", crashed=True) for each in reports()]
    verdict = judge(found, new=NEW)
    assert not verdict.failed
    assert verdict.of_all is not None
    assert verdict.of_all.what == "the probe crashed on all nodes"


def test_outcome_of_each_probe_on_each_node() -> None:
    outcomes = probe_results(reports(suspect(ProbeStage.PAIRS, 1)))
    assert [each.check for each in outcomes[7]] == list(CHECKS)
    failed = [
        (node, each.check)
        for node, results in outcomes.items()
        for each in results
        if each.outcome is CheckOutcome.FAILED
    ]
    assert failed == [(7, "probe-pairs")]
    assert outcomes[4][CHECKS.index("probe-node-all-reduce")].outcome is CheckOutcome.NOT_LOOKED_AT


def test_result_in_an_event_keeps_the_slowest_lane_of_each_pair() -> None:
    pairs = tuple(PairRate(nodes=(0, 1), lane=lane, gb_s=rate) for lane, rate in enumerate((2.0, None, 1.0)))
    kept = keep_slowest(ProbeResult(rank=0, outcome=ProbeOutcome.PASSED, elapsed_s=1.0, pairs=pairs))
    assert [each.lane for each in kept.pairs] == [1]


def test_rate_of_two_nodes_is_that_of_their_slowest_ranks() -> None:
    measured = (
        PairRate(nodes=(0, 2), lane=0, gb_s=2.0),
        PairRate(nodes=(2, 0), lane=1, gb_s=1.5),
        PairRate(nodes=(0, 1), problem="no answer"),
    )
    result = ProbeResult(rank=0, outcome=ProbeOutcome.PASSED, elapsed_s=9.0, pairs=measured)
    assert pair_rates(reports(result=result)) == {(4, 9): 1.5e9}
    assert pair_rates(reports(result=None)) == {}
