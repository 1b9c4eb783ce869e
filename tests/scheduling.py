"""How pytest-xdist distributes tests to its workers; `tests/conftest.py` says which tests belong together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from xdist.scheduler import LoadScopeScheduling

MANY_CASES = 40
"""A test with more cases than this takes so little for each that it pays to assign as many at a time."""


class OneTestAtATime(LoadScopeScheduling):
    """Workers take one test at a time, all tests of a group, or many cases of a quick test; largest groups first.

    `--dist loadgroup` groups by a mark, but xdist 3.8 cannot add it to the test IDs of pytest 9.2.
    """

    def __init__(self, config: Any, log: Any, group: Callable[[str], str]) -> None:
        super().__init__(config, log)
        self._group = group
        self._units: dict[str, str] = {}

    def schedule(self) -> None:
        if self.collection is None:
            self._units = units(next(iter(self.registered_collections.values())), self._group)
        super().schedule()

    def mark_test_complete(self, node: Any, item_index: int, duration: float = 0) -> None:
        """Forget a unit that is complete: xdist counts again for each test what it has ever assigned."""
        nodeid = self.registered_collections[node][item_index]
        assigned, unit = self.assigned_work[node], self._split_scope(nodeid)
        assigned[unit][nodeid] = True
        if all(assigned[unit].values()):
            del assigned[unit]
        self._reschedule(node)

    def _reschedule(self, node: Any) -> None:
        """A worker starts a test once it knows the next. xdist adds a third, which waits although others are idle."""
        if not self.workqueue or self._pending_of(self.assigned_work[node]) < 2:
            super()._reschedule(node)

    def _split_scope(self, nodeid: str) -> str:
        return self._units[nodeid]


def units(nodeids: Sequence[str], group: Callable[[str], str]) -> dict[str, str]:
    """What each test is assigned with."""
    cases = Counter(map(_without_case, nodeids))
    found: dict[str, str] = {}
    seen = Counter[str]()
    for nodeid in nodeids:
        found[nodeid], test = group(nodeid), _without_case(nodeid)
        if found[nodeid] == nodeid and cases[test] > MANY_CASES:
            found[nodeid] = f"{test} {seen[test] // MANY_CASES}"
        seen[test] += 1
    return found


def _without_case(nodeid: str) -> str:
    return nodeid.partition("[")[0]
