"""Tokens: each holder has its own, and none gives another."""

from __future__ import annotations

import pytest

from holdfast.guard.keys import Keys, NodeAgent, Operator, fresh_token

TOKEN = fresh_token()
KEYS = Keys(TOKEN)


def test_holder_is_known_by_its_own_token() -> None:
    assert KEYS.holder(TOKEN) == Operator()
    for node, generation in ((0, 0), (7, 3), (2047, 12)):
        assert KEYS.holder(KEYS.of_node(node, generation)) == NodeAgent(node, generation)


def test_tokens_outlive_the_controller_that_made_them() -> None:
    assert Keys(TOKEN).of_node(3, 1) == KEYS.of_node(3, 1)


@pytest.mark.parametrize(
    "forged",
    [
        "",
        TOKEN[:-1],
        TOKEN + "x",
        "ünknown",
        "\udcff",
        "node0.0:",
        "node0.0:" + "0" * 64,
        KEYS.of_node(0, 0).replace("node0.0", "node1.0"),
        KEYS.of_node(0, 0).replace("node0.0", "node0.1"),
        KEYS.of_node(0, 0).replace("node0.0", "node00.0"),
        KEYS.of_node(0, 0).upper(),
        KEYS.of_node(0, 0) + "\n",
        KEYS.of_node(1, 0).partition(":")[2],
        Keys(fresh_token()).of_node(0, 0),
        "node99999999999999999999.0:" + "0" * 64,
    ],
)
def test_anything_else_is_nobodys(forged: str) -> None:
    assert KEYS.holder(forged) is None


def test_tokens_of_two_runs_differ() -> None:
    assert fresh_token() != fresh_token()
    assert TOKEN not in KEYS.of_node(0, 0)
