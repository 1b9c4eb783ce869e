"""`status` of a waiting run, `run` on a cluster that refuses it, and targets made from what a cluster has."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path

import pytest
from tests.cli.conftest import Cli
from tests.launch.kubernetes.test_collect_inventory import CLAIM, rules, user
from tests.launch.kubernetes.test_pending_rules import QUEUE
from tests.waiting import until

from holdfast import api
from holdfast.errors import ExitCode
from holdfast.events import Outcome, RunFinished
from lab import Lab

pytestmark = pytest.mark.slow

WITHIN_S = 240.0
JOB = "image: none\ncommand: [sleep, '1000']\nnodes: 2\n"


@pytest.fixture
def project(lab: Lab, namespace: str, tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose target `lab` names a queue that is not there."""
    folder = tmp_path / "project"
    targets = folder / ".holdfast" / "targets"
    targets.mkdir(parents=True)
    (targets / "lab.yaml").write_text(
        f"kind: kubernetes\nnamespace: {namespace}\nuser: {os.geteuid()}\nqueue: nowhere\n"
    )
    (folder / "job.yaml").write_text(JOB)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("KUBECONFIG", str(lab.kubeconfig))
    return folder


def test_waiting_run_shows_the_reason_as_text_and_json(cli: Cli, project: Path, lab: Lab, namespace: str) -> None:
    run = api.start(api.load(project / "job.yaml"), "lab", base=project)
    try:
        until(lambda: (waits := api.pending_reason(run)) is not None and waits.code == "queue-missing")
        assert "there is no LocalQueue nowhere" in cli("status").out
        pending = cli("status", "-o", "json").data["pending"]
        assert pending["code"] == "queue-missing"
        assert pending["evidence"]
    finally:
        lab.kubectl("delete", "jobset", "--all", "-n", namespace, "--wait=false")
        until(lambda: not run.alive())


