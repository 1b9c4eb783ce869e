"""Cases of tests/runs/test_targets.py that test_cluster_runs.py does not show, on a real control plane."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Iterator

import pytest
from tests.launch.kubernetes.test_cluster_runs import CLAIM, TORCH_FREE_TRAINER, objects_left
from tests.runs import test_targets as cases
from tests.runs.conftest import Runs, WatchedRun
from tests.runs.target_fixtures import write_target
from tests.waiting import until

from holdfast import api
from lab import Lab, NodeState

pytestmark = pytest.mark.slow

RACK = "cloud.provider.com/topology-rack"
MACHINE = {"cpu": 100}
"""More than half of a machine's, so that two nodes share none."""


class ClusterSite(cases.Site):
    """A namespace of the lab, where the nodes of the targets `all` and `two` have two machines each."""

    def start(self, steps: int, target: str, *overrides: str) -> WatchedRun:
        fields = ("image=none", "checkpoint=checkpoints", f"resources={json.dumps(MACHINE)}", *overrides)
        return super().start(steps, target, *fields)


@pytest.fixture(scope="module")
def site(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[cases.Site]:
    base, namespace = tmp_path_factory.mktemp("site"), f"survival-{secrets.token_hex(4)}"
    shutil.copy(TORCH_FREE_TRAINER, base / "trainer.py")
    lab.kubectl("create", "namespace", namespace)
    for target, rack in (("all", "b0-r1"), ("two", "b0-r0")):
        place = {
            "kind": "kubernetes",
            "namespace": namespace,
            "user": os.geteuid(),
            "volume": CLAIM,
            "node_selector": {RACK: rack},
            "controller": {"node_selector": {RACK: "b0-r1"}},
        }
        write_target(base, target, json.dumps(place))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOLDFAST_HOME", str(base / "home"))
        patch.setenv("KUBECONFIG", str(lab.kubeconfig))
        made = ClusterSite(
            "kubernetes",
            Runs(base),
            lambda machine: lab.set_state(machine, NodeState.OFF),
            lambda machine: lab.set_state(machine, NodeState.ON),
        )
        yield made
        made.drop()
        until(lambda: not objects_left(lab, namespace), f"left: {objects_left(lab, namespace)}")
        for run in api.runs():
            until(lambda run=run: not run.alive(), "its mirror is gone")
    for machine in made.killed:
        made.start_machine(machine)
    lab.kubectl("delete", "namespace", namespace, "--wait=false")


survivor = cases.survivor
test_rank_that_raises_is_recovered = cases.test_rank_that_raises_is_recovered_and_its_error_is_shown
test_stopped_rank_is_taken_for_hung = cases.test_stopped_rank_is_taken_for_hung_and_named
test_every_attempt_ran_the_code_of_the_start = cases.test_every_attempt_ran_the_code_of_the_start
test_elastic_run_continues_on_fewer_machines = cases.test_elastic_run_continues_on_fewer_machines
