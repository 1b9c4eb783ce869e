"""Checks of a node on request: each number once, a newer one after the one under way."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from holdfast.agent.node_check import NodeCheck
from holdfast.clock import Clock
from holdfast.events import NodeChecked
from holdfast.preflight import run_checks
from holdfast.protocol.node_requirements import NodeRequirements
from holdfast.protocol.orders import CheckNode


def order(number: int) -> CheckNode:
    return CheckNode(wanted=NodeRequirements(), deadline_s=5.0, number=number)


def test_newer_check_that_is_requested_during_another_is_made_and_reported_with_its_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    went_on, checks = threading.Event(), list[int]()

    def checked(*_: Any) -> tuple[()]:
        assert went_on.wait(10)
        checks.append(len(checks))
        return ()

    monkeypatch.setattr(run_checks, "run_checks", checked)
    monkeypatch.setattr(run_checks, "node_facts", lambda *_: {})

    async def requested() -> list[NodeChecked]:
        sent: list[NodeChecked] = []
        both = asyncio.Event()

        def send(report: NodeChecked) -> None:
            sent.append(report)
            if len(sent) == 2:
                both.set()

        check = NodeCheck(node=0, generation=0, address="127.0.0.1", clock=Clock(), send=send)
        check.request(order(0))
        check.request(order(0))
        check.request(order(1))
        check.request(order(0))  # late
        went_on.set()
        await asyncio.wait_for(both.wait(), 10)
        check.request(order(1))
        check.request(order(0))
        return sent

    reports = asyncio.run(requested())
    assert [report.number for report in reports] == [0, 1, 1]
    assert len(checks) == 2
