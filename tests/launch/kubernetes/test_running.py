"""Runs on a real control plane, from a client that holds nothing but a kubeconfig."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast import api
from holdfast.events import AnyEvent, Outcome, RunFinished
from holdfast.folder import RunFolder
from holdfast.report.logs import rank_logs
from holdfast.report.status import Phase, RunStatus
from lab import Lab

pytestmark = pytest.mark.slow

WITHIN_S = 240.0

PROFILE = """
backend: kubernetes
namespace: {namespace}
user: {user}
volume: {{claim: home, size: 1GiB, storage_class: lab}}
workload: {workload}
"""

OF_EVERY_NAMESPACE = ("configmap/kube-root-ca.crt", "serviceaccount/default", "persistentvolumeclaim/home")
"""What is there whatever is run; the volume's claim outlives its runs."""


class Site:
    """A project whose profile `lab` is a namespace of the lab."""

    def __init__(self, lab: Lab, namespace: str, folder: Path) -> None:
        self.lab, self.namespace, self.folder = lab, namespace, folder
        self.profile("jobset")

    def profile(self, workload: str) -> None:
        profiles = self.folder / ".holdfast" / "profiles"
        profiles.mkdir(parents=True, exist_ok=True)
        text = PROFILE.format(namespace=self.namespace, user=os.geteuid(), workload=workload)
        (profiles / "lab.yaml").write_text(text)

    def start(self, *command: str, **job: Any) -> RunFolder:
        """Start two nodes with a command."""
        fields = [f"{name}={value}" for name, value in {"image": "none", "nodes": 2, **job}.items()]
        return api.start(api.load(None, command=command, overrides=fields), "lab", base=self.folder)

    def left(self) -> list[str]:
        """Every object in the namespace that is not always there."""
        kinds = self.lab.kubectl("api-resources", "--namespaced", "--verbs=list", "-o", "name").split()
        listed = ",".join(kind for kind in kinds if not kind.startswith("events"))
        found = self.lab.kubectl("get", listed, "-n", self.namespace, "-o", "name", "--ignore-not-found")
        return sorted(set(found.split()) - set(OF_EVERY_NAMESPACE))


@pytest.fixture
def site(lab: Lab, namespace: str, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.setenv("KUBECONFIG", str(lab.kubeconfig))
    project = tmp_path / "project"
    project.mkdir()
    yield Site(lab, namespace, project)
    for run in api.runs():
        lab.kubectl("delete", "jobset,trainjob,pytorchjob", "-n", namespace, "--all", "--wait=false")
        until(lambda run=run: not run.alive(), "its mirror is gone")


def until(reached: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + WITHIN_S
    while not reached():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


def reach(run: RunFolder, reached: Callable[[RunStatus], object]) -> RunStatus:
    """What is known of a run as soon as something holds."""
    until(lambda: reached(api.status(run)), f"{run.run}: {api.status(run)}")
    return api.status(run)


def to_its_end(run: RunFolder) -> tuple[RunFinished, list[AnyEvent]]:
    """A run's last event, and all that a client has heard of it."""
    deadline = time.monotonic() + WITHIN_S
    heard: list[AnyEvent] = []
    for event in api.follow(run):
        assert time.monotonic() < deadline, heard[-5:]
        heard += [event] if event else []
    assert isinstance(heard[-1], RunFinished)
    return heard[-1], heard


def test_run_goes_to_its_end_and_the_client_has_all_of_it(site: Site) -> None:
    (site.folder / "greet.py").write_text("import os; print('hello from', os.environ['RANK'], os.environ['TOLD'])\n")
    run = site.start("python", "greet.py", env='{"TOLD": "you"}')
    finished, _ = to_its_end(run)
    assert (finished.outcome, finished.exit_code) == (Outcome.SUCCEEDED, 0)
    assert [path.read_text() for path in rank_logs(run).values()] == ["hello from 0 you\n", "hello from 1 you\n"]
    until(lambda: not run.alive(), "its mirror has left")
    assert not run.secrets.exists()


def test_cancelled_run_leaves_nothing_behind(site: Site) -> None:
    run = site.start("python", "-c", "import time; print('up', flush=True); time.sleep(600)")
    reach(run, lambda known: known.phase is Phase.RUNNING)
    api.cancel(run)
    finished, _ = to_its_end(run)
    assert finished.outcome is Outcome.CANCELLED
    until(lambda: not site.left(), f"left: {site.left()}")
