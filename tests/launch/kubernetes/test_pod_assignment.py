"""Which pod is which generation of a node, whatever comes in whichever order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from holdfast.job.backend import BackendNodeState, NodeId, NodeObservation
from holdfast.launch.kubernetes.incluster.pod_assignment import PodAssignments, PodStatus

FIRST, SECOND = NodeId(node=0, generation=0), NodeId(node=0, generation=1)
A = PodStatus(uid="a", name="run-node-0-a", node=0, address="10.0.0.1", running=True)
B = PodStatus(uid="b", name="run-node-0-b", node=0, address="10.0.0.2", running=True)
OVER_A = PodStatus(uid="a", name="run-node-0-a", node=0, ended=True)


def settled(lives: PodAssignments) -> tuple[PodAssignments, list[tuple[NodeId, BackendNodeState]]]:
    lives, seen = lives.reconcile()
    return lives, [(each.node_id, each.state) for each in seen]


def test_pod_that_runs_is_made() -> None:
    lives, seen = settled(PodAssignments().request(FIRST).update_pod(A))
    assert seen == [(FIRST, BackendNodeState.CREATED)]
    assert lives.generation(0, A.address) == 0
    assert lives.generation(0, B.address) is None
    assert settled(lives)[1] == []


def test_pod_that_waits_is_told_once_with_its_reason() -> None:
    waiting = PodStatus(uid="a", name="a", node=0, reason="Unschedulable: 0/3 nodes are available")
    lives, seen = PodAssignments().request(FIRST).update_pod(waiting).reconcile()
    assert seen == (NodeObservation(node_id=FIRST, state=BackendNodeState.UNAVAILABLE, reason=waiting.reason),)
    assert lives.reconcile()[1] == ()
    assert settled(lives.update_pod(A))[1] == [(FIRST, BackendNodeState.CREATED)]


def test_pod_that_is_gone_is_said_and_its_successor_waits_for_its_generation() -> None:
    lives, _ = settled(PodAssignments().request(FIRST).update_pod(A))
    lives, seen = settled(lives.update_pod(OVER_A).update_pod(B))
    assert seen == [(FIRST, BackendNodeState.TERMINATED)]
    assert lives.generation(0, B.address) is None
    lives, seen = settled(lives.request(SECOND))
    assert seen == [(SECOND, BackendNodeState.CREATED)]
    assert lives.generation(0, B.address) == 1


def test_end_of_a_pod_names_its_machine_and_the_reason_if_they_are_known() -> None:
    lives, _ = settled(PodAssignments().request(FIRST).update_pod(A))
    ended = replace(OVER_A, machine="m7", reason="Evicted: low on disk")
    for last, reason in ((OVER_A, "its pod is gone"), (ended, "its pod on m7 is gone: Evicted: low on disk")):
        after, seen = lives.update_pod(last).reconcile()
        assert [each.reason for each in seen] == [reason]
        assert after.ended == {}


def test_pod_that_was_given_up_is_no_generation_any_more() -> None:
    lives, _ = settled(PodAssignments().request(FIRST).update_pod(A))
    lives, seen = settled(lives.request(SECOND))
    assert seen == []
    assert lives.generation(0, A.address) is None
    assert [pod.uid for pod in lives.retired_pods(SECOND)] == ["a"]
    assert settled(lives.update_pod(B))[1] == [(SECOND, BackendNodeState.CREATED)]


def test_what_an_earlier_controller_knew_is_said_to_be_gone_when_it_is() -> None:
    assert settled(PodAssignments(bound={FIRST: "a"}).update_pod(B))[1] == [(FIRST, BackendNodeState.TERMINATED)]
    assert settled(PodAssignments(bound={FIRST: "a"}).update_pod(A))[1] == []


def test_gang_that_its_queue_takes_back_is_evicted_once_and_its_nodes_wait_for_admission() -> None:
    waiting, seen = PodAssignments().request(FIRST).suspend("JobSet run is suspended").reconcile()
    assert [(each.state, each.reason) for each in seen] == [(BackendNodeState.UNAVAILABLE, "JobSet run is suspended")]
    lives, seen = settled(waiting.suspend("").update_pod(A))
    assert seen == [(FIRST, BackendNodeState.CREATED)]
    lives, seen = settled(lives.suspend("JobSet run is suspended"))
    assert seen == [(FIRST, BackendNodeState.EVICTED)]
    lives, seen = settled(lives.update_pod(OVER_A))
    assert seen == [(FIRST, BackendNodeState.TERMINATED)]
    lives, seen = settled(lives.request(SECOND))
    assert seen == [(SECOND, BackendNodeState.UNAVAILABLE)]
    lives, seen = settled(lives.suspend("").update_pod(B))
    assert seen == [(SECOND, BackendNodeState.CREATED)]
    assert settled(lives.suspend("again"))[1] == [(SECOND, BackendNodeState.EVICTED)]
    assert PodAssignments().suspension_outdated((OVER_A,))
    assert not PodAssignments().suspension_outdated((A,))
    assert PodAssignments(suspended="it is").suspension_outdated((A,))
    assert not PodAssignments(suspended="it is").suspension_outdated((OVER_A,))
    unnoticed = PodAssignments().request(FIRST).update_pod(A).reconcile()[0].suspend("it was quick").update_pod(OVER_A)
    assert settled(unnoticed)[1] == [(FIRST, BackendNodeState.EVICTED), (FIRST, BackendNodeState.TERMINATED)]


def test_pod_on_an_avoided_machine_is_no_node_and_one_elsewhere_is() -> None:
    on_bad, elsewhere = replace(A, machine="m7"), replace(B, machine="m8")
    lives, _ = settled(PodAssignments().request(FIRST).update_pod(on_bad))
    lives = lives.avoid("m7")
    assert lives.misplaced_pods() == ()  # it is bound: whether it goes is for the controller to decide
    lives, _ = settled(lives.request(SECOND).update_pod(OVER_A))
    again = replace(A, uid="c", machine="m7", running=False)
    lives, seen = lives.update_pod(again).reconcile()
    assert [(each.state, each.reason) for each in seen] == [
        (BackendNodeState.UNAVAILABLE, "its pod was placed on m7, which this run avoids")
    ]
    assert lives.misplaced_pods() == (again,)
    lives = lives.retire(lives.misplaced_pods())
    assert lives.misplaced_pods() == ()
    assert settled(lives.update_pod(replace(again, running=True)))[1] == []
    _, seen = lives.update_pod(elsewhere).reconcile()
    assert [(each.node_id, each.state, each.machine) for each in seen] == [(SECOND, BackendNodeState.CREATED, "m8")]
    _, seen = lives.use_again({"m7"}).update_pod(replace(again, uid="d", running=True)).reconcile()
    assert [(each.node_id, each.state, each.machine) for each in seen] == [(SECOND, BackendNodeState.CREATED, "m7")]


def test_pod_of_a_node_that_has_one_stays_on_an_avoided_machine() -> None:
    other = NodeId(node=1, generation=0)
    there = replace(B, node=1, machine="m7")
    lives, _ = settled(PodAssignments().request(other).update_pod(there))
    lives, seen = settled(lives.avoid("m7").request(FIRST))
    assert (lives.misplaced_pods(), seen) == ((), [])
    assert lives.generation(1, B.address) == 0


def test_pod_that_the_cluster_evicts_is_told_once_with_the_reason() -> None:
    lives, _ = settled(PodAssignments().request(FIRST).update_pod(A))
    evicted = replace(A, terminating=True, evicted="EvictionByEvictionAPI: evicting")
    lives, seen = lives.update_pod(evicted).reconcile()
    assert seen == (NodeObservation(node_id=FIRST, state=BackendNodeState.EVICTED, reason=evicted.evicted),)
    assert settled(lives.update_pod(evicted))[1] == []
    lives, seen = settled(lives.update_pod(OVER_A))
    assert seen == [(FIRST, BackendNodeState.TERMINATED)]
    # The kubelet of a machine that shuts down tells it only when the pod has ended.
    lives, _ = settled(lives.request(SECOND).update_pod(B))
    shut_down = replace(B, running=False, ended=True, evicted="TerminationByKubelet: node shutdown")
    lives, seen = settled(lives.update_pod(shut_down))
    assert seen == [(SECOND, BackendNodeState.EVICTED), (SECOND, BackendNodeState.TERMINATED)]
    assert settled(lives.request(NodeId(node=0, generation=2)).update_pod(replace(A, uid="c")))[1][0][1] is (
        BackendNodeState.CREATED
    )


def test_pod_that_no_kubelet_begins_with_on_the_machine_of_a_lost_node_is_to_be_made_again() -> None:
    lives, _ = settled(PodAssignments().request(FIRST).update_pod(replace(A, machine="m7", accepted=True)))
    placed = replace(B, machine="m7", running=False)
    assert lives.update_pod(placed).unaccepted_pods() == ()  # the node has a pod
    lives = lives.request(SECOND).update_pod(placed)
    assert lives.unaccepted_pods() == (placed,)
    assert lives.update_pod(replace(placed, machine="m8")).unaccepted_pods() == ()
    assert lives.update_pod(replace(placed, accepted=True)).unaccepted_pods() == ()
    assert settled(lives.update_pod(replace(B, machine="m7", accepted=True)))[1] == [(SECOND, BackendNodeState.CREATED)]
    # A pod that is known to end leaves a machine that works. Its operator may make another one only minutes later.
    lives, _ = settled(PodAssignments().request(FIRST).update_pod(replace(A, machine="m7")))
    lives = lives.update_pod(replace(A, machine="m7", terminating=True)).request(SECOND).update_pod(placed)
    assert lives.unaccepted_pods() == ()
    assert lives.has_pod(SECOND)
    assert not lives.update_pod(replace(placed, ended=True)).has_pod(SECOND)


_STEPS = st.one_of(
    st.tuples(st.just("see"), st.sampled_from("abcd"), st.sampled_from(("pending", "running", "over"))),
    st.tuples(st.just("want"), st.just(""), st.just("")),
)


@given(st.lists(_STEPS, max_size=30))
def test_generations_are_made_in_order_each_once_and_gone_after_that(steps: list[tuple[str, str, str]]) -> None:
    lives, said, generation, ended = PodAssignments(), list[tuple[int, BackendNodeState]](), -1, set[str]()
    for kind, uid, state in steps:
        if kind == "want":
            generation += 1
            lives = lives.request(NodeId(node=0, generation=generation))
        elif uid not in ended:  # a pod that has ended never runs again
            running, over = state == "running", state == "over"
            ended |= {uid} if over else set()
            lives = lives.update_pod(
                PodStatus(uid=uid, name=uid, node=0, address=f"10.0.0.{uid}", running=running, ended=over)
            )
        lives, seen = lives.reconcile()
        said += [
            (each.node_id.generation, each.state) for each in seen if each.state is not BackendNodeState.UNAVAILABLE
        ]
        assert len(lives.bound) <= 1
    made = [generation for generation, sight in said if sight is BackendNodeState.CREATED]
    gone = [generation for generation, sight in said if sight is BackendNodeState.TERMINATED]
    assert made == sorted(set(made))
    assert gone == sorted(set(gone))
    assert set(gone) <= set(made)
