"""Checks that pass, fail, cannot look, hang or raise, side by side."""

from __future__ import annotations

from collections.abc import Iterator
from threading import Event

from tests.preflight.conftest import MakeNode

from holdfast.findings import CheckOutcome, Finding, Severity
from holdfast.preflight.node_view import NodeView, NotLookedAt
from holdfast.preflight.run_checks import run_checks

END = Event()


def passes(_: NodeView) -> Iterator[Finding]:
    return iter(())


def warns(_: NodeView) -> Iterator[Finding]:
    yield Finding(code="small", what="small", severity=Severity.WARNING)


def fails(_: NodeView) -> Iterator[Finding]:
    yield Finding(code="broken", what="broken")


def is_blind(_: NodeView) -> Iterator[Finding]:
    raise NotLookedAt("there is no program `x`")
    yield


def is_wrong(_: NodeView) -> Iterator[Finding]:
    raise KeyError("a field")
    yield


def never_ends(_: NodeView) -> Iterator[Finding]:
    END.wait()
    yield Finding(code="late", what="late")


def asks_what_hangs(_: NodeView) -> Iterator[Finding]:
    raise TimeoutError("`nvidia-smi` has not answered within 5 s")
    yield


def test_each_check_has_its_own_outcome(node: MakeNode) -> None:
    results = run_checks(node(), (passes, warns, fails, is_blind, is_wrong, never_ends, asks_what_hangs), 0.5)
    END.set()
    passed, failed, blind = CheckOutcome
    assert [result.outcome for result in results] == [passed, passed, failed, blind, blind, failed, failed]
    assert [result.check for result in results][3:5] == ["is-blind", "is-wrong"]
    assert [result.reason for result in results][3:5] == ["there is no program `x`", "KeyError('a field')"]
    assert [result.findings[0].code for result in results[-2:]] == ["node-check-hangs", "node-check-hangs"]
    assert results[-1].findings[0].evidence == ("`nvidia-smi` has not answered within 5 s",)
