"""Requests that fail, and an API server that is away: nothing of a pod is forgotten, and no other pod suffers."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest
from tests.lab.lab_namespace import LabNamespace, alive
from tests.waiting import until

from holdfast.errors import HoldfastError
from lab import Lab, state

pytestmark = pytest.mark.slow

NOBODY = "https://127.0.0.1:1/"
"""Where no webhook listens."""


class HeldPod:
    """A pod `p` that ends only when permitted; each signal it receives leaves a file."""

    def __init__(self, space: LabNamespace, folder: Path) -> None:
        self.space = space
        self.folder = folder
        self._there, self._told, self._may_end = (folder / name for name in ("there", "told", "may-end"))
        wait = f"while [ ! -e {self._may_end} ]; do sleep 0.05; done"
        space.pod(f"trap 'touch {self._told}' TERM; touch {self._there}; {wait}", terminationGracePeriodSeconds=1000)
        until(self._there.exists, "the pod runs")
        space.phase("Running")
        self.uid = space.get("pod", "p")["metadata"]["uid"]

    def delete(self) -> None:
        """Have it deleted; returns when it has been told to end."""
        self.space("delete", "pod", "p", "--wait=false")
        until(self._told.exists, "the pod is told")

    def end(self) -> None:
        """Let it end; returns when nothing of it runs."""
        self._may_end.touch()
        until(lambda: not alive(self.uid), "its processes end")

    @property
    def is_listed(self) -> bool:
        return bool(self.space("get", "pods", "-o", "name"))


@pytest.fixture
def held(space: LabNamespace, tmp_path: Path) -> HeldPod:
    return HeldPod(space, tmp_path)


def kubelet_of(lab: Lab) -> object:
    known = state.load(lab.folder)
    assert known is not None
    return known.processes["kubelet"]


Tried = Callable[[str], None]


def _tried(lab: Lab) -> Tried:
    """Waits until the kubelet has tried and failed, from now on, with this text."""
    path = lab.folder / "log" / "kubelet.log"
    begins = path.stat().st_size
    return lambda words: until(lambda: words.encode() in path.read_bytes()[begins:], f"the kubelet tries: {words}")


@contextlib.contextmanager
def nobody_answers(lab: Lab) -> Generator[Tried]:
    """The API server is away."""
    tried = _tried(lab)
    lab.kill("kube-apiserver")
    try:
        yield tried
    finally:
        lab.start("kube-apiserver")


@contextlib.contextmanager
def nobody_judges(lab: Lab, space: LabNamespace) -> Generator[Tried]:
    """No pod is deleted in the namespace: a webhook that is to be asked is down."""
    tried = _tried(lab)
    webhook = {
        "name": "down.lab.holdfast",
        "clientConfig": {"url": NOBODY},
        "rules": [{"apiGroups": [""], "apiVersions": ["v1"], "operations": ["DELETE"], "resources": ["pods"]}],
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": space.name}},
        "failurePolicy": "Fail",
        "sideEffects": "None",
        "admissionReviewVersions": ["v1"],
    }
    kind = {"apiVersion": "admissionregistration.k8s.io/v1", "kind": "ValidatingWebhookConfiguration"}
    space.create({**kind, "metadata": {"name": space.name}, "webhooks": [webhook]})

    def refused() -> bool:
        try:
            space("delete", "pod", "p", "--dry-run=server", "--grace-period=0", "--force", "--wait=false")
        except HoldfastError as error:
            return "down.lab.holdfast" in str(error)
        return False

    try:
        until(refused, "the webhook is asked")
        yield tried
    finally:
        lab.kubectl("delete", "validatingwebhookconfiguration", space.name)


def test_pod_that_ends_while_the_api_server_is_away_is_removed_once_it_is_back(lab: Lab, held: HeldPod) -> None:
    held.delete()
    with nobody_answers(lab) as tried:
        held.end()
        tried(f"{held.space.name}/pods/p")
    until(lambda: not held.is_listed, "the pod is gone")


def test_pod_deleted_while_its_status_was_not_taken_is_told_to_have_ended(lab: Lab, held: HeldPod) -> None:
    with nobody_answers(lab) as tried:
        held.end()
        tried(f"{held.space.name}/pods/p")
    status = held.space.phase("Succeeded")
    assert status["containerStatuses"][0]["state"]["terminated"]["exitCode"] == 0
    held.space("delete", "pod", "p", "--timeout=60s")


def test_removal_that_is_refused_is_asked_for_again_and_the_kubelet_lives(lab: Lab, held: HeldPod) -> None:
    kubelet = kubelet_of(lab)
    held.delete()
    with nobody_judges(lab, held.space) as tried:
        held.end()
        tried(f"the end of /api/v1/namespaces/{held.space.name}/pods/p")
        held.space("annotate", "pod", "p", "seen=again")
        assert held.is_listed
    until(lambda: not held.is_listed, "the pod is gone")
    assert kubelet_of(lab) == kubelet


def test_pod_that_waited_for_a_secret_while_the_api_server_was_away_runs(lab: Lab, space: LabNamespace) -> None:
    reference = {"valueFrom": {"secretKeyRef": {"name": "s", "key": "word"}}}
    space.pod("echo $WORD", container={"env": [{"name": "WORD", **reference}]})

    def waits() -> Any:
        found = space.get("pod", "p")["status"].get("containerStatuses", ())
        return any("not found" in each["state"].get("waiting", {}).get("message", "") for each in found)

    until(waits, "it waits for the secret")
    with nobody_answers(lab) as tried:
        tried(f"status of /api/v1/namespaces/{space.name}/pods/p")
    space.create({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "s"}, "stringData": {"word": "heard"}})
    space.phase("Succeeded")
    assert space("logs", "p") == "heard\n"


def test_pod_that_waits_for_ever_is_deleted_after_the_api_server_was_away(lab: Lab, space: LabNamespace) -> None:
    claim = {"persistentVolumeClaim": {"claimName": "none"}}
    space.pod("true", volumes=[{"name": "v", **claim}], schedulerName="nobody", nodeName="node-0")
    until(lambda: "not bound" in json.dumps(space.get("pod", "p")["status"]), "it waits for its volume")
    with nobody_answers(lab) as tried:
        tried(f"status of /api/v1/namespaces/{space.name}/pods/p")
    space("delete", "pod", "p", "--timeout=60s")
