"""Runs the checks of this node when the controller asks for them, and reports what they found."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable

from holdfast.clock import Clock
from holdfast.events import NodeChecked
from holdfast.findings import CheckOutcome
from holdfast.protocol.orders import CheckNode

FACTS_S = 1.0
"""Seconds to read what has to be the same on all nodes, if the checks have taken all of their time."""


class NodeCheck:
    """Checks this node once for each number; later requests with it get the same report."""

    def __init__(
        self, *, node: int, generation: int, address: str, clock: Clock, send: Callable[[NodeChecked], object]
    ) -> None:
        self._node, self._generation, self._address = node, generation, address
        self._clock = clock
        self._send = send
        self._task: asyncio.Task[NodeChecked] | None = None
        self._number = 0

    def request(self, order: CheckNode) -> None:
        """Send the report, now or when the checks have ended; a greater number is checked anew."""
        if self._task is None or order.number > self._number:
            self._number = order.number
            self._task = asyncio.ensure_future(self._check_after(self._task, order))
            self._task.add_done_callback(lambda done: self._send(done.result()))
        elif self._task.done() and order.number == self._number:
            self._send(self._task.result())

    async def _check_after(self, earlier: asyncio.Task[NodeChecked] | None, order: CheckNode) -> NodeChecked:
        if earlier is not None:
            await asyncio.wait([earlier])
        return await asyncio.to_thread(self._check, order)

    def _check(self, order: CheckNode) -> NodeChecked:
        from holdfast.preflight.node_view import NodeView  # a tenth of all that an agent imports
        from holdfast.preflight.run_checks import node_facts, quick_checks, run_checks

        began = time.monotonic()
        view = NodeView(wanted=order.wanted, environ=os.environ, address=self._address)
        results = run_checks(view, quick_checks(order.wanted), order.deadline_s)
        return NodeChecked(
            at=self._clock(),
            node=self._node,
            generation=self._generation,
            number=order.number,
            results=tuple(each for each in results if each.findings or each.outcome is not CheckOutcome.PASSED),
            facts=node_facts(view, max(FACTS_S, order.deadline_s - (time.monotonic() - began))),
            took_s=time.monotonic() - began,
        )
