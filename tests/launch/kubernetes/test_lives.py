"""Which pod is which generation of a node, whatever comes in whichever order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from holdfast.job.backend import NodeObservation, NodePlace, Sight
from holdfast.launch.kubernetes.lives import Lives, Pod

FIRST, SECOND = NodePlace(node=0, generation=0), NodePlace(node=0, generation=1)
A = Pod(uid="a", name="run-node-0-a", node=0, address="10.0.0.1", running=True)
B = Pod(uid="b", name="run-node-0-b", node=0, address="10.0.0.2", running=True)
OVER_A = Pod(uid="a", name="run-node-0-a", node=0, over=True)


def settled(lives: Lives) -> tuple[Lives, list[tuple[NodePlace, Sight]]]:
    lives, seen = lives.settle()
    return lives, [(each.place, each.sight) for each in seen]


def test_pod_that_runs_is_made() -> None:
    lives, seen = settled(Lives().want(FIRST).see(A))
    assert seen == [(FIRST, Sight.MADE)]
    assert lives.generation(0, A.address) == 0
    assert lives.generation(0, B.address) is None
    assert settled(lives)[1] == []


def test_pod_that_waits_is_told_once_with_its_reason() -> None:
    waiting = Pod(uid="a", name="a", node=0, why="Unschedulable: 0/3 nodes are available")
    lives, seen = Lives().want(FIRST).see(waiting).settle()
    assert seen == (NodeObservation(place=FIRST, sight=Sight.UNAVAILABLE, reason=waiting.why),)
    assert lives.settle()[1] == ()
    assert settled(lives.see(A))[1] == [(FIRST, Sight.MADE)]


def test_pod_that_is_gone_is_said_and_its_successor_waits_for_its_generation() -> None:
    lives, _ = settled(Lives().want(FIRST).see(A))
    lives, seen = settled(lives.see(OVER_A).see(B))
    assert seen == [(FIRST, Sight.GONE)]
    assert lives.generation(0, B.address) is None
    lives, seen = settled(lives.want(SECOND))
    assert seen == [(SECOND, Sight.MADE)]
    assert lives.generation(0, B.address) == 1


def test_pod_that_was_given_up_is_no_generation_any_more() -> None:
    lives, _ = settled(Lives().want(FIRST).see(A))
    lives, seen = settled(lives.want(SECOND))
    assert seen == []
    assert lives.generation(0, A.address) is None
    assert [pod.uid for pod in lives.former(SECOND)] == ["a"]
    assert settled(lives.see(B))[1] == [(SECOND, Sight.MADE)]


def test_what_an_earlier_controller_knew_is_said_to_be_gone_when_it_is() -> None:
    assert settled(Lives(held={FIRST: "a"}).see(B))[1] == [(FIRST, Sight.GONE)]
    assert settled(Lives(held={FIRST: "a"}).see(A))[1] == []


def test_gang_that_its_queue_takes_back_is_evicted_once_and_its_nodes_wait_for_admission() -> None:
    waiting, seen = Lives().want(FIRST).suspend("JobSet run is suspended").settle()
    assert [(each.sight, each.reason) for each in seen] == [(Sight.UNAVAILABLE, "JobSet run is suspended")]
    lives, seen = settled(waiting.suspend("").see(A))
    assert seen == [(FIRST, Sight.MADE)]
    lives, seen = settled(lives.suspend("JobSet run is suspended"))
    assert seen == [(FIRST, Sight.EVICTED)]
    lives, seen = settled(lives.see(OVER_A))
    assert seen == [(FIRST, Sight.GONE)]
    lives, seen = settled(lives.want(SECOND))
    assert seen == [(SECOND, Sight.UNAVAILABLE)]
    lives, seen = settled(lives.suspend("").see(B))
    assert seen == [(SECOND, Sight.MADE)]
    assert settled(lives.suspend("again"))[1] == [(SECOND, Sight.EVICTED)]
    assert Lives().belied((OVER_A,))
    assert not Lives().belied((A,))
    assert Lives(suspended="it is").belied((A,))
    assert not Lives(suspended="it is").belied((OVER_A,))
    unnoticed = Lives().want(FIRST).see(A).settle()[0].suspend("it was quick").see(OVER_A)
    assert settled(unnoticed)[1] == [(FIRST, Sight.EVICTED), (FIRST, Sight.GONE)]


_STEPS = st.one_of(
    st.tuples(st.just("see"), st.sampled_from("abcd"), st.sampled_from(("pending", "running", "over"))),
    st.tuples(st.just("want"), st.just(""), st.just("")),
)


@given(st.lists(_STEPS, max_size=30))
def test_generations_are_made_in_order_each_once_and_gone_after_that(steps: list[tuple[str, str, str]]) -> None:
    lives, said, generation, ended = Lives(), list[tuple[int, Sight]](), -1, set[str]()
    for kind, uid, state in steps:
        if kind == "want":
            generation += 1
            lives = lives.want(NodePlace(node=0, generation=generation))
        elif uid not in ended:  # a pod that has ended never runs again
            running, over = state == "running", state == "over"
            ended |= {uid} if over else set()
            lives = lives.see(Pod(uid=uid, name=uid, node=0, address=f"10.0.0.{uid}", running=running, over=over))
        lives, seen = lives.settle()
        said += [(each.place.generation, each.sight) for each in seen if each.sight is not Sight.UNAVAILABLE]
        assert len(lives.held) <= 1
    made = [generation for generation, sight in said if sight is Sight.MADE]
    gone = [generation for generation, sight in said if sight is Sight.GONE]
    assert made == sorted(set(made))
    assert gone == sorted(set(gone))
    assert set(gone) <= set(made)
