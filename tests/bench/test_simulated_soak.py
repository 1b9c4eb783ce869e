"""What the simulator is given of a measured run, and how its answer is compared."""

from __future__ import annotations

import pytest
from bench.simulated_soak import KINDS, Outcome, fault_kinds, fleet, shares

from holdfast.job.spec import Recovery
from holdfast.plan.reliability import simulate

MEASURED = [
    Outcome(kind=kind.name, detected_s=number / 10 + late, restarted_s=1.0 + number)
    for number, kind in enumerate(KINDS)
    for late in (0.0, 0.2)
]


def test_simulated_run_has_the_measured_times_and_all_of_its_seconds() -> None:
    run = fleet(MEASURED, Recovery(max_restarts=1000), 0.05)
    assert (run.restart_s, run.requeue_s) == (2.0, 4.0)
    causes = fault_kinds(MEASURED)
    assert [each.detection.delay.mean_s for each in causes] == pytest.approx([0.1, 0.2, 0.3, 0.4])
    found = shares(simulate(run, causes, frozenset(), total_s=300.0, seed=1))
    assert sum(found.values()) == pytest.approx(1.0)
    assert found["training"] < 0.8
