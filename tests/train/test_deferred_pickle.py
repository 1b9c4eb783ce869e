"""What is noted between two steps is what was true then, whenever it is put into bytes."""

from __future__ import annotations

import io
from collections import OrderedDict
from typing import Any

import pytest
import torch

from holdfast.train.checkpoint import safe_state
from holdfast.train.checkpoint.deferred_pickle import MAX_COPIED_VALUES, defer_pickle


class Pickled:
    """Something of the user's, which says itself how it is pickled."""

    def __init__(self) -> None:
        self.told = [1]

    def __reduce__(self) -> tuple[Any, ...]:
        return OrderedDict, ([("told", tuple(self.told))],)


def averaged() -> OrderedDict[str, Any]:
    """As the state of a module, which has more than its keys."""
    state = OrderedDict(weight=torch.ones(3))
    state._metadata = {"version": [1]}
    return state


def read(written: bytes) -> dict[str, Any]:
    return safe_state.load(io.BytesIO(written))


def many() -> list[list[int]]:
    return [[1]] * MAX_COPIED_VALUES


CASES = {
    "a list": (lambda: {"seen": [1, 2]}, lambda held: held["seen"].append(3)),
    "a tensor": (lambda: (torch.ones(2),), lambda held: held[0].zero_()),
    "a tensor with a gradient": (lambda: [torch.ones(2, requires_grad=True)], lambda held: held[0].data.zero_()),
    "a parameter": (lambda: [torch.nn.Parameter(torch.ones(2))], lambda held: held[0].data.zero_()),
    "an object": (lambda: [Pickled()], lambda held: held[0].told.append(2)),
    "a set": (lambda: [{1}], lambda held: held[0].add(2)),
    "many": (many, lambda held: held[0].append(2)),
    "a module's state": (averaged, lambda held: held["weight"].zero_()),
    "beside a module's state": (averaged, lambda held: held._metadata["version"].append(2)),
}


def told(tree: Any) -> str:
    """All there is of it in words."""
    return f"{tree} {getattr(tree, '__dict__', {})}"


@pytest.mark.parametrize(("make", "change"), CASES.values(), ids=CASES)
def test_what_is_changed_after_it_was_noted_is_in_bytes_as_it_was(make, change):
    held, untouched = make(), make()
    later = defer_pickle(lambda: {"random": (1, 2)}, {"state": held})
    change(held)
    assert told(held) != told(untouched)
    unchanged, found = read(defer_pickle(dict, {"state": untouched})()), read(later())
    assert found["random"] == (1, 2)
    assert told(found["state"]) == told(unchanged["state"])


def test_tensors_that_share_memory_still_do():
    whole = torch.zeros(4)
    found = read(defer_pickle(dict, {"whole": whole, "part": whole[1:3]})())
    found["whole"].fill_(1.0)
    assert found["part"].tolist() == [1.0, 1.0]
