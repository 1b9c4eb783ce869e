"""A call that is abandoned raises the reason at once, however early that comes."""

from __future__ import annotations

from threading import Event

import pytest

from holdfast.train.abortable_call import AbortableCall


def test_call_that_is_aborted_as_soon_as_its_thread_starts_raises_the_reason() -> None:
    call, never = AbortableCall(), Event()

    def work() -> None:
        call.abort(ConnectionError("lost: replica 7"))
        never.wait()

    with pytest.raises(ConnectionError, match="lost: replica 7"):
        call.run(work, timeout_s=200)
    never.set()
