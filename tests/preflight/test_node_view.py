"""A reading that several checks share."""

from __future__ import annotations

from threading import Event, Thread

import pytest
from tests.preflight.conftest import MakeNode

from holdfast.preflight import node_view
from holdfast.preflight.node_view import NodeView, NotLookedAt


def test_value_and_error_of_a_reading_are_shared(node: MakeNode) -> None:
    view = node({"etc/one": "1"})
    assert view.once(_read_one) == "1"
    (view.root / "etc/one").write_text("2")
    assert view.once(_read_one) == "1"
    with pytest.raises(NotLookedAt):
        view.once(_read_two)
    (view.root / "etc/two").write_text("2")
    with pytest.raises(NotLookedAt, match="/etc/two: No such file"):
        view.once(_read_two)


def test_reading_that_hangs_releases_who_waits_for_it(node: MakeNode, monkeypatch: pytest.MonkeyPatch) -> None:
    began, end = Event(), Event()

    def hangs(_: NodeView) -> None:
        began.set()
        end.wait()

    view = node()
    first = Thread(target=view.once, args=(hangs,))
    first.start()
    began.wait()
    monkeypatch.setattr(node_view, "READING_TIMEOUT_S", 0.01)
    with pytest.raises(TimeoutError, match="another check has read the same"):
        view.once(hangs)
    end.set()
    first.join()


def _read_one(view: NodeView) -> str:
    return view.read("etc/one")


def _read_two(view: NodeView) -> str:
    return view.read("etc/two")
