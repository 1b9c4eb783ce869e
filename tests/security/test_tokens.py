"""Tokens: each holder has its own, and none gives another."""

from __future__ import annotations

import pytest

from holdfast.security.tokens import NodeAgent, TokenIssuer, User, new_token

TOKEN = new_token()
KEYS = TokenIssuer(TOKEN)


def test_holder_is_known_by_its_own_token() -> None:
    assert KEYS.principal(TOKEN) == User()
    for node, generation in ((0, 0), (7, 3), (2047, 12)):
        assert KEYS.principal(KEYS.node_token(node, generation)) == NodeAgent(node, generation)


def test_tokens_outlive_the_controller_that_made_them() -> None:
    assert TokenIssuer(TOKEN).node_token(3, 1) == KEYS.node_token(3, 1)


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
        KEYS.node_token(0, 0).replace("node0.0", "node1.0"),
        KEYS.node_token(0, 0).replace("node0.0", "node0.1"),
        KEYS.node_token(0, 0).replace("node0.0", "node00.0"),
        KEYS.node_token(0, 0).upper(),
        KEYS.node_token(0, 0) + "\n",
        KEYS.node_token(1, 0).partition(":")[2],
        TokenIssuer(new_token()).node_token(0, 0),
        "node99999999999999999999.0:" + "0" * 64,
    ],
    ids=range(15),  # the tokens differ in each process
)
def test_anything_else_is_nobodys(forged: str) -> None:
    assert KEYS.principal(forged) is None


def test_tokens_of_two_runs_differ() -> None:
    assert new_token() != new_token()
    assert TOKEN not in KEYS.node_token(0, 0)
