"""Four real ranks over Gloo, each a node, of which one is slow, silent or absent.

On loopback the slow rank sleeps in the probe's own channel before it sends: that stands for a slow link. Real shaped
links are in test_shaped_links.py. Nothing here has run with NCCL.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.train.probe.probe_ranks import FAULTS, NODES, run_ranks

from holdfast.events.probe_results import ProbeOutcome, ProbeStage
from holdfast.train.probe import __main__ as probe

pytestmark = pytest.mark.slow


def test_healthy_ranks_probe_everything(tmp_path: Path) -> None:
    # The gate is wide open: how even the rates of four ranks on two busy cores are is no property of the probe.
    (tmp_path / "checkpoints").mkdir()
    printed = run_ranks(tmp_path, {}, "--share-of-median=0.01", f"--storage={tmp_path / 'checkpoints'}")
    result = printed[0][1]
    assert (result.outcome, result.suspects) == (ProbeOutcome.PASSED, ())
    assert {each.rank for each in result.devices} == {*range(NODES)}
    assert all(each.gb_s for each in result.pairs)
    assert {each.nodes for each in result.pairs} == {(a, b) for b in range(NODES) for a in range(b)}
    assert [each.size_bytes for each in result.all_reduce] == [8**power for power in range(1, 7)]
    assert not any(each.wrong for each in result.all_reduce)
    assert result.not_run == (ProbeStage.NODE_ALL_REDUCE,)
    assert [each.node for each in result.storage] == [*range(NODES)]
    assert all(min(each.write_mb_s, each.read_mb_s, each.sync_s, each.files_per_s) > 0 for each in result.storage)
    assert list((tmp_path / "checkpoints").iterdir()) == []
    for rank, (progress, own) in printed.items():
        assert [each.stage for each in progress] == [
            ProbeStage.MATMUL,
            ProbeStage.MEMORY,
            *[ProbeStage.PAIRS] * 3,
            ProbeStage.ALL_REDUCE,
            ProbeStage.STORAGE,
        ]
        assert {each.peer for each in progress} - {None} == {*range(NODES)} - {rank}
        assert own.outcome is ProbeOutcome.PASSED
        assert [each.rank for each in own.devices] == ([rank] if rank else [*range(NODES)])


def test_nodes_of_two_ranks_probe_each_lane_and_each_node(tmp_path: Path) -> None:
    result = run_ranks(tmp_path, {}, "--share-of-median=0.01", local=2)[0][1]
    assert (result.outcome, result.suspects) == (ProbeOutcome.PASSED, ())
    assert result.not_run == (ProbeStage.STORAGE,)
    assert [(each.nodes, each.lane) for each in result.pairs] == [((0, 1), 0), ((0, 1), 1)]
    assert all(each.gb_s for each in result.pairs)
    assert [each.node for each in result.node_all_reduce] == [0, 1]
    assert all(each.rates for each in result.node_all_reduce)
    assert all(each.data_parallel and 0 < each.data_parallel.fsdp_layer_s < 10 for each in result.node_all_reduce)
    assert result.all_reduce[0].bus_gb_s == pytest.approx(result.all_reduce[0].algorithm_gb_s * 1.5)


@pytest.mark.parametrize("fault", FAULTS)
def test_one_slow_or_silent_rank_is_located(tmp_path: Path, fault: str) -> None:
    printed = run_ranks(tmp_path, {2: fault}, "--deadline-s=40", "--share-of-median=0.1")
    result = printed[0][1]
    suspects = [(each.stage, each.nodes) for each in result.suspects]
    assert (ProbeStage.PAIRS, (2,)) in suspects, result
    # On a busy machine a link between two others may be slow too; then all-reduces do not follow.
    assert not [nodes for _, nodes in suspects if len(nodes) == 1 and nodes != (2,)], result
    assert result.all_reduce or len(suspects) > 1, "the others did not continue"
    assert all(own.outcome is ProbeOutcome.FAILED for _, own in printed.values())


def test_nodes_that_cannot_write_checkpoints_are_named(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    result = run_ranks(tmp_path, {}, "--share-of-median=0.01", f"--storage={gone}", local=2)[0][1]
    assert {each.stage for each in result.suspects} == {ProbeStage.STORAGE}
    assert [each.nodes for each in result.suspects] == [(0,), (1,)]
    assert str(gone) in result.suspects[0].evidence[0]


def test_rank_that_never_arrives_is_named(tmp_path: Path) -> None:
    result = run_ranks(tmp_path, {1: "absent"}, "--deadline-s=30", "--share-of-median=0.01")[0][1]
    assert [(each.stage, each.nodes, each.ranks) for each in result.suspects] == [(ProbeStage.ARRIVE, (1,), (1,))]
    assert result.all_reduce


def test_ranks_without_a_coordinator_end_by_themselves(tmp_path: Path) -> None:
    printed = run_ranks(tmp_path, {0: "absent"}, "--deadline-s=5")
    for _, own in printed.values():
        assert own.outcome is ProbeOutcome.INCOMPLETE
        assert own.problem.startswith("the store at 127.0.0.1:")


def test_command_line_refuses_what_is_no_rank(capsys: pytest.CaptureFixture[str]) -> None:
    env = {"RANK": "1", "WORLD_SIZE": "3", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "a"}
    for refused, why in ((env, "MASTER_PORT"), (env | {"MASTER_PORT": "1"}, "node by node")):
        with pytest.raises(SystemExit) as ended:
            probe.main(("--backend=gloo",), refused)
        assert ended.value.code == probe.USAGE
        assert why in capsys.readouterr().err


def test_deadline_must_be_positive() -> None:
    for text in ("0", "-1", "nan", "inf"):
        with pytest.raises(SystemExit):
            probe.main((f"--deadline-s={text}",), {})
