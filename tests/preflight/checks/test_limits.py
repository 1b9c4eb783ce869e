"""Checks of shared and locked memory."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
from tests.preflight.conftest import MakeNode, codes

from holdfast.preflight.checks import limits
from holdfast.preflight.node_view import NotLookedAt

LIMITS = """Limit                     Soft Limit           Hard Limit           Units
Max cpu time              unlimited            unlimited            seconds
Max locked memory         {soft}              65536                bytes
"""


@pytest.mark.parametrize(
    ("soft", "network", "capabilities", "expected"),
    [
        ("unlimited", "IB", 0, []),
        ("65536", "IB", 0, ["locked-memory-limited"]),
        ("65536", "IB", 1 << 14, []),  # IPC_LOCK
        ("65536", "Socket", 0, []),
    ],
)
def test_limit_of_locked_memory_matters_to_rdma(
    node: MakeNode, soft: str, network: str, capabilities: int, expected: list[str]
) -> None:
    status = f"Name:\tholdfast\nCapEff:\t{capabilities:016x}\n"
    view = node({"proc/self/limits": LIMITS.format(soft=soft), "proc/self/status": status}, network=network)
    assert codes([*limits.locked_memory(view)]) == expected


def test_limit_that_cannot_be_read_is_no_pass(node: MakeNode) -> None:
    with pytest.raises(NotLookedAt, match="/proc/self/limits: No such file"):
        [*limits.locked_memory(node())]


@pytest.mark.parametrize(("mib", "expected"), [(64, ["shared-memory-small"]), (2048, [])])
def test_shared_memory_is_enough_for_the_ranks(
    node: MakeNode, monkeypatch: pytest.MonkeyPatch, mib: int, expected: list[str]
) -> None:
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_blocks=mib << 8, f_frsize=4096))
    assert codes([*limits.shared_memory(node(processes=8))]) == expected
