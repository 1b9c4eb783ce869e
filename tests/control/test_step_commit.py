"""What makes a step committed."""

from __future__ import annotations

from holdfast.control.step_commit import StepTracker
from holdfast.events import StepCommitted
from holdfast.protocol.orders import NodeStep, Progress


def word(node: int, *steps: int, ended: float = 0.0) -> Progress:
    passed = tuple(
        NodeStep(step=step, started=step + ended, ended=step + 1 + ended, metrics={"node": float(node)})
        for step in steps
    )
    return Progress(node=node, replica=0, attempt=2, steps=passed)


def numbers(steps: list[StepCommitted]) -> list[int]:
    return [step.step for step in steps]


def ledger(committed: int = 0) -> StepTracker:
    return StepTracker(0, 2, (4, 5), committed=committed)


def test_step_is_committed_when_the_last_node_has_passed_it() -> None:
    book = ledger()
    assert book.add(word(4, 1, 2), 9.0) == []
    steps = book.add(word(5, 1, ended=0.5), 9.0)
    assert numbers(steps) == [1]
    assert (steps[0].started, steps[0].ended, steps[0].metrics, steps[0].attempt) == (1.5, 2.5, {"node": 4.0}, 2)


def test_words_heard_twice_commit_nothing_twice() -> None:
    book = ledger()
    book.add(word(4, 1, 2, 3), 9.0)
    book.add(word(4, 1, 2, 3), 9.0)
    assert numbers(book.add(word(5, 1, 2), 9.0)) == [1, 2]
    assert book.add(word(5, 1, 2), 9.0) == []
    assert numbers(book.add(word(5, 3), 9.0)) == [3]


def test_successor_of_a_controller_continues_after_what_is_written() -> None:
    book = ledger(committed=2)
    book.add(word(4, 1, 2, 3), 9.0)
    assert numbers(book.add(word(5, 2, 3), 9.0)) == [3]


def test_step_that_one_node_never_passed_is_not_committed() -> None:
    book = ledger()
    book.add(word(4, 1, 2, 3), 9.0)
    assert numbers(book.add(word(5, 3), 9.0)) == [3]


def test_checkpoint_proves_the_heads_words_and_no_later_ones() -> None:
    book = ledger()
    book.add(word(4, 1, 2, 3), 9.0)
    book.add(word(5, 1), 9.0)
    book.checkpointed = 2
    assert numbers(book.commit_checkpointed(9.0)) == [2]
    assert book.committed == 2
    assert book.commit_checkpointed(9.0) == []


def test_words_that_arrive_after_a_step_was_proven_change_nothing() -> None:
    book = ledger()
    book.add(word(4, 1, 2, 3), 9.0)
    book.checkpointed = 2
    assert numbers(book.commit_checkpointed(9.0)) == [1, 2]
    assert numbers(book.add(word(5, 1, 2, 3), 9.0)) == [3]


def test_proof_takes_in_the_other_nodes_word_where_it_is_there() -> None:
    book = StepTracker(0, 2, (4, 5, 6))
    book.add(word(4, 1), 9.0)
    book.add(word(6, 1, ended=0.5), 9.0)
    book.checkpointed = 1
    assert [step.ended for step in book.commit_checkpointed(9.0)] == [2.5]


def test_word_that_repeats_or_goes_back_commits_each_step_once() -> None:
    book = StepTracker(0, 2, (4,))
    assert numbers(book.add(word(4, 1, 1, 3, 2, 3, 4), 9.0)) == [1, 3, 4]


def test_loss_is_the_mean_over_nodes_and_data_wait_the_longest() -> None:
    book = ledger()
    for node, loss, wait_s in ((5, 3.0, 0.5), (4, 1.0, 0.1)):
        metrics = (
            {"loss": loss, "data_wait_s": wait_s, "tokens": 64.0}
            if node == 4
            else {"loss": loss, "data_wait_s": wait_s}
        )
        word = NodeStep(step=1, started=0.0, ended=1.0, metrics=metrics)
        steps = book.add(Progress(node=node, replica=0, attempt=2, steps=(word,)), 9.0)
    assert steps[0].metrics == {"loss": 2.0, "data_wait_s": 0.5, "tokens": 64.0}
