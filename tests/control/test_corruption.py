"""The node of a wrong rank is replaced at once, or the second time if its replica was given the state of others."""

from __future__ import annotations

from tests.control.test_stop_diagnose import all_stopped, training

from holdfast.control.commands import CheckNode, ReplaceNode
from holdfast.control.state import ReplicaPhase
from holdfast.events import CorruptionObserved
from holdfast.findings import Finding


def corrupted(*, at: float, certain: bool = True, continues: bool = False) -> CorruptionObserved:
    return CorruptionObserved(
        at=at,
        node=1,
        replica=0,
        attempt=0,
        rank=1,
        step=20,
        agreed_step=10,
        quantity="weights",
        certain=certain,
        continues=continues,
        finding=Finding(code="silent-corruption", what="w", evidence=("rank 1 has digest 7",)),
    )


def test_wrong_rank_ends_the_attempt_and_its_node_is_replaced() -> None:
    run = training()
    run.do(corrupted(at=30.0))
    assert [each.node_id.node for each in all_stopped(run) if isinstance(each, ReplaceNode)] == [1]


def test_ranks_that_differ_without_proof_keep_their_nodes_which_are_checked() -> None:
    run = training()
    run.do(corrupted(at=30.0, certain=False))
    assert all_stopped(run) == [CheckNode(node=0, number=1), CheckNode(node=1, number=1)]


def test_replica_that_was_given_the_state_of_others_continues_until_its_node_is_wrong_again() -> None:
    run = training()
    assert run.do(corrupted(at=30.0, continues=True)) == []
    assert run.state.replicas[0].phase is ReplicaPhase.RUNNING
    run.do(corrupted(at=60.0, continues=True))
    assert [each.node_id.node for each in all_stopped(run) if isinstance(each, ReplaceNode)] == [1]
