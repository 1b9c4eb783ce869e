"""Gangs with a placement, before the real Kueue: close together and numbered along the racks, or waiting."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from bench.topology_gangs import Cluster, Gang, place

from lab import Lab

pytestmark = pytest.mark.slow


@pytest.fixture
def cluster(lab: Lab, namespace: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """Two zones of a block with racks of 2 and 4 machines."""
    monkeypatch.setenv("KUBECONFIG", str(lab.kubeconfig))
    made = Cluster(lab, namespace, zones=(((2, 4),), ((2, 4),)))
    made.make()
    yield made
    made.remove()


def test_gang_waits_for_a_rack_though_enough_machines_are_free_elsewhere(cluster: Cluster) -> None:
    for gang in (
        Gang("small", 2, "rack"),  # leaves the large racks whole
        Gang("large", 4, "rack"),
        Gang("sliced", 4, "block", 2),
    ):
        outcome = place(cluster, gang)
        assert (outcome.waited, outcome.problems) == (False, ()), gang
    assert sum(cluster.free_in("rack").values()) == 2
    waits = place(cluster, Gang("waits", 3, "rack"))
    assert (waits.waited, waits.problems) == (True, ())
    cluster.leave("large")
    assert place(cluster, Gang("follows", 3, "rack")).problems == ()
