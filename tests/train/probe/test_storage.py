"""The probe of a file system leaves room for those who use it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.conftest import SmallDisk

from holdfast.train.probe.storage import measure

pytestmark = pytest.mark.root


@pytest.mark.parametrize("nodes", [1, 4])
def test_small_disk_is_measured_by_all_nodes_and_not_filled(small_disk: SmallDisk, nodes: int) -> None:
    folder = small_disk(1 << 20)
    with ThreadPoolExecutor(nodes) as pool:
        found = list(pool.map(lambda node: measure(folder, node, 0.4, nodes=nodes), range(nodes)))
    assert [each.node for each in found] == [*range(nodes)]
    assert all(each.write_mb_s > 0 for each in found)
    assert not list(folder.iterdir())