def test_user_who_may_do_just_what_check_asks_for_runs(
    project: Path, lab: Lab, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = project / ".holdfast" / "targets" / "lab.yaml"
    target.write_text(target.read_text().replace("queue: nowhere\n", ""))
    user(lab, namespace, "ann", rules({"namespace": namespace, "queue": None, "volume": None}), project / "ann")
    monkeypatch.setenv("KUBECONFIG", str(project / "ann"))
    run = api.start(api.load(None, command=("true",), overrides=("image=none", "nodes=2")), "lab", base=project)
    deadline = time.monotonic() + WITHIN_S
    for event in api.follow(run):
        assert time.monotonic() < deadline
        if isinstance(event, RunFinished):
            assert event.outcome is Outcome.SUCCEEDED
    until(lambda: not run.alive())


def test_cluster_that_is_not_there_is_one_finding_and_nothing_is_left(
    cli: Cli, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(project / "none"))
    for words in (("run", "job.yaml", "--on", "lab"), ("check", "--on", "lab")):
        answer = cli(*words)
        assert answer.code == ExitCode.NOT_FOUND
        assert "[no-kubeconfig]" in answer.err
        assert "Traceback" not in answer.err
    assert api.runs() == []


def test_check_lists_what_is_missing_and_the_verdict(cli: Cli, project: Path) -> None:
    answer = cli("check", "--on", "lab")
    assert answer.code == ExitCode.CANNOT_RUN_HERE
    assert "there is no queue nowhere" in answer.out
    document = cli("check", "--on", "lab", "-o", "json").data
    assert document["can_run"] is False
    assert "queue-missing" in [each["code"] for each in document["findings"]]
    assert cli("check", "--set", "image=any", "--on", "local").code == ExitCode.OK


TOPOLOGY = """
---
apiVersion: kueue.x-k8s.io/v1beta2
kind: Topology
metadata: {name: NAME}
spec: {levels: [{nodeLabel: cloud.provider.com/topology-block}, {nodeLabel: cloud.provider.com/topology-rack}]}
---
"""


def test_target_is_written_from_what_a_cluster_shows_and_checked(
    cli: Cli, project: Path, lab: Lab, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = project / "kubeconfig"
    config.write_text(lab.kubeconfig.read_text())
    kubectl = [*lab.kubectl_command()[:1], f"--kubeconfig={config}", "config"]
    for name, there in (("team", namespace), ("other", "default")):
        words = ("set-context", name, "--cluster=lab", "--user=admin", f"--namespace={there}")
        subprocess.run([*kubectl, *words], check=True, capture_output=True)
    subprocess.run([*kubectl, "use-context", "other"], check=True, capture_output=True)
    monkeypatch.setenv("KUBECONFIG", str(config))
    document = QUEUE.replace("QUOTA", "8").replace("STOP", "None").replace("ORDER", "BestEffortFIFO")
    document += TOPOLOGY + CLAIM.replace("MODE", "ReadWriteMany")
    try:
        lab.kubectl("create", "-f", "-", input=document.replace("NAME", namespace))
        answer = cli("target", "init", "kubernetes", "mine", "--context", "team")
        assert answer.out == "wrote .holdfast/targets/mine.yaml\nmine: can run a job\n"
        assert answer.code == ExitCode.OK
        made = cli("target", "mine", "-o", "json").data
        assert (made["context"], made["namespace"], made["workload"]) == ("team", namespace, "jobset")
        assert (made["queue"], made["volume"]["claim"]) == ("train", "checkpoints")
        assert made["gpu_resource"] == "nvidia.com/gpu"
        assert made["topology_levels"]["rack"] == "cloud.provider.com/topology-rack"
        assert "4 of 4 machines have 8 each" in (project / ".holdfast" / "targets" / "mine.yaml").read_text()

        again = cli("target", "init", "kubernetes", "mine", "-o", "json")
        assert (again.code, json.loads(again.err)["findings"][0]["code"]) == (ExitCode.USAGE, "file-exists")
        replaced = cli("target", "init", "kubernetes", "mine", "-n", "nowhere", "--overwrite", "-o", "json")
        assert (replaced.code, replaced.data["can_run"]) == (ExitCode.CANNOT_RUN_HERE, False)
        assert "namespace-missing" in [each["code"] for each in replaced.data["findings"]]
        assert cli("target", "mine", "-o", "json").data["context"] == "other"

        user(lab, namespace, "ann", rules({"namespace": namespace, "queue": None, "volume": None}), project / "ann")
        monkeypatch.setenv("KUBECONFIG", str(project / "ann"))
        assert cli("target", "init", "kubernetes", "hers", "-n", namespace).out.endswith("hers: can run a job\n")
        written = (project / ".holdfast" / "targets" / "hers.yaml").read_text()
        assert "this user may not list LocalQueues" in written
        assert "this user may not list machines" in written
    finally:
        for kind in ("clusterqueue", "resourceflavor", "topology"):
            lab.kubectl("delete", kind, namespace, "--ignore-not-found", "--wait=false")


def test_template_of_a_config_map_is_fetched_once_and_a_changed_version_is_refused(
    cli: Cli, project: Path, lab: Lab, namespace: str
) -> None:
    def publish(key: str, text: str) -> None:
        (project / key).write_text(text)
        files = [f"--from-file={each}" for each in project.glob("[0-9].yaml")]
        manifest = lab.kubectl("create", "configmap", "gpu", "-n", namespace, "--dry-run=client", "-o", "yaml", *files)
        lab.kubectl("apply", "--server-side", "-f", "-", input=manifest)

    target = project / ".holdfast" / "targets" / "vision.yaml"
    target.write_text(f"extends: configmap://{namespace}/gpu:3\nnamespace: {namespace}\n")
    assert "[template-not-published]" in cli("target", "fetch", "vision").err
    publish("3.yaml", "kind: kubernetes\nqueue: nowhere\n")
    assert "[template-not-fetched]" in cli("check", "--on", "vision").err
    fetched = cli("target", "fetch", "vision", "-o", "json").data
    assert fetched["file"] == str(target.parent / "templates" / namespace / "gpu" / "3.yaml")
    assert cli("target", "vision", "-o", "json").data["queue"] == "nowhere"
    checked = cli("check", "--on", "vision")
    assert "there is no queue nowhere" in checked.out
    assert "template-changed" not in checked.out

    publish("4.yaml", "kind: kubernetes\nqueue: train\n")
    assert cli("target", "fetch", "vision", "-o", "json").data["versions"] == ["3", "4"]
    publish("3.yaml", "kind: kubernetes\nqueue: other\n")
    refused = cli("target", "fetch", "vision")
    assert refused.code == ExitCode.INVALID_JOB
    assert "[template-changed]" in refused.err
    assert "[template-changed]" in cli("check", "--on", "vision").out
    assert cli("target", "vision", "-o", "json").data["queue"] == "nowhere"
